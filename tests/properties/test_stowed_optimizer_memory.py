"""A stowed class's memory is a formula, and a step in the steady state allocates none of ours."""

import gc
import mmap
from pathlib import Path

import pytest
import torch
from torch import nn, optim

import children
from parity.piecewise import CHUNK, MATRICES, SHAPES, SMALL, pair, parameters
from tensorstow import StowedOptimizer
from tensorstow.base.errors import BudgetError
from tensorstow.base.sizes import round_up

MIB = 1 << 20
PIECE = 8 * CHUNK


@pytest.mark.parametrize(
    ("optimizer_class", "per_element"),
    [(optim.AdamW, 8), (optim.Adagrad, 4), (optim.RAdam, 8), (optim.SGD, 0)],
)
def test_what_was_predicted_is_there(
    tmp_path: Path, optimizer_class: type[optim.Optimizer], per_element: int
) -> None:
    both = pair(tmp_path, optimizer_class)
    predicted = both.ours.predict()
    both.step(1)
    assert both.ours._memory() == predicted
    large = [p.numel() for p in parameters(SHAPES) if p.numel() >= 4096]
    assert predicted.disk_bytes == per_element * sum(large)


@pytest.mark.parametrize("optimizer_class", [optim.Adafactor, optim.Muon])
def test_whole_parameters_are_pieces_of_their_own(
    tmp_path: Path, optimizer_class: type[optim.Optimizer]
) -> None:
    shapes = ((5000, 20), (130, 200), (8, 8))
    both = pair(tmp_path, optimizer_class, shapes=shapes)
    both.step(2)
    rows = [5000, 0] if optimizer_class is optim.Adafactor else [5000 * 20, 130 * 200]
    files = [round_up(4 * n, 4096) for n in rows]
    assert [(p.how, p.piece_bytes) for p in both.ours.plan()] == [
        ("whole", files[0]),
        ("whole", files[1]),
        ("ram", 0),
    ]
    memory = both.ours._memory()
    assert memory == both.ours.predict()
    assert (memory.disk_bytes, memory.file_bytes) == (4 * sum(rows), sum(files))
    assert memory.ring_bytes == memory.file_bytes


@pytest.mark.parametrize("pieces", [1, 2, 7])
def test_the_high_water_is_within_the_budget(tmp_path: Path, pieces: int) -> None:
    budget = pieces * PIECE + 100
    both = pair(tmp_path, optim.AdamW, shapes=((20 * CHUNK,),), ram_budget=budget)
    both.step(3)
    assert both.ours._memory().ring_bytes == budget
    assert both.ours._traffic().ring_high_water_bytes == pieces * PIECE
    assert both.ours._traffic().bytes_written == 3 * 20 * PIECE
    assert both.ours._traffic().bytes_read == 2 * 20 * PIECE
    both.assert_same()


def test_a_budget_below_the_largest_piece_is_refused_with_its_size(tmp_path: Path) -> None:
    matrix = nn.Parameter(torch.zeros(1000, 1000))
    with pytest.raises(BudgetError, match=r"3\.8 MiB"):
        StowedOptimizer(optim.Muon, [matrix], states="disk", dir=tmp_path, ram_budget="3MiB")


def test_without_a_budget_a_larger_piece_runs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorstow.optim.generic.transfers.DEFAULT_RING_BYTES", 120 << 10)
    both = pair(tmp_path, optim.Muon, shapes=((200, 300), (130, 200), (100, 200)))
    both.step(3)
    both.assert_same()
    assert both.ours._memory().ring_bytes == round_up(4 * 200 * 300, 4096)


def test_a_fraction_keeps_the_first_parameters_in_ram(tmp_path: Path) -> None:
    both = pair(tmp_path, optim.AdamW, shapes=((100, 100),) * 4, states=0.5)
    assert [plan.how for plan in both.ours.plan()] == ["ram", "ram", "whole", "whole"]
    both.step(2)
    both.assert_same()
    memory = both.ours._memory()
    assert memory == both.ours.predict()
    assert memory.disk_bytes == 2 * 8 * 100 * 100


def test_room_on_disk_is_used_again(tmp_path: Path) -> None:
    both = pair(tmp_path, optim.AdamW, shapes=MATRICES)
    both.step(1)
    before = both.ours._memory()
    for _ in range(3):
        both.ours.load_state_dict(both.ours.state_dict())
        both.ours.state.clear()
        both.ours.step()
    assert both.ours._memory() == before


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def test_the_steady_state_allocates_nothing(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.zeros(40 * CHUNK))
    optimizer = StowedOptimizer(
        optim.AdamW, [weight], states="disk", dir=tmp_path, ram_budget=8 * PIECE, policy=SMALL
    )
    weight.grad = torch.ones_like(weight)
    for _ in range(10):
        optimizer.step()
    gc.collect()
    before = rss_bytes()
    for _ in range(50):
        optimizer.step()
    gc.collect()
    assert rss_bytes() - before < 4 * MIB
    assert optimizer._memory().ring_bytes == 8 * PIECE


CHILD = """
import sys
import torch
from tensorstow import StowedOptimizer
from tensorstow.report.rss import peak_bytes
shape = (64, 1 << 18)
p = torch.nn.Parameter(torch.ones(shape))
opt = StowedOptimizer(
    torch.optim.AdamW, [p], states=sys.argv[1], ram_budget="16MiB" if sys.argv[2:] else None,
    dir=sys.argv[2] if sys.argv[2:] else None,
)
p.grad = torch.ones(shape)
for _ in range(3):
    opt.step()
print(peak_bytes())
"""


def test_the_process_needs_the_states_less(tmp_path: Path) -> None:
    """64 MiB of weights, 128 MiB of states: on disk they leave."""

    def peak(*arguments: str) -> int:
        return int(children.run("-c", CHILD, *arguments).stdout)

    # A step of the whole parameter takes temporaries of its size, too: one of a chunk does not.
    assert peak("ram") - peak("disk", str(tmp_path)) > 100 * MIB
