"""The parity of stowed training can fail: every break of the engine is noticed."""

from pathlib import Path

import pytest
import torch

from compare import all_equal
from ranks.mutants import MUTANTS, mutated
from ranks.pool import Ranks
from ranks.stowed import Course, alone, stowed
from tensorstow import Plan

BF16 = torch.bfloat16
COURSES = {
    "narrow_sums": Course(Plan(accumulation_steps=3), dtype=BF16),
    "last_micro_batch": Course(Plan(accumulation_steps=2)),
    "own_norm": Course(clip=0.05),
    "old_weights": Course(Plan(overlap="forward", states="disk")),
    "unwritten": Course(Plan(parameters="disk", states="disk")),
    "unreduced": Course(Plan(stage=1, accumulation_steps=2)),
    "other_rows": Course(),
    "thawed": Course(frozen=True),
    "frozen_not_resumed": Course(frozen=True, resume="asked"),
    "weights_not_resumed": Course(resume="due"),
}


def test_every_break_has_its_course() -> None:
    assert COURSES.keys() == MUTANTS.keys()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_engine_is_noticed(tmp_path: Path, ranks: "Ranks", name: str) -> None:
    course = COURSES[name]
    want = alone(course, 2)
    for got in ranks(2).run(stowed, course, tmp_path / "right"):
        assert all_equal(got, want)
    for got in ranks(2).run(mutated, course, name, tmp_path / "broken"):
        differs = isinstance(got, str) or not all_equal(got, want)
        assert differs
