"""Whole fp32 weights of a checkpoint, without an engine."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ranks.driven import Drive, saved_with_masters, written_before_a_step
from ranks.pool import Ranks
from ranks.stowed import model_of
from tensorstow.base.errors import StoreFormatError
from tensorstow.deepspeed.config.settings import OffloadOptimizer, OffloadParam, Zero
from tensorstow.deepspeed.utils import zero_to_fp32
from tensorstow.deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)

DRIVES = [
    Drive(Zero(2, OffloadOptimizer("cpu"))),
    Drive(Zero(3, OffloadOptimizer("nvme"), OffloadParam("cpu")), bf16=True),
]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("drive", DRIVES, ids=str)
def test_a_model_without_an_engine_has_the_trained_weights(
    ranks: "Ranks", tmp_path: Path, drive: Drive, world: int
) -> None:
    want = ranks(world).run(saved_with_masters, drive, str(tmp_path))[0]
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    for name, weight in want.items():
        assert torch.equal(found[name], weight), name
        trained = not name.startswith("blocks.0.")
        assert found[name].dtype == (torch.float32 if trained else weight.dtype)
    lazy = get_fp32_state_dict_from_zero_checkpoint(tmp_path, lazy_mode=True)
    assert {n: (t.shape, t.dtype) for n, t in lazy.items()} == {
        n: (t.shape, t.dtype) for n, t in found.items()
    }
    assert torch.equal(lazy["head.weight"].contiguous(), found["head.weight"])
    model = load_state_dict_from_zero_checkpoint(model_of(torch.float32), tmp_path)
    assert model.state_dict().keys() == found.keys()
    assert all(torch.equal(t, found[n].float()) for n, t in model.state_dict().items())
    few = get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
    left_out = get_fp32_state_dict_from_zero_checkpoint(tmp_path, "trained")
    assert few.keys() == left_out.keys() == {n for n in found if not n.startswith("blocks.0.")}


def test_what_was_written_to_a_weight_counts_more_than_its_master(
    ranks: "Ranks", tmp_path: Path
) -> None:
    (want,) = ranks(1).run(written_before_a_step, str(tmp_path))
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert torch.equal(found["head.weight"], want)


def test_files_hold_what_they_may(
    ranks: "Ranks", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks(1).run(saved_with_masters, DRIVES[0], str(tmp_path / "saved"))
    want = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved")
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", tmp_path / "one", None)
    one = torch.load(tmp_path / "one" / "pytorch_model.bin", weights_only=True)
    assert one.keys() == want.keys()
    given = ["zero_to_fp32", str(tmp_path / "saved"), str(tmp_path / "many")]
    monkeypatch.setattr(sys, "argv", [*given, "--max_shard_size=1kB", "--safe_serialization"])
    runpy.run_path(zero_to_fp32.__file__, run_name="__main__")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "many" / file)[name], want[name])


def test_a_directory_without_a_checkpoint_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreFormatError, match="has no file latest"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    with pytest.raises(StoreFormatError, match=r"no engine\.pt"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path, "global_step1")
