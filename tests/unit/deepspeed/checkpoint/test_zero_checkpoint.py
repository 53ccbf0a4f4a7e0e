"""DeepSpeed's own checkpoints in an engine: the bits of states, other ranks, what is refused."""

import dataclasses
import gc
from pathlib import Path

import pytest
import torch

from compare import all_equal
from ranks.pool import Ranks
from ranks.zero_read import HYPER, Held, Words, engine_for, loaded_from, run_of
from tensorstow.base.errors import OptionError, StoreFormatError
from tensorstow.deepspeed.checkpoint.zero_checkpoint import ZeroCheckpoint
from tensorstow.deepspeed.checkpoint.zero_files import (
    model_files,
    read_file,
)
from zero_written import DynamicLossScaler, ZeroRun


def check(held: Held, run: ZeroRun) -> None:
    """Compare to the last bit, and a step with torch's."""
    for group in run.groups:
        for name, kept in group.items():
            for key, values in kept.items():
                assert torch.equal(held.trained[name][key], values), (name, key)
            assert torch.equal(held.others[name].float(), kept["fp32"].to(run.dtype).float())
    for name, values in {**run.frozen, **run.buffers}.items():
        assert torch.equal(held.others[name], values), name
    assert held.counts == run.counts
    assert held.client == run.client
    assert held.scheduled == 2
    assert [g["weight_decay"] for g in held.groups] == [0.1, 0.0]
    assert [g["betas"] for g in held.groups] == [(0.8, 0.9)] * 2


def by_torch(run: ZeroRun, lr: float) -> dict[str, torch.Tensor]:
    """Take the next step with torch's AdamW."""
    model = Words()
    named = dict(model.named_parameters())
    groups = []
    for group, hyper in zip(run.groups, HYPER, strict=True):
        groups.append({**hyper, "lr": lr, "params": [named[name] for name in group]})
    whole = {**run.frozen, **run.buffers}
    whole |= {name: kept["fp32"] for group in run.groups for name, kept in group.items()}
    model.load_state_dict(whole, strict=False)
    optimizer = torch.optim.AdamW(groups)
    for group in run.groups:
        for name, kept in group.items():
            states = {key: kept[key].clone() for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[named[name]] = {"step": torch.tensor(run.step), **states}
    model(torch.arange(7)).backward()
    optimizer.step()
    return {name: named[name].detach() for group in run.groups for name in group}


@pytest.mark.parametrize(
    ("stage", "written_by", "world", "to", "place"),
    [(2, 2, 1, 0, "ram"), (1, 3, 2, 3, "disk"), (3, 3, 1, 3, "disk"), (3, 1, 2, 2, "ram")],
)
def test_any_number_of_ranks_has_the_bits(
    ranks: "Ranks", tmp_path: Path, stage: int, written_by: int, world: int, to: int, place: str
) -> None:
    run = run_of()
    run.write(tmp_path / "saved", stage, written_by)
    disk = str(tmp_path) if place == "disk" else None
    for held in ranks(world).run(loaded_from, str(tmp_path), to, "fp32", disk):
        check(held, run)
        wanted = by_torch(run, held.groups[0]["lr"])
        for name, values in held.after.items():
            torch.testing.assert_close(values, wanted[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("stage", "to", "dtype"), [(3, 2, "bf16"), (2, 3, "fp16")])
def test_masters_have_all_bits_and_a_loss_scale_goes_on(
    tmp_path: Path, stage: int, to: int, dtype: str
) -> None:
    scaler = {"scaler": DynamicLossScaler()} if dtype == "fp16" else {}
    run = run_of(getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[dtype]), **scaler)
    run.write(tmp_path / "saved", stage, 2)
    held = loaded_from(str(tmp_path), to, dtype)
    check(held, run)
    assert held.scale == (512.0 if dtype == "fp16" else 1.0)


def test_the_next_change_of_the_scale_is_when_upstreams_is(tmp_path: Path) -> None:
    run_of(torch.float16, scaler=DynamicLossScaler()).write(tmp_path / "saved", 1, 1)
    state = ZeroCheckpoint(tmp_path / "saved").scale
    assert state == {"scale": 512.0, "patience": 1, "good_steps": 1, "cur_iter": 9}


@pytest.mark.parametrize("stage", [2, 3])
def test_universal_ones_are_found_by_their_own_file(tmp_path: Path, stage: int) -> None:
    run = run_of()
    run.write_universal(tmp_path / "saved", stage)
    check(loaded_from(str(tmp_path), 1), run)
    engine = engine_for(0, load_universal=True)
    with pytest.raises(StoreFormatError, match="has no file latest_universal"):
        engine.load_checkpoint(tmp_path)
    (tmp_path / "latest_universal").write_text("saved\n")
    assert engine.load_checkpoint(tmp_path) == (str(tmp_path / "saved"), run.client)
    engine.destroy()


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_alone_leave_states_and_counters(tmp_path: Path, stage: int) -> None:
    run = run_of()
    run.write(tmp_path / "saved", stage, 2)
    held = loaded_from(str(tmp_path), 2, load_module_only=True)
    assert held.counts == (0, 0, 0)
    assert [g["weight_decay"] for g in held.groups] == [0.5, 0.5]
    for group in run.groups:
        for name, kept in group.items():
            assert torch.equal(held.trained[name]["fp32"], kept["fp32"])
            assert held.trained[name]["exp_avg"] is None


def test_what_is_of_another_model_is_told(tmp_path: Path) -> None:
    run = run_of()
    run.write(tmp_path / "saved", 2, 1)
    run.groups[0]["out.weight"]["fp32"] = torch.zeros(3, 5)
    run.write(tmp_path / "turned", 3, 1)
    engine = engine_for(0)
    before = [p.detach().clone() for p in engine.parameters()]
    with pytest.raises(OptionError, match=r"out.weight is \(3, 5\) .* \(5, 3\) in the model"):
        engine.load_checkpoint(tmp_path, "turned")
    engine.module.more = torch.nn.Linear(1, 1)
    with pytest.raises(OptionError, match=r"it lacks \['more.bias', 'more.weight'\]"):
        engine.load_checkpoint(tmp_path, "saved")
    del engine.module.more
    engine.optimizer.param_groups.append(engine.optimizer.param_groups.pop(0))
    with pytest.raises(OptionError, match=r"groups of \[3, 2\] parameters and the optimizer of"):
        engine.load_checkpoint(tmp_path, "saved")
    engine.optimizer.param_groups.append(engine.optimizer.param_groups.pop(0))
    checkpoint = ZeroCheckpoint(tmp_path / "saved")
    checkpoint._partitions.fragments["out.bias"]["momentum_buffer"] = []
    with pytest.raises(OptionError, match=r"'momentum_buffer'.*, and the optimizer is AdamW"):
        checkpoint.check(engine.module, engine.optimizer, strict=True)
    assert all_equal(engine.parameters(), before)
    engine.destroy()


@pytest.mark.parametrize("stage", [2, 3])
def test_values_that_cannot_be_are_refused_before_anything_changes(
    tmp_path: Path, stage: int
) -> None:
    betas = [{**HYPER[0], "betas": (2, 3)}, HYPER[1]]
    for name, changed, said in (
        ("steps", {"counts": ("x", 0, 12)}, "global_steps='x'"),
        ("samples", {"counts": (3, 0, -1)}, "global_samples=-1"),
        ("betas", {"hyper": betas}, r"betas\[0\]=2"),
        ("step", {"step": -5.0}, "'step' of embedding.weight is -5.0"),
        ("scheduler", {"scheduler": {"last_batch_iteration": "x"}}, "last_batch_iteration='x'"),
    ):
        dataclasses.replace(run_of(), **changed).write(tmp_path / name, stage, 1)
        engine = engine_for(0)
        before = [p.detach().clone() for p in engine.parameters()]
        with pytest.raises(StoreFormatError, match=said):
            engine.load_checkpoint(tmp_path, name)
        assert all_equal(engine.parameters(), before)
        engine.destroy()


def test_what_it_returns_is_not_of_the_files(tmp_path: Path) -> None:
    run = run_of()
    run.client = {"best": torch.ones(3)}
    run.write(tmp_path / "saved", 2, 1)
    engine = engine_for(0)
    _, client = engine.load_checkpoint(tmp_path, "saved")
    assert torch.equal(client["best"], torch.ones(3))
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    engine.destroy()


def test_frozen_weights_that_were_left_out_are_told(tmp_path: Path) -> None:
    run = run_of()
    run.write(tmp_path / "saved", 3, 1)
    (file,) = model_files(tmp_path / "saved")
    saved = read_file(file)
    saved["frozen_param_fragments"] = None
    file.unlink()
    torch.save(saved, file)
    engine = engine_for(0)
    with pytest.raises(StoreFormatError, match=r"no values of frozen.weight"):
        engine.load_checkpoint(tmp_path, "saved")
    engine.destroy()
