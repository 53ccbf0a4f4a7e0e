"""The parity of stowed training can fail: every break of the engine is noticed."""

from pathlib import Path

import pytest
import torch

from compare import all_equal
from ranks.mutants import MUTANTS, mutated
from ranks.pool import Ranks
from ranks.stowed import RunConfig, alone, stowed
from tensorstow import Plan

BF16 = torch.bfloat16
CONFIGS = {
    "narrow_sums": RunConfig(Plan(accumulation_steps=3), dtype=BF16),
    "last_micro_batch": RunConfig(Plan(accumulation_steps=2)),
    "own_norm": RunConfig(clip=0.05),
    "old_weights": RunConfig(Plan(overlap="forward", states="disk")),
    "unwritten": RunConfig(Plan(parameters="disk", states="disk")),
    "unreduced": RunConfig(Plan(stage=1, accumulation_steps=2)),
    "other_rows": RunConfig(),
    "thawed": RunConfig(frozen=True),
    "frozen_not_resumed": RunConfig(frozen=True, resume="asked"),
    "weights_not_resumed": RunConfig(resume="due"),
}


def test_every_break_has_its_config() -> None:
    assert CONFIGS.keys() == MUTANTS.keys()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_engine_is_noticed(tmp_path: Path, ranks: "Ranks", name: str) -> None:
    config = CONFIGS[name]
    want = alone(config, 2)
    for got in ranks(2).run(stowed, config, tmp_path / "right"):
        assert all_equal(got, want)
    for got in ranks(2).run(mutated, config, name, tmp_path / "broken"):
        differs = isinstance(got, str) or not all_equal(got, want)
        assert differs
