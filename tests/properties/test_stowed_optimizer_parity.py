"""A stowed class gives, bit for bit, what the class itself gives."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import optim

from compare import all_equal
from parity.cover import crossed
from parity.piecewise import CHUNK, MATRICES, SHAPES, pair
from tensorstow import PipelinePolicy
from tensorstow.io.engine import BACKENDS, probe_backend
from tensorstow.optim.options import StatePlacement

Backend = Literal["uring", "threads"]
Schedule = Literal["pipelined", "naive"]

CLASSES: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    (optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.01, "initial_accumulator_value": 0.3}),
    (optim.Adadelta, {"weight_decay": 0.01, "maximize": True}),
    (optim.Adam, {"weight_decay": 0.01, "lr": torch.tensor(1e-2)}),
    (optim.AdamW, {"amsgrad": True, "maximize": True}),
    (optim.Adamax, {"weight_decay": 0.01}),
    (optim.ASGD, {"weight_decay": 0.01, "t0": 2}),
    (optim.NAdam, {"weight_decay": 0.01, "decoupled_weight_decay": True}),
    (optim.RAdam, {"weight_decay": 0.01}),
    (optim.RMSprop, {"weight_decay": 0.01, "momentum": 0.9, "centered": True}),
    (optim.Rprop, {}),
    (optim.Adafactor, {"weight_decay": 0.01, "maximize": True}),
    (optim.Adafactor, {"lr": torch.tensor(0.1), "d": 1.5}),
    (optim.Muon, {"lr": 0.02}),
    (optim.Muon, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
]

every_class = pytest.mark.parametrize(
    ("optimizer_class", "options"),
    CLASSES,
    ids=[f"{c.__name__}{i}" for i, (c, _) in enumerate(CLASSES)],
)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


SMALL_MATRICES = ((130, 200), (8, 8), (97, 61))


def shapes_for(optimizer_class: type[optim.Optimizer]) -> tuple[tuple[int, ...], ...]:
    return SMALL_MATRICES if optimizer_class is optim.Muon else SHAPES


@every_class
@every_dtype
def test_seven_steps_and_the_states_after_them(
    tmp_path: Path,
    optimizer_class: type[optim.Optimizer],
    options: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    shapes = shapes_for(optimizer_class)
    both = pair(tmp_path, optimizer_class, options, shapes=shapes, dtype=dtype)
    both.step(7)
    both.assert_same()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("optimizer_class", [optim.SGD, optim.RMSprop])
def test_any_number_of_threads(
    tmp_path: Path, optimizer_class: type[optim.Optimizer], threads: int
) -> None:
    """In 16 bits torch's own results depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        options = {"momentum": 0.9, "weight_decay": 0.01}
        both = pair(tmp_path, optimizer_class, options, dtype=torch.bfloat16)
        both.step(5)
        both.assert_same()
    finally:
        torch.set_num_threads(before)


@crossed(
    optimizer_class=(optim.SGD, optim.AdamW),
    elements=(1024, 4096, 10_016, 1 << 20),
    dtype=(torch.float32, torch.bfloat16),
)
def test_any_size_of_chunks(
    tmp_path: Path, optimizer_class: type[optim.Optimizer], elements: int, dtype: torch.dtype
) -> None:
    policy = PipelinePolicy(chunk_elements=elements)
    options = {} if optimizer_class is optim.AdamW else {"momentum": 0.9}
    shapes = ((70_001,), (129, 517), (65_536,))
    both = pair(tmp_path, optimizer_class, options, shapes=shapes, dtype=dtype, policy=policy)
    both.step(3)
    both.assert_same()


@pytest.mark.parametrize("optimizer_class", [optim.AdamW, optim.Muon])
@pytest.mark.parametrize("states", ["ram", "disk", 0.5])
def test_groups_with_options_of_their_own_under_a_scheduler(
    tmp_path: Path, optimizer_class: type[optim.Optimizer], states: StatePlacement
) -> None:
    def groups(parameters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": parameters[:2], "lr": 0.1},
            {"params": parameters[2:], "weight_decay": 0.5},
        ]

    place = {"states": "ram", "dir": None} if states == "ram" else {"states": states}
    both = pair(tmp_path, optimizer_class, shapes=SMALL_MATRICES, groups=groups, **place)
    schedulers = [
        optim.lr_scheduler.OneCycleLR(o, max_lr=[0.1, 0.02], total_steps=9)
        for o in (both.ours, both.theirs)
    ]
    for step in range(6):
        both.step(1, first=step)
        for scheduler in schedulers:
            scheduler.step()
    assert both.ours.param_groups[0]["lr"] == both.theirs.param_groups[0]["lr"]
    both.assert_same()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("schedule", ["pipelined", "naive"])
def test_every_backend_and_schedule(tmp_path: Path, backend: Backend, schedule: Schedule) -> None:
    if reason := probe_backend(backend):
        pytest.skip(reason)
    policy = PipelinePolicy(chunk_elements=CHUNK, backend=backend, schedule=schedule)
    both = pair(tmp_path, optim.NAdam, policy=policy)
    both.step(4)
    both.assert_same()


def test_slow_transfers_and_a_small_ring_change_nothing(tmp_path: Path) -> None:
    both = pair(tmp_path, optim.AdamW, ram_budget="320KiB")
    engine = both.ours._manager.engine
    assert engine is not None
    both.step(1)
    engine.inject_fault("read", times=-1, delay_us=700)
    engine.inject_fault("write", times=-1, delay_us=1500)
    both.step(3, first=1)
    engine.clear_faults()
    both.assert_same()


def test_other_threads_than_at_the_beginning_change_no_chunk(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    results = []
    for later in (2, 1):
        torch.set_num_threads(2)
        both = pair(tmp_path, optim.SGD, {"momentum": 0.9}, dtype=torch.bfloat16)
        try:
            both.step(1)
            torch.set_num_threads(later)
            both.step(3, first=1)
            assert torch.get_num_threads() == later
        finally:
            torch.set_num_threads(before)
        results.append([p for p, _ in both.parameters()])
    assert all_equal(*results)


def test_a_parameter_that_is_not_contiguous_moves_as_a_whole(tmp_path: Path) -> None:
    def turned(parameters: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(p.detach().t()) for p in parameters]

    both = pair(tmp_path, optim.AdamW, shapes=MATRICES, groups=turned)
    assert [plan.how for plan in both.ours.plan()] == ["whole", "whole", "ram", "whole"]
    both.step(3)
    both.assert_same()


def test_momentum_that_is_switched_on_later(tmp_path: Path) -> None:
    """A state that exists from the third step on: its piece gets a place then."""
    both = pair(tmp_path, optim.SGD, {"lr": 0.1})
    both.step(2)
    assert both.ours._memory().disk_bytes == 0
    for optimizer in (both.ours, both.theirs):
        optimizer.param_groups[0]["momentum"] = 0.9
    both.step(3, first=2)
    both.assert_same()
    assert both.ours._memory().disk_bytes > 0


def test_double_precision_and_half(tmp_path: Path) -> None:
    for dtype in (torch.float64, torch.float16):
        both = pair(tmp_path, optim.SGD, {"lr": 0.01, "momentum": 0.9}, dtype=dtype)
        both.step(3)
        both.assert_same()
