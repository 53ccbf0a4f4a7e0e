"""What is read of DeepSpeed's files, and what is refused by name."""

import pickle
from pathlib import Path

import pytest
import torch

from ranks.zero_read import run_of
from tensorstow.base.errors import StoreFormatError
from tensorstow.deepspeed.checkpoint.zero_checkpoint import ZeroCheckpoint
from tensorstow.deepspeed.checkpoint.zero_files import (
    FP32,
    model_files,
    optimizer_files,
    partitions_of,
    read_file,
)


class Unknown:
    """A class that a user's client_state may have."""


class Runs:
    """Runs code where pickle reads it."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """Return the call."""
        return exec, ("raise SystemExit",)


@pytest.mark.parametrize(
    ("value", "named"), [(Unknown(), "test_zero_files.Unknown"), (Runs(), "exec")]
)
def test_code_of_a_file_is_not_run(tmp_path: Path, value: object, named: str) -> None:
    torch.save({"args": value}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(StoreFormatError, match=f"an object of \\S*{named}, whose code would run"):
        ZeroCheckpoint(tmp_path)


def test_files_that_are_damaged_or_of_something_else_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    run_of().write(folder, 2, 1)
    (model,), (states,) = model_files(folder), optimizer_files(folder)
    whole = model.read_bytes()
    for damaged in (b"", b"hello", whole[: len(whole) // 2], pickle.dumps({"module": 1})[:-3]):
        model.write_bytes(damaged)
        with pytest.raises(StoreFormatError, match=f"{model} cannot be read: it is damaged"):
            ZeroCheckpoint(folder)
    model.write_bytes(whole)
    for file, key in [(states, "optimizer_state_dict"), (model, "module")]:
        for other in ([1], {"other": 1}):
            torch.save(other, file)
            with pytest.raises(StoreFormatError, match=f'{file} has no "{key}"'):
                _ = ZeroCheckpoint(folder).scale


@pytest.mark.parametrize("name", ["../../../secret", "/secret"])
def test_a_name_that_leads_out_of_a_universal_folder_is_an_error(tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    torch.save({"param": torch.ones(3)}, secret / "key.pt")
    run_of().write_universal(tmp_path / "at" / "saved", 2)
    (file,) = model_files(tmp_path / "at" / "saved")[:1]
    common = read_file(file)
    name = str(secret) if name.startswith("/") else name
    common["param_shapes"][0][name] = torch.Size([3])
    with pytest.raises(StoreFormatError, match="which is no file in"):
        partitions_of(tmp_path / "at" / "saved", [common])


def test_files_of_before_torch_1_6_are_read(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "file", _use_new_zipfile_serialization=False)
    assert torch.equal(read_file(tmp_path / "file")["a"], torch.ones(3))


def test_files_are_mapped(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "file")
    found = read_file(tmp_path / "file")["a"]
    assert str(tmp_path / "file") in Path("/proc/self/maps").read_text()
    assert torch.equal(found, torch.ones(3))


@pytest.mark.parametrize("stage", [1, 3])
def test_files_of_some_ranks_are_missing(tmp_path: Path, stage: int) -> None:
    run_of().write(tmp_path / "saved", stage, 3)
    models = [read_file(file) for file in model_files(tmp_path / "saved")]
    optimizer_files(tmp_path / "saved")[2].unlink()
    with pytest.raises(StoreFormatError, match=r"of 2 ranks and was saved by 3"):
        partitions_of(tmp_path / "saved", models)
    optimizer_files(tmp_path / "saved")[0].unlink()
    with pytest.raises(StoreFormatError, match=r"files of the ranks \[1\]"):
        partitions_of(tmp_path / "saved", models)


def test_a_cut_tensor_lacks_elements(tmp_path: Path) -> None:
    run = run_of()
    run.write(tmp_path / "saved", 2, 2)
    models = [read_file(file) for file in model_files(tmp_path / "saved")]
    models[0]["param_shapes"][1]["more.bias"] = torch.Size([9])
    with pytest.raises(StoreFormatError, match=r"fp32 of more.bias has 9 elements"):
        partitions_of(tmp_path / "saved", models).whole("more.bias", FP32)


def test_layouts_that_are_not_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "mp_rank_01_model_states.pt").touch()
    with pytest.raises(StoreFormatError, match="tensor or pipeline parallelism"):
        model_files(tmp_path)
    for more, said in [({"num_experts": [4]}, "experts"), ({"param_shapes": None}, "stage 0")]:
        run = run_of()
        run.client = more
        run.write(tmp_path / said, 2, 1)
        with pytest.raises(StoreFormatError, match=said):
            _ = ZeroCheckpoint(tmp_path / said).scale
    run = run_of()
    run.write(tmp_path / "nvme", 3, 1)
    (file,) = optimizer_files(tmp_path / "nvme")
    saved = read_file(file)
    saved["optimizer_state_dict"] = {
        "fp32_flat_groups": [torch.empty(0)] * 2,
        "optimizer_state_dict": {"state": {}, "param_groups": []},
    }
    del saved["ds_config"]
    file.unlink()
    torch.save(saved, file)
    with pytest.raises(StoreFormatError, match="they were on NVMe"):
        _ = ZeroCheckpoint(tmp_path / "nvme").scale


def test_elastic_and_old_ones_are_read(tmp_path: Path) -> None:
    """Elastic: states of all groups in a list, without padding; the step in another place."""
    run = run_of()
    folder = tmp_path / "saved"
    run.write(folder, 1, 2)
    models = [read_file(file) for file in model_files(folder)]
    for file in optimizer_files(folder):
        saved = read_file(file)
        optimizer = saved["optimizer_state_dict"]
        states, paddings = optimizer["base_optimizer_state"]["state"], optimizer["group_paddings"]
        lean = [
            {k: v[: v.numel() - p].clone() for k, v in states[i].items() if k != "step"}
            for i, p in enumerate(paddings)
        ]
        told = {
            "base_optimizer_state": lean,
            "base_optimizer_state_step": 3,
            "single_partition_of_fp32_groups": [
                part.detach().clone() for part in optimizer["single_partition_of_fp32_groups"]
            ],
        }
        file.unlink()
        torch.save(
            {"optimizer_state_dict": told}, file.with_name(file.name.replace("_optim", "optim"))
        )
    found = partitions_of(folder, models)
    for group in run.groups:
        for name, kept in group.items():
            assert found.steps[name] == 3.0
            for key, values in kept.items():
                assert torch.equal(found.whole(name, key), values)
    assert [group.values for group in found.groups] == [{}, {}]


def test_groups_that_stage_3_has_cut_are_one(tmp_path: Path) -> None:
    """``sub_group_size`` cuts groups: their numbers are a group's params."""
    run = run_of()
    run.write(tmp_path / "saved", 3, 1)
    (file,) = optimizer_files(tmp_path / "saved")
    saved = read_file(file)
    states = saved["optimizer_state_dict"]["optimizer_state_dict"]
    states["param_groups"] = [{"lr": 0.5, "params": [0, 1]}]
    optimizer = {
        "fp32_flat_groups": saved["optimizer_state_dict"]["fp32_flat_groups"],
        "optimizer_state_dict": states,
    }
    file.unlink()
    torch.save({"optimizer_state_dict": optimizer}, file)
    models = [read_file(each) for each in model_files(tmp_path / "saved")]
    (group,) = partitions_of(tmp_path / "saved", models).groups
    assert group.names == {name for each in run.groups for name in each}
    assert group.values["lr"] == 0.5
