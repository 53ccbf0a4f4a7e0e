"""Parity through the engine: stages, tiers, schedules and ranks give the bits of one process."""

import pytest
import torch

from ranks.pool import Ranks
from ranks.stowed import Course, alone, stowed
from tensorstow import Plan

COURSES = [
    Course(),
    Course(Plan(states="disk")),
    Course(Plan(states="disk"), dtype=torch.bfloat16),
    Course(Plan(states="disk", overlap="forward"), clip=0.1),
    Course(Plan(states="disk", overlap="backward"), dtype=torch.bfloat16),
    Course(Plan(accumulation_steps=3), clip=0.05),
    Course(Plan(accumulation_steps=3, states="disk"), dtype=torch.bfloat16),
    Course(Plan(accumulation_steps=2, states="disk", overlap="backward")),
    Course(Plan(states="disk"), compute_dtype=torch.bfloat16),
    *(Course(Plan(stage=stage, accumulation_steps=2)) for stage in (0, 1, 2)),
    Course(Plan(stage=1, states="disk", overlap="forward"), dtype=torch.bfloat16),
    Course(Plan(parameters="device", states="disk")),
    Course(Plan(parameters="disk", states="disk")),
    Course(Plan(parameters="disk"), clip=0.1),
    Course(Plan(parameters="disk", states="disk", overlap="backward"), dtype=torch.bfloat16),
    Course(Plan(parameters="disk", states="disk", accumulation_steps=2), dtype=torch.bfloat16),
    Course(Plan(units={"blocks.1": "disk"}, states="disk", overlap="backward")),
]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("course", COURSES, ids=str)
def test_stowed_training_has_the_bits_of_training_alone(
    ranks: "Ranks", course: Course, world: int
) -> None:
    want = alone(course, world)
    for got in ranks(world).run(stowed, course):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
