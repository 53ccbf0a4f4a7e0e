"""The weights of a model one by one: the bits of one moment, from any place, on every rank."""

import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

import tensorstow
from ranks import tensor_parallel
from ranks.pool import Pool, Ranks
from ranks.stowed import loss_of, twins
from ranks.twin import ADAMW, FETCHED, FETCHED_BESIDE, mesh_here, whole
from tensorstow import Plan, named_weights, quantize_to_int8
from tensorstow.base.errors import KeywordError, OptionError
from tensorstow.fsdp.weight_stream import Call, WeightStream

Named = dict[str, torch.Tensor]
PLANS = [
    Plan(),
    Plan(parameters="device"),
    Plan(overlap="forward"),
    Plan(overlap="backward"),
    Plan(states="disk", overlap="speculative"),
    Plan(stage=0),
    Plan(stage=1, accumulation_steps=2),
    Plan(stage=2, overlap="forward"),
    Plan(parameter_units={"blocks.1": "disk", "": "disk"}),
    FETCHED,
    FETCHED_BESIDE,
    FETCHED.but(overlap="backward", weight_ram_budget="32KiB"),
]


def same(first: Named, second: Named) -> bool:
    return list(first) == list(second) and all(torch.equal(first[k], second[k]) for k in first)


def copies(model: nn.Module) -> Named:
    """Return a plain model's weights and persistent buffers, each once."""
    first = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: first[name].detach().clone() for name in first if name in model.state_dict()}


def handed_over(plan: Plan, dtype: torch.dtype, compute_dtype: torch.dtype | None) -> None:
    """Iterate after each of some steps, once half way; go on training as if nothing was read."""
    both = twins(plan, dtype, compute_dtype=compute_dtype)
    # Else the one process adds gradients in another order, or in another dtype.
    is_exact = compute_dtype is None and both.world * plan.accumulation_steps <= 2
    assert same(dict(named_weights(both.stowed)), copies(both.alone))  # before the first forward
    for step in range(3):
        for _ in range(plan.accumulation_steps):
            if is_exact:
                both.backward(step)
            else:
                loss_of(both.stowed, both.rank, step).backward()
        both.step()
        received = dict(named_weights(both.stowed))
        assert all(type(t) is torch.Tensor and t.is_contiguous() for t in received.values())
        assert all(t.dtype == dtype and not t.requires_grad for t in received.values())
        assert same(received, {n: whole(p) for n, p in both.stowed.named_parameters()})
        assert not is_exact or same(received, copies(both.alone))
        with torch.inference_mode():
            abandoned = named_weights(both.stowed)
            next(abandoned)
            next(abandoned)
    if is_exact:
        both.compare()
    both.ours.close()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("plan", PLANS, ids=[str(i) for i in range(len(PLANS))])
def test_from_everywhere_the_bits_are_those_of_one_process(
    ranks: Pool, plan: Plan, world: int
) -> None:
    ranks(world).run(handed_over, plan, torch.bfloat16, None)


@pytest.mark.parametrize("plan", [Plan(), Plan(stage=2), FETCHED], ids=["3", "2", "disk"])
def test_masters_are_handed_over_and_not_what_is_computed_with(ranks: Pool, plan: Plan) -> None:
    ranks(2).run(handed_over, plan, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("stage", [2, 3])
def test_replicas_get_the_same(ranks: Pool, stage: int) -> None:
    ranks(4).run(handed_over, Plan(stage=stage, replicas=2), torch.bfloat16, None)


def stepped_between(plan: Plan) -> list[str]:
    """Step between two weights; return the errors' texts, one for each kind of change."""
    both = twins(plan, torch.bfloat16)
    both.train()
    texts = []

    def load(model: nn.Module, _: object) -> None:
        model.load_state_dict(model.state_dict())

    def write(model: nn.Module, _: object) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)

    for change in (lambda *_: both.train(), load, write):
        iterator = named_weights(both.stowed)
        next(iterator)
        both.each(change) if change in {load, write} else change()
        with pytest.raises(OptionError) as raised:
            next(iterator)
        texts.append(str(raised.value))
        assert list(iterator) == []  # an iterator that has raised is at its end
        assert same(dict(named_weights(both.stowed)), copies(both.alone))
    both.close()
    return texts


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("plan", PLANS, ids=[str(i) for i in range(len(PLANS))])
def test_no_iteration_goes_on_with_the_weights_of_another_step(
    ranks: Pool, plan: Plan, world: int
) -> None:
    plan = plan.but(accumulation_steps=1)
    for texts in ranks(world).run(stepped_between, plan):
        assert all("blocks.0.up.weight was changed since" in text for text in texts)


def read_while_it_computes() -> None:
    """Run a forward, and a backward, between two weights: gathered ones are not handed over."""
    both = twins(Plan(stage=2))
    both.train()
    iterator = named_weights(both.stowed)
    received = dict([next(iterator)])
    value = loss_of(both.stowed, both.rank, 5)
    received |= [next(iterator)]
    value.backward()
    received |= iterator
    assert same(received, copies(both.alone))
    both.ours.close()


@pytest.mark.parametrize("world", [1, 2])
def test_a_pass_between_two_weights_changes_nothing(ranks: Pool, world: int) -> None:
    ranks(world).run(read_while_it_computes)


def parallel() -> None:
    """Hand over a model of tensor parallelism, alone on two ranks and under FSDP2 on four."""
    data = max(dist.get_world_size() // 2, 1)
    model = tensor_parallel.parallel_model(data)
    assert any(isinstance(p, DTensor) for p in model.parameters())
    assert same(dict(named_weights(model)), copies(tensor_parallel.model_alone()))


@pytest.mark.parametrize("world", [2, 4])
def test_pieces_of_tensor_parallelism_are_put_together(ranks: Pool, world: int) -> None:
    ranks(world).run(parallel)


class Net(nn.Module):
    """A tied weight, a frozen one, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.blocks[1].requires_grad_(False)  # noqa: FBT003  # torch's own
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


TOKENS = torch.arange(24) % 11


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(TOKENS).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def by_stow(plan: Plan, optimizer: Any = ADAMW) -> tuple[nn.Module, torch.optim.Optimizer]:  # noqa: ANN401
    return tensorstow.stow(make(), optimizer, plan=plan)


def by_class(kind: Callable[..., Any], **keywords: Any) -> tuple[nn.Module, Any]:  # noqa: ANN401
    model = make()
    parameters = [p for p in model.parameters() if p.requires_grad]
    if "overlap" in keywords:
        keywords["module"] = model
    return model, kind(parameters, lr=1e-2, **keywords)


SGD = partial(tensorstow.StowedOptimizer, torch.optim.SGD, lr=1e-2)
MADE = {
    "torch": partial(by_class, torch.optim.AdamW),
    "foreach": partial(by_class, torch.optim.SGD, foreach=True),
    "adamw": partial(by_class, tensorstow.AdamW),
    "forward": partial(by_class, tensorstow.AdamW, states="disk", overlap="forward"),
    "backward": partial(by_class, tensorstow.AdamW, overlap="backward"),
    "any class": partial(by_class, partial(tensorstow.StowedOptimizer, torch.optim.SGD)),
    "stowed class": partial(by_stow, Plan(), SGD),
    "stowed": partial(by_stow, Plan()),
    "stowed on disk": partial(by_stow, Plan(parameters="disk", states="disk", overlap="forward")),
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_any_model_is_handed_over_between_any_steps(made: Callable[[], Any]) -> None:
    model, optimizer = made()
    for _ in range(2):
        stepped(model, optimizer)
        received = dict(named_weights(model))
        state = {n: t.clone() for n, t in model.state_dict().items() if n != "head.weight"}
        assert next(iter(received)) == "embed.weight"
        assert received.keys() == state.keys()
        assert all(torch.equal(received[name], state[name]) for name in state)
        assert all(t.is_contiguous() for t in received.values())
        iterator = named_weights(model)
        next(iterator)
        stepped(model, optimizer)
        with pytest.raises(OptionError, match=r"embed\.weight was|blocks\.0\.weight was"):
            list(iterator)
        assert all(torch.equal(received[name], state[name]) for name in state)  # they are copies


def test_a_parameter_that_is_replaced_is_not_handed_over() -> None:
    model = nn.Linear(2, 2)
    iterator = named_weights(model)
    model.weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(OptionError, match="weight was changed since the iteration"):
        next(iterator)


def test_a_step_in_flight_is_waited_for(tmp_path: Path) -> None:
    keywords = {"states": "disk", "overlap": "forward", "dir": tmp_path, "commit_every": None}
    policy = tensorstow.PipelinePolicy(nan_until_published=True)
    model, optimizer = by_class(tensorstow.AdamW, **keywords, policy=policy)
    twin, other = by_class(tensorstow.AdamW)
    stepped(model, optimizer)
    stepped(twin, other)
    assert same(dict(named_weights(model)), copies(twin))
    optimizer.close()


def test_half_a_step_is_not_handed_over() -> None:
    model, optimizer = by_class(tensorstow.AdamW, overlap="backward")
    model(TOKENS).sum().backward()
    with pytest.raises(OptionError, match=r"step\(\)"):
        named_weights(model)
    optimizer.step()
    assert len(dict(named_weights(model))) == len(copies(model))
    optimizer.close()


# --- models that are only read ---


@pytest.mark.parametrize(
    "plan",
    [
        Plan(parameters="disk"),
        Plan(parameters="disk", prefetch=0),
        Plan(parameter_units={"blocks.0": "disk"}),
        Plan(),
    ],
    ids=["disk", "alone", "one", "host"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_is_only_read_is_handed_over(
    tmp_path: Path, plan: Plan, dtype: torch.dtype
) -> None:
    net = make().eval()
    save_file(copies(net), tmp_path / "model.safetensors")
    model, _ = tensorstow.stow(
        make().eval(), None, plan=plan, weights=tmp_path, compute_dtype=dtype
    )
    wanted = {
        n: t.to(dtype) if isinstance(dict(net.named_parameters()).get(n), nn.Parameter) else t
        for n, t in copies(net).items()
    }
    expected = net(TOKENS) if dtype == torch.float32 else None
    for _ in range(2):
        assert same(dict(named_weights(model)), wanted)
        abandoned = named_weights(model)
        next(abandoned)
        if expected is not None:
            assert torch.equal(model(TOKENS), expected)
    tensorstow.save_safetensors(model, tmp_path / "again")
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(written[name], wanted[name]) for name in wanted)


def test_a_weight_is_copied_before_its_buffer_is_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = make().eval()
    save_file(copies(net), tmp_path / "model.safetensors")
    model, _ = tensorstow.stow(make().eval(), None, plan=Plan(parameters="disk"), weights=tmp_path)
    leave = WeightStream.leave

    def reuse_at_once(stream: WeightStream, call: Call, *rest: object) -> None:
        memory = stream.host.get(call.unit)
        assert memory is not None
        stream.host.drop(call.unit)
        memory.tensor(0, call.unit.nbytes, torch.uint8).fill_(255)
        leave(stream, call, *rest)

    monkeypatch.setattr(WeightStream, "leave", reuse_at_once)
    assert same(dict(named_weights(model)), copies(net))


def test_weights_that_are_stored_in_int8_come_in_the_models_dtype(tmp_path: Path) -> None:
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    save_file(copies(net), tmp_path / "model.safetensors")
    quantize_to_int8(net, tmp_path, tmp_path / "int8")
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    model, _ = tensorstow.stow(model, None, plan=Plan(parameters="disk"), weights=tmp_path / "int8")
    received = dict(named_weights(model))
    rows = torch.randn(4, 64)
    with torch.no_grad():
        wanted = model(rows)
    net.load_state_dict(received)
    assert torch.equal(net(rows), wanted)


WIDE, DEEP = 1024, 24
"""A model of 96 MiB in units of 4 MiB."""


def most_memory() -> int:
    """Return how much resident memory grew while a model on disk was handed over."""
    plan = Plan(parameters="disk", states="disk", prefetch=0)
    small = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
    small, optimizer = tensorstow.stow(small, ADAMW, plan=plan, mesh=mesh_here())
    assert len(dict(named_weights(small))) == 4  # what any needs
    optimizer.close()
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(DEEP)))
    model, optimizer = tensorstow.stow(model, ADAMW, plan=plan, mesh=mesh_here())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        assert sum(t.nbytes for _, t in named_weights(model)) == 4 * DEEP * WIDE * WIDE
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    optimizer.close()
    return (after - before) << 10


def test_a_tensor_at_a_time_is_in_memory() -> None:
    pool = Ranks(1)  # its own: the highest use of memory is a process's for life
    try:
        (grown,) = pool.run(most_memory)
    finally:
        pool.close()
    assert grown < 24 << 20, grown


# --- arguments ---


def test_arguments_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(OptionError, match=r"a dict: pass an nn\.Module"):
        named_weights({})  # type: ignore[arg-type]
    with pytest.raises(KeywordError, match="device="):
        named_weights(nn.Linear(1, 1), devise="cpu")  # type: ignore[call-arg]
    with pytest.raises(OptionError, match="device='gpu'"):
        named_weights(nn.Linear(1, 1), device="gpu")


def test_a_weight_in_another_memory_format_comes_contiguous() -> None:
    model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    received = dict(named_weights(model))
    assert all(t.is_contiguous() for t in received.values())
    assert same(received, copies(model))


def test_tensors_are_made_on_the_device() -> None:
    assert all(t.is_meta for _, t in named_weights(nn.Linear(2, 2), device="meta"))
