"""The parity matrix: no placement, route or way back changes a bit of the result."""

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parity.anchor import anchor
from parity.axes import AXES, Case, allowed, case_of
from parity.candidate import NO_TAPS, Trainer, run, small_ring
from parity.cover import (
    Value,
    covering,
    feasible_pairs,
    feasible_triples,
)
from parity.problem import INF_STEP, STEPS, Outcome, differences, unequal

# Axes that have gone wrong together elsewhere, or that share code here: any three of their values
# meet in a row, as any two of all axes do. `make soak` takes the whole products.
PRODUCTS = (
    ("placement", "dtype", "schedule"),
    ("placement", "resume", "dtype"),
    ("dtype", "grad_dtype", "placement"),
    ("accumulation", "clipping", "scaling", "placement"),
    ("optimizer", "amsgrad", "maximize", "weight_decay"),
    ("chunk", "ring", "placement", "threads"),
    ("isa", "dtype", "grad_dtype"),
    ("lr", "resume"),
    ("ema", "dtype", "resume"),
    ("overlap", "nan_until_published", "dtype", "format"),
    ("overlap", "accumulation", "clipping", "scaling"),
    ("overlap", "final", "accumulation", "ring", "schedule"),
    ("overlap", "durability", "resume"),
    ("durability", "share", "placement", "dtype"),
)


def product(*names: str) -> Iterator[Case]:
    for values in itertools.product(*(AXES[name] for name in names)):
        row: dict[str, Value] = {"optimizer": "AdamW", **dict(zip(names, values, strict=True))}
        if row.get("scaling") == "div_scale":
            row["optimizer"] = "HybridAdam-adamw"
        if allowed(case_of(row).row()):
            yield case_of(row)


IN_BLOCKS = {
    "blocks.0.sometimes",
    *(f"blocks.1.{name}" for name in ("wide", "bias", "inner.narrow", "gain")),
}
MEETINGS = [*feasible_pairs(AXES, allowed), *feasible_triples(AXES, allowed, PRODUCTS)]
ROWS = [case_of(row) for row in covering(AXES, allowed, MEETINGS)]
# By what they are: products share cases.
PRODUCT_CASES = {str(case): case for names in PRODUCTS for case in product(*names)}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=f"{i + 1}of{len(ROWS)}:{c}") for i, c in enumerate(ROWS)],
)
def test_any_values_together_give_the_anchor(case: Case, tmp_path: Path) -> None:
    assert differences(run(case, tmp_path), anchor(case.recipe)) == []


@pytest.mark.soak
@pytest.mark.parametrize("case", PRODUCT_CASES.values(), ids=PRODUCT_CASES)
def test_whole_products_give_the_anchor(case: Case, tmp_path: Path) -> None:
    assert differences(run(case, tmp_path), anchor(case.recipe)) == []


def test_no_axis_vanished() -> None:
    # A change of these numbers is a change of what is proved: make it on purpose.
    assert {name: len(values) for name, values in AXES.items()} == {
        "optimizer": 7,
        "dtype": 4,
        "grad_dtype": 4,
        "amsgrad": 2,
        "ema": 2,
        "maximize": 2,
        "weight_decay": 2,
        "accumulation": 2,
        "clipping": 3,
        "scaling": 3,
        "lr": 4,
        "placement": 3,
        "chunk": 3,
        "ring": 2,
        "schedule": 2,
        "backend": 2,
        "isa": 3,
        "threads": 3,
        "overlap": 4,
        "nan_until_published": 2,
        "final": 2,
        "format": 3,
        "durability": 2,
        "share": 2,
        "resume": 7,
    }
    assert len(MEETINGS) == 2584 + 920
    assert len(ROWS) == 108
    assert len(PRODUCT_CASES) == 511


def test_the_rows_have_every_pair_and_triple_that_is_allowed() -> None:
    rows = [case.row() for case in ROWS]
    assert all(allowed(row) for row in rows)
    items = [set(row.items()) for row in rows]
    assert [m for m in MEETINGS if not any(row.issuperset(m) for row in items)] == []


def test_the_training_meets_what_it_is_for() -> None:
    """Else equality would prove little: weights move, a step is skipped, clipping clips."""
    plain = anchor(case_of({}).recipe)
    first, last = plain.weights[0], plain.weights[-1]
    moved = {n for n in first if not torch.equal(first[n], last[n])}
    assert moved == {"embedding", *IN_BLOCKS}
    assert plain.states["blocks.0.sometimes"]["step"] < plain.states["embedding"]["step"] == STEPS
    assert "frozen" not in plain.states
    assert plain.states["empty"]["exp_avg"].shape == (0, 7)
    scaled = anchor(case_of({"scaling": "GradScaler"}).recipe)
    assert differences_at(scaled, INF_STEP - 1, INF_STEP) == set()
    assert differences_at(scaled, INF_STEP, INF_STEP + 1) != set()
    assert all(loss.isfinite() for loss in scaled.losses)


@pytest.mark.parametrize("placement", AXES["placement"])
def test_a_state_dict_that_is_kept_is_of_one_moment(placement: str, tmp_path: Path) -> None:
    """Live or frozen, as torch leaves it open; never a new step count beside old moments."""
    case = case_of({"placement": placement})
    trainer = Trainer(case.recipe, case.route, tmp_path)
    trainer.train(0, NO_TAPS)
    kept = trainer.optimizer.state_dict()["state"]
    moments = [copy.deepcopy(kept)]
    trainer.train(2, NO_TAPS)
    moments.append(copy.deepcopy(trainer.optimizer.state_dict()["state"]))
    for index, entry in kept.items():
        assert any(unequal(entry, moment[index]) == [] for moment in moments)
    trainer.optimizer.close()


@pytest.mark.parametrize("durability", AXES["durability"])
@pytest.mark.parametrize("placement", ["split", "disk"])
def test_a_share_is_a_part(placement: str, durability: str, tmp_path: Path) -> None:
    """Else the axis would compare all in RAM with all on disk, which placement does already."""
    case = case_of({"share": "some", "placement": placement, "durability": durability})
    with small_ring(case.recipe, case.route):
        some = Trainer(case.recipe, case.route, tmp_path / "some")
        none = Trainer(case.recipe, replace(case.route, share="none"), tmp_path / "none")
    for trainer in (some, none):
        trainer.train(0, NO_TAPS)
    kept, least = some.optimizer._memory(), none.optimizer._memory()
    assert least.ram_bytes < kept.ram_bytes < kept.logical_bytes == least.logical_bytes
    # Commits take out of RAM what is in it.
    assert (kept.file_bytes == least.file_bytes) == (durability == "commit")
    for trainer in (some, none):
        trainer.optimizer.close()


def differences_at(outcome: Outcome, one: int, other: int) -> set[str]:
    a, b = outcome.weights[one], outcome.weights[other]
    return {name for name in a if not torch.equal(a[name], b[name])}


RECIPE_EFFECTS: list[dict[str, Value]] = [
    {"optimizer": "Adam"},
    {"optimizer": "CPUAdam-uncorrected"},
    {"dtype": "bf16"},
    {"grad_dtype": "bf16"},
    {"amsgrad": True},
    {"maximize": True},
    {"weight_decay": 0.0},
    {"accumulation": 3},
    {"clipping": "torch"},
    {"clipping": "ours"},
    {"optimizer": "HybridAdam-adamw", "scaling": "div_scale"},
    {"scaling": "GradScaler"},
    {"lr": "scheduled"},
    {"lr": "tensor"},
]


@pytest.mark.parametrize("row", RECIPE_EFFECTS, ids=str)
def test_every_axis_of_the_recipe_changes_the_anchor(row: dict[str, Value]) -> None:
    """An axis without an effect on the anchor would be compared with nothing."""
    assert differences(anchor(case_of(row).recipe), anchor(case_of({}).recipe)) != []
