"""States of sharded parameters are DTensors: saved by some ranks, loaded by others, bit for bit."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ranks import saved
from ranks.pool import Ranks
from tensorstow import AdamW

Pools = Callable[[int], Ranks]
DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("states", ["ram", "disk"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [1, 2])
def test_states_are_sharded_as_their_parameters(
    ranks: Pools, world: int, dtype: torch.dtype, states: str
) -> None:
    assert ranks(world).run(saved.kinds, dtype, states) == [[]] * world


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("states", ["ram", "disk"])
def test_any_number_of_ranks_goes_on(
    tmp_path: Path, ranks: Pools, dtype: torch.dtype, states: str
) -> None:
    ranks(2).run(saved.save, tmp_path / "cp", dtype, states)
    other = "disk" if states == "ram" else "ram"
    for world, sharded in ((1, True), (1, False), (2, True), (4, True)):
        found = ranks(world).run(saved.load, tmp_path / "cp", dtype, other, sharded)
        assert found == [[[], []]] * world, (world, sharded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("states", ["ram", "disk"])
def test_whole_states_and_back(ranks: Pools, dtype: torch.dtype, states: str) -> None:
    assert ranks(2).run(saved.whole_and_back, dtype, states) == [[[], []]] * 2


@pytest.mark.parametrize("how", ["whole", "replicated"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_rank_takes_its_own(ranks: Pools, how: str, dtype: torch.dtype) -> None:
    assert ranks(2).run(saved.loaded_by, how, AdamW, dtype) == [[[]]] * 2


def test_torchs_own_optimizer_takes_them_and_gives_them(ranks: Pools) -> None:
    given = (saved.loaded_by, "whole", torch.optim.AdamW, torch.float32)
    assert ranks(2).run(*given) == [[[]]] * 2


def test_shards_of_other_ranks_are_refused(tmp_path: Path, ranks: Pools) -> None:
    for told in ranks(2).run(saved.refused, "load_state_dict", tmp_path):
        assert told.startswith("OptionError: The saved 'exp_avg' is a DTensor over")
        assert "torch.distributed.checkpoint" in told


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_file_is_read_by_all_and_written_by_none(
    tmp_path: Path, ranks: Pools, dtype: torch.dtype
) -> None:
    for told in ranks(2).run(saved.refused, "save_safetensors", tmp_path):
        assert told.startswith("OptionError: save_safetensors() was called")
        assert "dcp.save" in told
    model = saved.make_model(dtype, sharded=False)
    optimizer = AdamW(model.parameters(), lr=0.01)
    saved.take_steps(model, optimizer, range(3))
    optimizer.save_safetensors(tmp_path / "states.safetensors")
    assert ranks(2).run(saved.from_safetensors, tmp_path / "states.safetensors", dtype) == [[]] * 2
