"""What an error advises works in the case at hand: each advice about an option is followed.

A case provokes an error, and for each way out that the error names it has the options that follow
it. Of the modules that check options, every error that names an option to use has a case, or the
reason why it has none.
"""

import ast
import re
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint

import tensorstow.deepspeed as deepspeed
from ranks.driven import closing as closing_engine
from tensorstow import AdamW, Budget, PipelinePolicy, Plan, StowedOptimizer, stow
from tensorstow.base.errors import DTypeError, OptionError
from tensorstow.colossalai import HybridAdam
from tensorstow.fsdp import validation as placement_checks
from tensorstow.optim import options

ROOT = Path(__file__).parents[2] / "src" / "tensorstow"
OUT: Any = object()
"""The option is left out."""


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def train(net: nn.Module, optimizer: Any, clip: float | None = None) -> None:  # noqa: ANN401
    net(torch.ones(2, 8)).square().mean().backward()
    if clip is not None:
        optimizer.clip_grad_norm_(clip)
    optimizer.step()
    optimizer.zero_grad()


# --- what is done with options ---


def adam(clip: float | None = None, **given: Any) -> None:  # noqa: ANN401
    net = model()
    if given.get("module") == "ddp":
        given["module"] = nn.parallel.DistributedDataParallel.__new__(
            nn.parallel.DistributedDataParallel
        )
        nn.Module.__init__(given["module"])
        given["module"].module = net
    elif "module" in given:
        given["module"] = {"model": net}.get(given["module"], given["module"])
    with AdamW(net.parameters(), **given) as optimizer:
        train(net, optimizer, clip)


def averaged(**given: Any) -> None:  # noqa: ANN401
    net = model().bfloat16()
    with AdamW(net.parameters(), **given) as optimizer:
        net(torch.ones(2, 8).bfloat16()).square().mean().backward()
        optimizer.step()
        with optimizer.averaged(net):
            pass


def summed(dtype: torch.dtype = torch.bfloat16, **given: Any) -> None:  # noqa: ANN401
    weight = nn.Parameter(torch.ones(8, 8, dtype=dtype))
    weight.grad_dtype = None
    weight.grad = torch.ones(8, 8)
    with closing(StowedOptimizer(torch.optim.SGD, [weight], lr=0.1, **given)) as optimizer:
        optimizer.step()


def generic(kind: type[Optimizer] = torch.optim.SGD, size: int = 8, **given: Any) -> None:  # noqa: ANN401
    weight = nn.Parameter(torch.ones(size, 8))
    with closing(
        StowedOptimizer(kind, [weight], lr=0.1, **{"states": "disk", **given})
    ) as optimizer:
        weight.square().sum().backward()
        optimizer.step()


def placed(
    net: Callable[[], nn.Module] = model,
    optimizer: Any = AdamW,  # noqa: ANN401
    clip: float | None = None,
    **given: Any,  # noqa: ANN401
) -> None:
    placed, made = stow(net(), optimizer, **given)
    with closing(made):
        train(placed, made, clip)


def read_only(**given: Any) -> None:  # noqa: ANN401
    stow(model(), None, **given)


def mixed(second: torch.dtype) -> nn.Module:
    net = model()
    net[1].to(second)
    net[1].register_forward_pre_hook(lambda module, x: (x[0].to(module.weight.dtype),))
    return net


class Mixed(nn.Sequential):
    """One unit of two dtypes, unless its parts are units."""

    def __init__(self, second: torch.dtype) -> None:
        super().__init__(mixed(second))


def with_scalar(shape: tuple[int, ...]) -> nn.Module:
    net = model()
    net.scale = nn.Parameter(torch.ones(shape))
    return net


def sparse(*, sparse: bool, takes: Callable[[nn.Module], Optimizer] | None) -> None:
    net = nn.Sequential(nn.Embedding(9, 4, sparse=sparse))
    made = stow(net, AdamW, plan=Plan())[1] if takes is None else takes(net)
    net(torch.tensor([1, 2])).sum().backward()
    made.step()


def scaled(**given: Any) -> None:  # noqa: ANN401
    net = model()
    with AdamW(net.parameters(), **given | ({"module": net} if "module" in given else {})) as made:
        (4 * net(torch.ones(2, 8)).sum()).backward()
        made._step_scaled(4.0)


def normed(**given: Any) -> None:  # noqa: ANN401
    net = model()
    with AdamW(net.parameters(), module=net, **given) as made:
        net(torch.ones(2, 8)).sum().backward()
        made.grad_norm()


def twice(*, inside: bool = False, **given: Any) -> None:  # noqa: ANN401
    net = model()
    with AdamW(net.parameters(), **given) as optimizer:
        with optimizer.accumulate() if inside else nullcontext():
            net[0](torch.ones(2, 8)).sum().backward()
        net[1](torch.ones(2, 8)).sum().backward()
        optimizer.step()


def checkpointed(*, use_reentrant: bool, **given: Any) -> None:  # noqa: ANN401
    net = model()
    with AdamW(net.parameters(), **given) as optimizer:
        x = torch.ones(2, 8, requires_grad=True)
        for block in net:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        x.sum().backward()
        optimizer.step()


def looked_at(overlap: Any, **given: Any) -> None:  # noqa: ANN401
    net = model()
    given |= {"module": net} if "module" in given else {}
    with AdamW(net.parameters(), overlap=overlap, **given) as optimizer:
        net(torch.ones(2, 8)).sum().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()


def policy(**given: Any) -> None:  # noqa: ANN401
    rest: dict[str, Any] = {"policy": None, "state_format": None, "amsgrad": False}
    options.offload_policy(options.placement("host", None, None), **rest | given)


def on_mesh(shape: tuple[int, ...] | None) -> None:
    if shape is not None:
        names = ("replicate", "shard")[-len(shape) :]
        mesh: Any = SimpleNamespace(
            mesh_dim_names=names, shape=shape, ndim=len(shape), device_type="cpu", size=lambda: 4
        )
        placement_checks.validate_mesh(mesh, Plan(stage=0), torch.device("cpu"))


def two(*, first: Any, second: Any, closes: bool) -> None:  # noqa: ANN401
    net = model()
    one = AdamW(net.parameters(), overlap=first, module=net)
    other = AdamW(net.parameters(), overlap=second, module=net)
    if closes:
        one.close()
    net(torch.ones(2, 8)).sum().backward()
    for optimizer in [other] if closes else [one, other]:
        optimizer.step()


def committed(call: str) -> None:
    net = model()
    if call == "generic":
        StowedOptimizer(torch.optim.SGD, net.parameters(), lr=0.1).commit()
    with AdamW(net.parameters(), dir="run") as optimizer:
        train(net, optimizer)
        optimizer.commit()


def moved(**extra: Any) -> None:  # noqa: ANN401
    net = model()
    with AdamW(net.parameters(), dir="run", commit_every=None) as optimizer:
        train(net, optimizer)
        optimizer.commit({"seen": 1})
        optimizer.commit_to("elsewhere", **extra)


def with_reference_in_extra(checkpoints: Any) -> None:  # noqa: ANN401
    net = model()
    made: list[AdamW] = []
    given: dict[str, Any] = {"checkpoints": checkpoints, "commit_every": None}
    with AdamW(
        net.parameters(), dir="run", extra=lambda: {"own": made[0].state_dict()}, **given
    ) as optimizer:
        made.append(optimizer)
        train(net, optimizer)
        optimizer.commit()


def engine(*, overlap: Any, on_disk: bool, clips: bool, scales: bool) -> None:  # noqa: ANN401
    zero: dict[str, Any] = {"stage": 3}
    for section in ("offload_optimizer", "offload_param") if on_disk else ():
        zero[section] = {"device": "nvme", "nvme_path": "."}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    }
    config |= {"gradient_clipping": 1.0 if clips else 0.0}
    config |= {"fp16": {"enabled": True, "initial_scale_power": 1}} if scales else {}
    with closing_engine(
        deepspeed.initialize(model=model(), config=config, overlap=overlap)[0]
    ) as made:
        dtype = next(made.module.parameters()).dtype
        made.backward(made(torch.ones(2, 8, dtype=dtype)).float().sum())
        made.step()


class Own(Optimizer):
    """A class that nobody knows."""

    def __init__(self, params: Any, lr: float) -> None:  # noqa: ANN401
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, self.state[p], group["lr"])

    def update(self, p: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        del state
        p.sub_(lr * p.grad)


class KeepsTheGradient(Own):
    def update(self, p: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        super().update(p, state, lr)
        state["last"] = p.grad


class KeepsColumns(Own):
    def update(self, p: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        super().update(p, state, lr)
        state["last"] = p.grad.clone().expand(2, *p.shape)


# --- the cases ---


@dataclass(frozen=True)
class Case:
    """An error, and the ways out that it names."""

    site: str
    """A part of the error's text in the source."""
    act: Callable[..., object]
    given: dict[str, Any]
    ways: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By a part of the error's text, what changes in ``given``."""

    def __str__(self) -> str:
        return f"{self.site} {self.given}"[:70]


DISK, BESIDE = Plan(parameters="disk"), Plan(parameters="disk", overlap="backward")
SCRATCH, FORWARD, TWICE = (
    Plan(states="disk"),
    Plan(overlap="forward"),
    DISK.but(accumulation_steps=2),
)
ADAM = {"optimizer": AdamW}
STOWED = {"optimizer": partial(StowedOptimizer, SGD, lr=0.1)}
LEFT = "Leave it out"
NOT_FINAL = "of a step are final"
CLIPS = "gradients are used before"
SCALES = "A GradScaler (or div_scale) was used"
BUFFERS = "and no unit's parameters are on disk"
ROUNDS = "it lets each weight on HOST or DISK be read once"


CASES = [
    # Plans.
    Case(
        "whose weights and gradients are in host memory",
        Plan,
        {"update_on": "device", "parameters": "host"},
        {
            'Use update_on="host"': {"update_on": "host"},
            "place all parameters on the device": {"parameters": "device"},
        },
    ),
    Case(
        " device are not waited for",
        Plan,
        {"update_on": "device", "parameters": "device", "overlap": "forward"},
        {
            'overlap="backward"': {"overlap": "backward"},
            'or "none"': {"overlap": "none"},
            'update_on="host"': {"update_on": "host"},
        },
    ),
    Case(
        "an update is undone from a second",
        Plan,
        {"overlap": "speculative", "states": "host"},
        {'Use overlap="forward"': {"overlap": "forward"}},
    ),
    Case(
        "states live on the host or on disk",
        Plan,
        {"states": "device"},
        {'states="host"': {"states": "host"}},
    ),
    Case(
        "was given with states in host memory",
        Plan,
        {"ram_budget": "1GiB"},
        {LEFT: {"ram_budget": OUT}, 'say states="disk"': {"states": "disk"}},
    ),
    Case(
        ROUNDS,
        Plan,
        {"micro_batches": 2, "stage": 2, "parameters": "host"},
        {LEFT: {"micro_batches": OUT}, "say stage=3": {"stage": 3}},
    ),
    Case(
        ROUNDS,
        Plan,
        {"micro_batches": 2, "parameters": "device"},
        {LEFT: {"micro_batches": OUT}, 'say parameters="host"': {"parameters": "host"}},
    ),
    Case(
        ROUNDS,
        Plan,
        {"micro_batches": 2, "stage": 1, "parameters": "device"},
        {
            LEFT: {"micro_batches": OUT},
            'say stage=3 and parameters="host"': {"stage": 3, "parameters": "host"},
        },
    ),
    Case(
        ROUNDS,
        Plan,
        {"micro_batches": 2, "parameters": "device", "update_on": "device"},
        {"Leave it out.": {"micro_batches": OUT}},
    ),
    Case(
        BUFFERS,
        Plan,
        {"weight_ram_budget": "1GiB"},
        {LEFT: {"weight_ram_budget": OUT}, 'say parameters="disk"': {"parameters": "disk"}},
    ),
    *(
        Case(
            BUFFERS,
            Plan,
            {"weight_ram_budget": "1GiB", **more},
            {"Leave it out.": {"weight_ram_budget": OUT}},
        )
        for more in (
            {"stage": 2},
            {"parameters": "device", "update_on": "device"},
        )
    ),
    Case(
        "and no unit's activations are on disk",
        Plan,
        {"activation_ram_budget": "1GiB"},
        {LEFT: {"activation_ram_budget": OUT}, 'say activations="disk"': {"activations": "disk"}},
    ),
    Case(
        "was given with no parameters in host memory",
        Plan,
        {"device_budget": "1GiB", "parameters": "device"},
        {LEFT: {"device_budget": OUT}, 'say parameters="host"': {"parameters": "host"}},
    ),
    Case(
        "was given with no parameters in host memory",
        Plan,
        {"device_budget": "1GiB", "parameters": "device", "update_on": "device"},
        {"Leave it out.": {"device_budget": OUT}},
    ),
    Case(
        "no copy would be used again",
        Plan,
        {"device_budget": "1GiB", "parameters": "host", "stage": 2},
        {LEFT: {"device_budget": OUT}, "say stage=3": {"stage": 3}},
    ),
    # stow().
    Case(
        "was given without an optimizer",
        read_only,
        {"tokens": 5},
        {LEFT: {"tokens": OUT}},
    ),
    Case(
        "= only applies",
        placed,
        {"plan": Plan(), "budget": Budget()},
        {
            'plan="auto"': {"plan": "auto"},
            "leave it out": {"budget": OUT},
            "omit plan=": {"plan": OUT},
        },
    ),
    Case(
        "no accelerator to update on",
        placed,
        {"plan": Plan(parameters="device", update_on="device")},
        {
            "Leave update_on out": {"plan": Plan(parameters="device")},
            'or say "host"': {"plan": Plan(parameters="device", update_on="host")},
        },
    ),
    Case(
        "no accelerator for copies of units to stay on",
        placed,
        {"plan": Plan(parameters="host", device_budget="1GiB")},
        {LEFT: {"plan": Plan(parameters="host")}},
    ),
    Case(
        'activations="host" was given',
        placed,
        {"plan": Plan(activations="host")},
        {
            'Say "keep"': {"plan": Plan(activations="keep")},
            '"recompute"': {"plan": Plan(activations="recompute")},
            'or "disk"': {"plan": Plan(activations="disk")},
        },
    ),
    Case(
        "which shares nothing, with a mesh that cuts",
        on_mesh,
        {"shape": (4,)},
        {"leave mesh out": {"shape": None}, "give one of shape (4, 1)": {"shape": (4, 1)}},
    ),
    Case(
        "reduces a unit's gradients in one",
        placed,
        {"net": partial(Mixed, torch.bfloat16), "plan": DISK, "units": []},
        {"Cast it to one dtype": {"net": partial(Mixed, torch.float32)}},
    ),
    Case(
        "which FSDP2 cannot shard, and which stays plain",
        placed,
        {"net": partial(with_scalar, ()), "plan": DISK, "compute_dtype": torch.bfloat16},
        {"make it one of shape (1,)": {"net": partial(with_scalar, (1,))}},
    ),
    Case(
        "with sparse=True: its",
        sparse,
        {"sparse": True, "takes": None},
        {"Make it with sparse=False": {"sparse": False}},
    ),
    *(
        Case(
            "Say it in one place",
            placed,
            {"optimizer": partial(AdamW, **given), "plan": plan},
            {"leave it out": {"optimizer": AdamW}, **ways},
        )
        for given, plan, ways in (
            (
                {"overlap": "forward"},
                DISK.but(overlap="none"),
                {'overlap="forward" in': {"plan": DISK.but(overlap="forward"), **ADAM}},
            ),
            ({"states": 0.5}, Plan(), {}),
            ({"states": "disk"}, Plan(), {'states="disk" in the plan': {"plan": SCRATCH}}),
            (
                {"overlap": "forward"},
                Plan(overlap="none"),
                {'overlap="forward" in': {"plan": FORWARD, **ADAM}},
            ),
            ({"update_on": "device"}, Plan(update_on="host"), {}),
            ({"accumulation_steps": 2}, DISK, {"accumulation_steps=2 in": {"plan": TWICE, **ADAM}}),
        )
    ),
    *(
        Case(
            "Say it in one place",
            placed,
            {"optimizer": partial(HybridAdam, nvme_offload_fraction=share), "plan": Plan()},
            {"leave it out": {"optimizer": HybridAdam}, 'states="disk" in': {"plan": SCRATCH}},
        )
        for share in (0.5, 1.0)
    ),
    Case(
        "Say it in one place",
        placed,
        {"optimizer": partial(AdamW, dir="a"), "plan": SCRATCH, "dir": "b"},
        {"leave it out": {"optimizer": AdamW}, "leave dir= of stow out": {"dir": OUT}},
    ),
    *(
        Case("of torch was given", placed, {"optimizer": torch_class, "plan": plan}, ways)
        for torch_class, plan, ways in (
            (
                partial(SGD, lr=0.1),
                Plan(),
                {"partial(tensorstow.StowedOptimizer, torch.optim.SGD), lr=0.1": STOWED},
            ),
            (
                partial(SGD, lr=0.1),
                SCRATCH,
                {"tensorstow.StowedOptimizer, torch.optim.SGD), lr=0.1": STOWED},
            ),
            (partial(SGD, lr=0.1), DISK, {"Use stow(model, tensorstow.AdamW)": ADAM}),
            (partial(SGD, lr=0.1), FORWARD, {"Use stow(model, tensorstow.AdamW)": ADAM}),
            (torch.optim.AdamW, BESIDE, {"Use stow(model, tensorstow.AdamW)": ADAM}),
        )
    ),
    *(
        Case(
            "A StowedOptimizer was to update",
            placed,
            {**STOWED, "plan": plan},
            {
                "Use tensorstow.AdamW": {"optimizer": AdamW},
                "a plan without that": {"plan": Plan()},
            },
        )
        for plan in (DISK, FORWARD, BESIDE)
    ),
    Case(
        "gradients have been used by then",
        normed,
        {"overlap": "backward"},
        {'Use overlap="forward"': {"overlap": "forward"}, 'or "none"': {"overlap": "none"}},
    ),
    # DeepSpeed's engine.
    *(
        Case(
            site,
            engine,
            {"overlap": overlap, "on_disk": on_disk, "clips": clips, "scales": scales},
            ways,
        )
        for site, overlap, on_disk, clips, scales, ways in (
            (
                *(NOT_FINAL, "backward", True, True, True),
                {
                    'overlap="none"': {"overlap": "none"},
                    '"forward"': {"overlap": "forward"},
                    "leave gradient_clipping and fp16 out": {"clips": False, "scales": False},
                },
            ),
            (
                *(NOT_FINAL, "backward", False, True, False),
                {
                    'overlap="none"': {"overlap": "none"},
                    '"forward"': {"overlap": "forward"},
                    "leave gradient_clipping out": {"clips": False},
                },
            ),
        )
    ),
    # Optimizers.
    Case(
        "which puts nothing on disk",
        adam,
        {"dir": "scratch", "durability": "none"},
        {"Leave dir out": {"dir": OUT}, 'use states="disk"': {"states": "disk"}},
    ),
    Case(
        "which puts nothing on disk",
        adam,
        {"ram_budget": "64MiB"},
        {"Leave ram_budget out": {"ram_budget": OUT}, 'use states="disk"': {"states": "disk"}},
    ),
    Case(
        'durability="commit" was requested without dir=',
        adam,
        {"durability": "commit"},
        {"pass the directory": {"dir": "run"}},
    ),
    Case(
        'checkpoints="reference" was given, and the states are scratch',
        adam,
        {"checkpoints": "reference"},
        {"as dir=": {"dir": "run"}},
    ),
    Case(
        'checkpoints="reference" was given, and the states are scratch',
        adam,
        {"checkpoints": "reference", "states": "disk", "dir": "run", "durability": "none"},
        {"leave durability out": {"durability": OUT}},
    ),
    Case(
        "it cannot hold the running",
        adam,
        {"state_format": "bf16", "amsgrad": True},
        {'Use "split"': {"state_format": "split"}, 'or "fp32"': {"state_format": "fp32"}},
    ),
    Case(
        "which stores no fp32 master",
        averaged,
        {"ema": 0.9, "state_format": "split"},
        {
            "Leave state_format out": {"state_format": OUT},
            'or use "fp32"': {"state_format": "fp32"},
        },
    ),
    Case("this optimizer keeps no averages", averaged, {}, {"Pass ema=": {"ema": 0.9}}),
    Case(
        "is an empty list",
        adam,
        {"dir": []},
        {"name at least one directory": {"dir": ["run"]}, "leave it out": {"dir": OUT}},
    ),
    Case(
        '("." for this one)',
        adam,
        {"dir": ""},
        {'name a directory ("." for this one)': {"dir": "."}, "leave it out": {"dir": OUT}},
    ),
    Case(
        "which does not need it",
        adam,
        {"accumulation_steps": 2},
        {LEFT: {"accumulation_steps": OUT}},
    ),
    Case(
        'overlap="forward" was requested without module=',
        adam,
        {"overlap": "forward"},
        {"Pass module=model": {"module": "model"}},
    ),
    Case(
        "names, buffers and hooks would be those",
        adam,
        {"module": nn.Linear(2, 2)},
        {"Pass the model": {"module": "model"}, "leave module out": {"module": OUT}},
    ),
    Case(
        "in a run of several ranks: a gradient is not final",
        adam,
        {"module": "ddp", "overlap": "backward"},
        {'Use overlap="none"': {"overlap": "none"}},
    ),
    Case(
        "Leave it out, or use torch.optim",
        adam,
        {"foreach": True},
        {LEFT: {"foreach": OUT}},
    ),
    Case(
        "Move the model to it before you create",
        adam,
        {"update_on": "device"},
        {'use update_on="host"': {"update_on": "host"}},
    ),
    Case(
        "a forward cannot wait for updates on the device module",
        policy,
        {"overlap": "forward", "update_on": "device"},
        {
            'Use overlap="none"': {"overlap": "none"},
            'update_on="host"': {"update_on": "host"},
        },
    ),
    Case(
        'is being updated by another optimizer, which has overlap="forward"',
        two,
        {"first": "forward", "second": "none", "closes": False},
        {'overlap="none", without defer_untouched, and close()': {"first": "none", "closes": True}},
    ),
    Case(
        "is in two optimizers, and the gradient is used up",
        two,
        {"first": "backward", "second": "none", "closes": False},
        {'overlap="none", and close()': {"first": "none", "closes": True}},
    ),
    Case(
        "is sparse, and updates run over all elements",
        sparse,
        {"sparse": True, "takes": lambda net: AdamW(net.parameters())},
        {
            "sparse=False": {"sparse": False},
            "torch.optim.SparseAdam": {"takes": lambda n: torch.optim.SparseAdam(n.parameters())},
        },
    ),
    Case(
        "was called without extra=",
        moved,
        {},
        {"Pass extra=": {"extra": {"seen": 1}}, "{} means none": {"extra": {}}},
    ),
    Case(
        "reference needs a commit. Leave it out",
        with_reference_in_extra,
        {"checkpoints": "reference"},
        {'use checkpoints="full"': {"checkpoints": "full"}},
    ),
    # Updates beside backward.
    Case(
        CLIPS,
        adam,
        {"overlap": "backward", "module": "model", "clip": 1.0},
        {'overlap="forward"': {"overlap": "forward"}, 'or "none"': {"overlap": "none"}},
    ),
    Case(
        CLIPS,
        adam,
        {"overlap": "backward", "clip": 1.0},
        {'Use overlap="none", which': {"overlap": "none"}},
    ),
    Case(
        CLIPS,
        placed,
        {"plan": BESIDE, "clip": 1.0},
        {
            'Use overlap="forward"': {"plan": BESIDE.but(overlap="forward")},
            'or "none"': {"plan": BESIDE.but(overlap="none")},
        },
    ),
    Case(
        SCALES,
        scaled,
        {"overlap": "backward"},
        {'Use overlap="none", or': {"overlap": "none"}},
    ),
    Case(
        SCALES,
        scaled,
        {"overlap": "backward", "module": True},
        {'overlap="forward"': {"overlap": "forward"}, 'or "none"': {"overlap": "none"}},
    ),
    Case(
        "Gradients of one step came from two backward passes",
        twice,
        {"overlap": "backward"},
        {
            "accumulation_steps=": {"accumulation_steps": 2},
            "with optimizer.accumulate()": {"inside": True},
            'or overlap="none"': {"overlap": "none"},
        },
    ),
    Case(
        "Gradients of one step came from two backward passes",
        checkpointed,
        {"overlap": "backward", "use_reentrant": True},
        {
            "use use_reentrant=False": {"use_reentrant": False},
            'or overlap="none"': {"overlap": "none"},
        },
    ),
    Case(
        "was called on a gradient that its update has used already",
        looked_at,
        {"overlap": "backward"},
        {
            'needs overlap="none"': {"overlap": "none"},
            '"forward"': {"overlap": "forward", "module": True},
            'or "speculative"': {"overlap": "speculative", "states": "disk"},
        },
    ),
    # Classes of torch's.
    Case(
        "is not known to update each parameter by itself",
        generic,
        {"kind": Own},
        {"pass per_parameter=True": {"per_parameter": True}},
    ),
    Case(
        "shares memory with another",
        generic,
        {"kind": KeepsTheGradient, "per_parameter": True, "size": 4096},
        {'keep states="host"': {"states": "host"}},
    ),
    Case(
        "only tensors that fill one run of host memory can",
        generic,
        {"kind": KeepsColumns, "per_parameter": True, "size": 4096},
        {'keep states="host"': {"states": "host"}},
    ),
    Case(
        "Leave it out (or None)",
        generic,
        {"foreach": True},
        {LEFT: {"foreach": OUT}, "(or None)": {"foreach": None}},
    ),
    Case(
        "= was given for ",
        generic,
        {"overlap": "none"},
        {LEFT: {"overlap": OUT}},
    ),
    Case(
        "torch chooses its kernels",
        generic,
        {"policy": PipelinePolicy(isa="scalar")},
        {"Leave isa out": {"policy": PipelinePolicy()}},
    ),
    Case(
        "torch.set_num_threads() says",
        generic,
        {"policy": PipelinePolicy(threads=1)},
        {"Leave threads out": {"policy": PipelinePolicy()}},
    ),
    Case(
        "a stowed class's states have the format",
        generic,
        {"state_format": "split"},
        {
            "(leave it out)": {"state_format": OUT},
            'state_format="fp32"': {"state_format": "fp32"},
        },
    ),
    Case(
        "a class of torch's steps by gradients of the",
        summed,
        {},
        {
            'Use state_format="fp32"': {"state_format": "fp32"},
            "or train fp32 parameters": {"dtype": torch.float32},
        },
    ),
    Case(
        "keeps its states in scratch files, which end",
        committed,
        {"call": "generic"},
        {'use tensorstow.AdamW or Adam with dir="..."': {"call": "adam"}},
    ),
]
ELSEWHERE = {
    "and the model has no weight of which only some rows are read": "test_deferred_rows",
    "which alone defers updates": "test_deferred_rows",
    "in host memory, where it saves nothing": "test_deferred_rows",
    "and a commit every": "delayed updates: test_delayed_overlap",
    "was given with nan_until_published=True": "delayed updates: test_delayed_overlap",
    "was requested without module=": "test_forward_overlap and test_delayed_overlap",
    "and all parameters were replaced by sharded ones after that": "two ranks: test_accelerate",
    "Updates on the device were requested during the next": "an accelerator: test_gradient_feed",
    "was given with checkpoints=": "test_stop_signals",
    ", and FSDP2 makes a DTensor of it, that": "bitsandbytes: test_coded_bases",
    "and the one of stop_signals= would lack it": "test_stop_signals",
    "was given outside of the main thread": "test_stop_signals",
    "which takes no steps. Leave it out": "test_stop_point",
    "a second optimizer by a Booster": "test_stop_point",
    ", which do not have it. Name a snapshot": "two ranks: test_reshard",
    "parameters are in host memory, and": "an accelerator: test_optimizer_links",
    "of a slice of": "the probe finds such a class first: test_packing",
    " of its own, which is the name of fp32 masters": "a class that has one: test_masters",
    "generate() was given compile_config=": "the model without it: test_gpu_generation",
    "inside of GatheredParameters without a modifier_rank": "ranks: test_deepspeed_zero",
}
"""Errors with an advice that has no case, and where it is tested."""
UNTRIED = (
    ": gradients are reduced in the dtype",
    "dist_init_required=False was given, and",
    '" was given to the Accelerator, and its',
    "was given with the plugin of",
    '" was given to the Trainer, and its',
    'ram_budget and dir are for to="disk".',
    "units=[] was given, which offloads",
    "), and torch calls only the innermost",
    "A second backward pass over the same",
    "): those of the files are others. Leave",
    ", and here are parameters in host",
    ". Leave state_format out; to change it,",
    ", whose inputs are not known: they are",
    "were given: the files of a run are all",
    ": they have the model's names, and a",
    ": it clips by the 2-norm, once,",
    "An optimizer with dir=, overlap= or",
    ", which has its own: leave them out, or",
    ". Leave it out, or set the",
    ": it decides which states exist. Create",
    ", or their names differ: create the",
    ": create the same one, or pass",
    ": DeepSpeed's are read for Adam and",
    ": it was saved without frozen",
    "and reduced in the same dtype. Leave it",
    "was called on an engine without an",
    "set_gradient_accumulation_boundary()",
    "unregister_external_parameter() was",
    "optimizer.params.fp32_optimizer_states=f",
    ". Leave it out: results do not depend",
    "were given: models are sharded over",
    ": pass rank= and world_size=, or set",
    "scheduler.params.last_batch_iteration",
    ": its running maximum needs an exact",
    ") is on the meta device and has no",
    "is a buffer on the meta device that",
    "micro_batches: a unit that is called",
    "A backward with create_graph=True (such",
    "was given, and the model has no",
    "is on the meta device, and a model that",
    "was given that is offloaded",
    "was given in a plan of a model that is",
    "is to be on disk, where a model that is",
    "load_state_dict(assign=True) was called",
    ". A unit takes and returns tensors with",
    ": in a Trainer it is AdamW. Keep",
    ": in a Trainer the optimizer's states",
    "The DeepSpeed configuration enables",
    "A checkpoint was to be written with the",
    '"speculative" was given: LLaMA',
    "processes, and a checkpoint is of rank",
    "was given, and the NUMA nodes with",
    "Trying to backward through the graph a",
    ": ranks that all have the whole",
    "was given to : note. Leave it out (",
)
"""Errors with an advice that nothing follows yet: a new one has a case, or is tested elsewhere."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_way_out_works(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((OptionError, DTypeError)) as told:
        case.act(**case.given)
    message = str(told.value)
    assert case.site in message
    assert [v for v in values_advised(case, message) if v not in " ".join(case.ways)] == []
    for index, (text, changes) in enumerate(case.ways.items()):
        assert text in message
        place = tmp_path / str(index)
        place.mkdir()
        monkeypatch.chdir(place)
        case.act(**{k: v for k, v in {**case.given, **changes}.items() if v is not OUT})


def values_advised(case: Case, message: str) -> set[str]:
    """Return the options with values, and the quoted values, that an error names as ways out."""
    found = re.findall(r'\w+="[\w.]*"|\w+=\d|"\w+"', re.split(r": |\. ", message, maxsplit=1)[-1])
    return {value for value in found if value.partition('"')[2][:-1] not in case.given.values()}


def advising() -> list[tuple[str, str]]:
    """Return the place and the text of each error of an option's check that names an option."""
    found = []
    for file in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Assign):
                continue
            # Plan._refuse() adds "was given" and the advice to each reason.
            is_reason = (
                file == ROOT / "base" / "plan.py" and ast.unparse(node.targets[0]) == "reason"
            )
            if is_reason or ast.unparse(node.targets[0]) == "message":
                text = "was given" * is_reason + "".join(_texts(node.value))
                if is_reason or OPTION.search(text):
                    found.append((f"{file.relative_to(ROOT)}:{node.lineno}", text))
    return found


OPTION = re.compile(
    r"\b(?:[Uu]se|[Ss]ay|[Ss]et|[Kk]eep|[Pp]ass|[Rr]aise|omit|[Gg]ive)\b[^.]*?\b[a-z_]+="
    r"|[Ll]eave (?:it|\w+=?)? *out|_or_say|_instead"
)


def _texts(node: ast.expr) -> list[str]:
    """Return the texts of an expression, and the methods that add advice, in order."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.Attribute):
        return [node.attr]
    children = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    return [text for child in children for text in _texts(child)]


def test_no_advice_is_left_out() -> None:
    sites = {case.site for case in CASES}
    found = advising()
    assert len(found) >= 90
    known = [*sites, *ELSEWHERE, *UNTRIED]
    assert [place for place, text in found if not any(site in text for site in known)] == []
    counts = {site: sum(site in text for _, text in found) for site in known}
    assert [site for site in known if counts[site] > 1] == []
    assert [site for site in (*ELSEWHERE, *UNTRIED) if counts[site] != 1] == []
