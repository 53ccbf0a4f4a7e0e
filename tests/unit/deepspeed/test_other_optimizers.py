"""Classes other than Adam through the engine have the bits of the class itself, in RAM."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import is_
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

import tensorstow
import tensorstow.deepspeed as deepspeed
from compare import all_equal
from ranks.other_classes import (
    Case,
    Narrow,
    batch_of,
    in_ram,
    loaded_elsewhere,
    read_and_set,
    refused,
    through_engine,
)
from ranks.pool import Ranks
from tensorstow import Plan
from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.config.settings import Batch, Settings, Zero
from tensorstow.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from tensorstow.deepspeed.ops.lion import DeepSpeedCPULion, Lion
from tensorstow.deepspeed.optimizers import maker_of

MOMENTUM = {"lr": 0.1, "momentum": 0.5, "nesterov": True, "weight_decay": 0.01}
DISK = {"offload_optimizer": "nvme"}
CASES = [
    Case("SGD", MOMENTUM, 0, accumulation=2, saves=True),
    Case("Adagrad", {"lr": 0.1}, 1, accumulation=2, saves=True),
    Case(
        "Lion", {"lr": 0.01, "betas": [0.5, 0.75], "weight_decay": 0.1}, 2, clip=0.05, offload=DISK
    ),
    Case("SGD", MOMENTUM, 2, offload=DISK, saves=True),
    Case("RMSprop", {"lr": 0.01, "momentum": 0.5}, 3, 2, 0.05, DISK, saves=True),
    Case("NAdam", {"lr": 0.01}, 3, saves=True),
    Case("SGD", {"lr": 0.1}, 3),
]


@pytest.mark.parametrize(
    ("case", "world"), [*((case, 2) for case in CASES), (CASES[1], 1), (CASES[4], 1)], ids=str
)
def test_a_class_has_its_own_bits(ranks: "Ranks", tmp_path: Path, case: Case, world: int) -> None:
    *weights, norm = in_ram(case, world)
    for *got, its_norm in ranks(world).run(through_engine, case, str(tmp_path)):
        assert all_equal(got, weights)
        assert its_norm.item() == pytest.approx(norm.item(), rel=1e-6)


def test_a_checkpoint_is_of_any_number_of_ranks(ranks: "Ranks", tmp_path: Path) -> None:
    case = Case("SGD", MOMENTUM, 3, saves=True)
    ranks(2).run(through_engine, case, str(tmp_path))
    (alone,) = ranks(1).run(loaded_elsewhere, case, str(tmp_path))
    for two in ranks(2).run(loaded_elsewhere, case, str(tmp_path)):
        assert all_equal(two, alone)


@pytest.mark.parametrize("case", [CASES[0], replace(CASES[3], stage=3)], ids=str)
def test_states_are_read_and_set_by_upstream_s_functions(
    ranks: "Ranks", tmp_path: Path, case: Case
) -> None:
    ranks(2).run(read_and_set, case, str(tmp_path))


def test_whole_matrices_are_needed_by_some(ranks: "Ranks", tmp_path: Path) -> None:
    for said in ranks(2).run(refused, Case("Adafactor", stage=2), str(tmp_path)):
        assert "stage 2 with 2 ranks: it needs whole matrices" in said
    case = Case("Adafactor", stage=0, saves=True)
    *weights, _ = in_ram(case, 2)
    for *got, _ in ranks(2).run(through_engine, case, str(tmp_path)):
        assert all_equal(got, weights)


def config_of(**more: object) -> dict[str, object]:
    return {"train_batch_size": 2, "zero_optimization": {"stage": 1}, **more}


def test_an_object_is_made_anew_with_its_groups_and_its_schedule() -> None:
    model = Narrow()
    groups = [{"params": [model.layers[0].weight], "lr": 0.25}, {"params": model.layers[2].weight}]
    theirs = torch.optim.Adagrad(groups, lr=0.5, eps=1e-5)
    schedule = StepLR(theirs, 1, gamma=0.5)
    with pytest.raises(OptionError, match='Adagrad was given with "bf16"'):
        deepspeed.initialize(
            model=model, optimizer=theirs, config=config_of(bf16={"enabled": True})
        )
    assert len(theirs.state) == 2
    engine, ours, _, _ = deepspeed.initialize(
        model=model, optimizer=theirs, lr_scheduler=schedule, config=config_of()
    )
    assert isinstance(ours, tensorstow.StowedOptimizer)
    assert not theirs.state
    assert [g["param_names"] for g in ours.param_groups] == [
        ["layers.0.weight"],
        ["layers.2.weight"],
    ]
    assert [(g["lr"], g["eps"]) for g in ours.param_groups] == [(0.25, 1e-5), (0.5, 1e-5)]
    engine.backward(engine(batch_of(0, 0, 0)))
    engine.step()
    assert engine.get_lr() == [0.125, 0.25]
    assert engine.get_mom() == [0.0, 0.0]
    engine.destroy()


def test_optimizers_by_upstream_s_names_are_taken_without_being_declared() -> None:
    model = Narrow()
    for make, kind in (
        (partial(DeepSpeedCPUAdagrad, lr=0.5), torch.optim.Adagrad),
        (partial(DeepSpeedCPULion, betas=(0.5, 0.75)), Lion),
    ):
        made = maker_of(None, make, model, model.parameters())
        assert made.optimizer_class is kind
        made.for_settings(Settings(Batch(2, 2, 1), zero=Zero(2)), 2, None, torch.device("cpu"))
    with pytest.raises(OptionError, match="rates are not negative"):
        Lion(model.parameters(), lr=-1.0)


class Clipped(torch.optim.SGD):
    def __init__(self, params: object, lr: float = 0.1, limit: float = 1.0) -> None:
        super().__init__(params, lr)
        self.limit = limit


def stepped(model: Narrow) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adagrad(model.parameters())
    model(batch_of(0, 0, 0)).backward()
    optimizer.step()
    return optimizer


class Counting(torch.optim.Optimizer):
    """Keeps a number and a tensor of one element for each parameter."""

    def __init__(self, params: object, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    state["total"] = state.get("total", torch.zeros(1)) + 1
                    parameter.add_(parameter.grad, alpha=-group["lr"] / state["count"])


def test_numbers_of_each_parameter_are_saved(tmp_path: Path) -> None:
    for steps in (2, 1):
        model = Narrow()
        engine, optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=Counting(model.parameters()), config=config_of(**UNTESTED)
        )
        if steps == 1:
            engine.load_checkpoint(tmp_path)
        for step in range(steps):
            engine.backward(engine(batch_of(0, step, 0)))
            engine.step()
        engine.save_checkpoint(tmp_path)
        for parameter in (model.scale, model.layers[0].weight):
            assert optimizer.states_of(parameter) == {
                "count": 4 - steps,
                "total": torch.tensor([4.0 - steps]),
            }
        engine.destroy()


def test_states_of_another_class_are_refused(tmp_path: Path) -> None:
    engines = [
        deepspeed.initialize(model=Narrow(), config=config_of(optimizer={"type": kind}))[0]
        for kind in ("Lion", "AdamW", "Adam")
    ]
    for engine in engines:
        engine.backward(engine(batch_of(0, 0, 0)))
        engine.step()
    for engine, other, said in [(0, 1, "Lion, and .* Adam:"), (1, 0, "Adam, and .* Lion:")]:
        engines[engine].save_checkpoint(tmp_path, str(engine))
        with pytest.raises(OptionError, match=f"has the states of {said} create the same one"):
            engines[other].load_checkpoint(tmp_path)
        engines[other].load_checkpoint(tmp_path, load_optimizer_states=False)
    engines[2].load_checkpoint(tmp_path, "1")
    for engine in engines:
        engine.destroy()


SGD = {"type": "SGD", "params": {"lr": 0.1}}
UNTESTED = {"zero_allow_untested_optimizer": True}
NVME = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "."}}
REFUSED = [
    (None, {"optimizer": SGD}, '"zero_allow_untested_optimizer": true'),
    (None, {"optimizer": {"type": "Lamb"}, **UNTESTED}, "of type 'Lamb' was requested"),
    (None, {"optimizer": {"type": "Lion", "params": {"fp32_optimizer_states": False}}}, "=false"),
    (None, {"optimizer": {"type": "Muon"}, **UNTESTED}, "of type 'Muon' was requested"),
    (None, {"optimizer": {"type": "SGD", "params": {"rate": 1}}, **UNTESTED}, "argument 'rate'"),
    (None, {"optimizer": SGD, "bf16": {"enabled": True}, **UNTESTED}, 'SGD was given with "bf16"'),
    (
        None,
        {"optimizer": SGD, "zero_optimization": NVME, **UNTESTED},
        'offload_param.device="nvme"',
    ),
    (stepped, UNTESTED, "with states of steps"),
    (lambda m: Clipped(m.parameters(), limit=2.0), UNTESTED, "has limit of its own"),
    (lambda m: torch.optim.LBFGS(m.parameters()), UNTESTED, "LBFGS cannot be stowed"),
]


@pytest.mark.parametrize(("make", "more", "match"), REFUSED)
def test_what_cannot_be_is_refused_before_anything_is_placed(
    make: Callable[[Narrow], object] | None, more: dict[str, object], match: str
) -> None:
    model = Narrow()
    before = list(model.parameters())
    optimizer = None if make is None else make(model)
    with pytest.raises(OptionError, match=match):
        deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(**more))
    assert all(map(is_, model.parameters(), before))
    assert {p.dtype for p in before} == {torch.float32}


def test_updates_run_in_step_alone() -> None:
    with pytest.raises(OptionError, match='SGD was given with overlap="forward"'):
        deepspeed.initialize(
            model=Narrow(), config=config_of(optimizer=SGD, **UNTESTED), overlap="forward"
        )
    plan = Plan(parameters="device", overlap="forward")
    with pytest.raises(OptionError, match='a model with overlap="forward"'):
        tensorstow.stow(Narrow(), sgd, plan=plan)


def sgd(named: object, **placement: object) -> tensorstow.StowedOptimizer:
    del placement
    return tensorstow.StowedOptimizer(torch.optim.SGD, named, lr=0.1, states="host")
