"""Checkpoints: bits after a resume, other numbers of ranks, and what is refused."""

from pathlib import Path

import pytest
import torch

from compare import all_equal
from ranks.driven import Drive, engine_by, going_on, loaded, saving_by_rank, saving_half_way
from ranks.pool import Ranks
from tensorstow.base.errors import StoreFormatError
from tensorstow.deepspeed.checkpoint.sharded import latest_tag, read_common
from tensorstow.deepspeed.config.settings import OffloadOptimizer, OffloadParam, Zero

DRIVES = [
    Drive(Zero(2, OffloadOptimizer("cpu")), accumulation=2),
    Drive(Zero(3, OffloadOptimizer("nvme"), OffloadParam("cpu")), bf16=True),
    Drive(Zero(3, OffloadOptimizer("nvme"), OffloadParam("nvme")), bf16=True),
]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("drive", DRIVES, ids=str)
def test_a_resumed_run_has_the_bits_of_one_that_went_on(
    ranks: "Ranks", tmp_path: Path, drive: Drive, world: int
) -> None:
    want = ranks(world).run(saving_half_way, drive, str(tmp_path))
    got = ranks(world).run(going_on, drive, str(tmp_path))
    assert latest_tag(tmp_path) == "global_step1"
    for a, b in zip(got, want, strict=True):
        assert all_equal(a, b)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("drive", DRIVES[1:], ids=str)
def test_another_number_of_ranks_loads_it(
    ranks: "Ranks", tmp_path: Path, drive: Drive, saved_by: int, loaded_by: int
) -> None:
    ranks(saved_by).run(saving_half_way, drive, str(tmp_path))
    want = ranks(saved_by).run(loaded, drive, str(tmp_path))
    got = ranks(loaded_by).run(loaded, drive, str(tmp_path))
    assert all_equal(got[0][0], want[0][0])
    for name in want[0][1]:
        masters = [torch.cat([own[name] for _, own in each]) for each in (got, want)]
        assert torch.equal(*masters), name
    assert ranks(loaded_by).run(going_on, drive, str(tmp_path))


def test_ranks_with_different_folders_are_told(ranks: "Ranks", tmp_path: Path) -> None:
    for told in ranks(2).run(saving_by_rank, DRIVES[0], str(tmp_path)):
        assert told[0] == "save_checkpoint('') was called: pass a directory."
        assert "save_checkpoint() was called with the tags ['rank0', 'rank1']" in told[1]
        places = [f"{tmp_path}/{rank}" for rank in range(2)]
        assert f"save_checkpoint() was called with the directories {places}" in told[2]
        assert "load_checkpoint() was called with the tags ['global_step0', None]" in told[3]
    assert [each.name for each in tmp_path.iterdir()] == ["there"]


def test_a_folder_without_a_checkpoint_is_told(tmp_path: Path) -> None:
    assert latest_tag(tmp_path) is None
    with pytest.raises(StoreFormatError, match=r"it is not a checkpoint"):
        read_common(tmp_path)
    torch.save({"groups": []}, tmp_path / "engine.pt")
    whole = (tmp_path / "engine.pt").read_bytes()
    for damaged in (b"", whole[: len(whole) // 2]):
        (tmp_path / "engine.pt").write_bytes(damaged)
        with pytest.raises(StoreFormatError, match=r"engine.pt cannot be read: it is damaged"):
            read_common(tmp_path)


def test_frozen_weights_that_a_state_dict_lacks_are_left_out_too(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    model[0].requires_grad_(requires_grad=False)
    engine = engine_by(model)
    whole = engine.module.state_dict()
    engine.module.state_dict = lambda: {k: v for k, v in whole.items() if k.startswith("1.")}
    engine.save_checkpoint(tmp_path, "few", exclude_frozen_parameters=True)
    del engine.module.state_dict
    with torch.no_grad():
        engine.module[1].weight.zero_()
    saved = model[1].weight.detach().clone()
    engine.load_checkpoint(tmp_path, "few", load_module_strict=False)
    assert not torch.equal(model[1].weight, saved)
    engine.destroy()


@pytest.mark.parametrize("tag", ["../elsewhere", "/elsewhere", "..", "", "\udc80"])
def test_a_tag_that_leads_out_of_the_directory_is_refused(tmp_path: Path, tag: str) -> None:
    (tmp_path / "latest").write_bytes(tag.encode("utf-8", "surrogateescape"))
    if tag == "\udc80":
        assert latest_tag(tmp_path) == "\ufffd"  # no name of a directory
        return
    with pytest.raises(StoreFormatError, match=r"latest names .* which is no file in"):
        latest_tag(tmp_path)
