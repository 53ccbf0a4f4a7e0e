"""Damaged, cut and absent files of doors' checkpoints: each is an error that names the file."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from compare import all_equal
from doors import DOORS, Door
from ranks.pool import Ranks
from ranks.zero_read import Words, errors_of_loading, saved_by_engine
from tensorstow import quantize_to_int8, save_safetensors, stow
from tensorstow.base.errors import StowError
from tensorstow.colossalai.booster import Booster
from tensorstow.colossalai.booster.plugin import GeminiPlugin
from tensorstow.deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
from tensorstow.io import digest_list
from tensorstow.io.digest_list import SUFFIX

FLIPS = 12
"""In each file, beside those at both ends."""


def places(length: int) -> list[int]:
    """Return bytes to damage: the first, the last, and others."""
    drawn = torch.randint(length, (FLIPS,), generator=torch.Generator().manual_seed(length))
    return sorted({0, length - 1, *drawn.tolist()})


def outcome(door: Door, folder: Path) -> str | None:
    """Load; return the error, or None."""
    try:
        door.load(folder)
    except StowError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", DOORS)
def test_no_damage_is_silent(tmp_path: Path, name: str) -> None:
    with DOORS[name]() as door:
        door.save(tmp_path)
        before = door.contents()
        assert outcome(door, tmp_path) is None
        files = [p for p in tmp_path.rglob("*") if p.is_file()]
        assert len(files) > 5
        silent = []
        for file in files:
            whole = file.read_bytes()
            for at in places(len(whole)):
                flipped = bytearray(whole)
                flipped[at] ^= 1 << at % 8
                for damaged in (flipped, whole[:at]):
                    file.write_bytes(damaged)
                    said = outcome(door, tmp_path)
                    if said is None or file.name not in said:
                        silent.append((file.name, at, len(damaged), said))
                    assert all_equal(door.contents(), before)
            if file.suffix != SUFFIX:
                file.unlink()
                said = outcome(door, tmp_path)
                if said is None or file.name not in said:
                    silent.append((file.name, "gone", said))
            file.write_bytes(whole)
        assert outcome(door, tmp_path) is None
    assert silent == []


def _quantized(saved: Path, into: Path) -> None:
    quantize_to_int8(Words(), saved, into)


def _in_fp32(saved: Path, into: Path, size: str | None, *, safetensors: bool) -> None:
    convert_zero_checkpoint_to_fp32_state_dict(saved, into, size, safe_serialization=safetensors)


DERIVED: dict[str, Callable[[Path, Path], object]] = {
    "int8": _quantized,
    "fp32": partial(_in_fp32, size=None, safetensors=False),
    "fp32, several files": partial(_in_fp32, size="100B", safetensors=False),
    "fp32, safetensors": partial(_in_fp32, size=None, safetensors=True),
    "fp32, several safetensors": partial(_in_fp32, size="100B", safetensors=True),
}
"""What is written from other files."""


@pytest.mark.parametrize("name", DERIVED)
def test_no_damage_of_what_is_written_from_other_files_is_silent(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved, made = tmp_path / "saved", tmp_path / "made"
    with DOORS["DeepSpeed"]() as door:
        door.save(saved)
    source = saved
    if name == "int8":
        source = tmp_path / "source"
        save_safetensors(Words(), source)
    DERIVED[name](source, made)

    def said() -> str:
        try:
            if list(made.glob("*.bin")):
                Booster(plugin=GeminiPlugin()).load_model(Words(), made)
            else:
                stow(Words(), None, weights=made)
        except StowError as error:
            return str(error)
        return ""

    assert said() == ""
    silent = []
    for file in sorted(made.iterdir()):
        whole = file.read_bytes()
        for at in places(len(whole)):
            for damaged in (whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], whole[:at]):
                file.write_bytes(damaged)
                if str(made) not in said():  # another name of a tensor is an error of all files
                    silent.append((file.name, at, len(damaged)))
        file.write_bytes(whole)
    assert silent == []
    DERIVED[name](source, made)
    assert said() == ""
    assert "has no list of digests" not in caplog.text


@pytest.mark.parametrize("name", DOORS)
def test_checkpoints_of_others_are_loaded_and_a_cut_file_is_named(
    tmp_path: Path,
    name: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(digest_list, "_warned_unlisted", set())
    with DOORS[name]() as door:
        door.save(tmp_path)
        for listing in tmp_path.rglob(f"*{SUFFIX}"):
            listing.unlink()
        before = door.contents()
        with caplog.at_level(logging.WARNING, "tensorstow"):
            assert outcome(door, tmp_path) is None
            assert outcome(door, tmp_path) is None
        assert caplog.text.count("has no list of digests") == 1
        assert all_equal(door.contents(), before)
        unnamed = []
        for file in [p for p in tmp_path.rglob("*") if p.is_file()]:
            if file.name == "latest":
                continue
            whole = file.read_bytes()
            for length in (0, 1, len(whole) // 2, len(whole) - 1, None):
                if length is None:
                    file.unlink()
                else:
                    file.write_bytes(whole[:length])
                said = outcome(door, tmp_path)
                named = str(file.parent if length is None else file)
                if said is None or named not in said:
                    unnamed.append((file.name, length, said))
                assert all_equal(door.contents(), before)
            file.write_bytes(whole)
    assert unnamed == []


def _first(values: dict[str, Any], key: str, value: object) -> None:
    """Set an option of the first group."""
    values["groups"][0][key] = value


def _all_steps(values: dict[str, Any], step: object) -> None:
    values["steps"] = dict.fromkeys(values["steps"], step)


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "lr, text": (lambda v: _first(v, "lr", "x"), "lr='x'"),
    "lr, NaN": (lambda v: _first(v, "lr", float("nan")), "lr=nan"),
    "betas": (lambda v: _first(v, "betas", (2.0, 3.0)), r"betas\[0\]=2.0"),
    "amsgrad": (
        lambda v: _first(v, "amsgrad", not v["groups"][0]["amsgrad"]),
        "decides which states exist",
    ),
    "one group less": (lambda v: v["groups"].pop(), r"groups of \[3\] parameters"),
    "another class": (lambda v: v.update({"class": "SGD"}), "has the states of SGD"),
    "steps, text": (lambda v: _all_steps(v, "x"), "'step' of embedding.weight is 'x'"),
    "steps, negative": (lambda v: _all_steps(v, -5.0), "'step' of embedding.weight is -5.0"),
    "steps of another": (lambda v: v["steps"].update(other=1.0), "'other' has states"),
    "groups": (lambda v: v.update(groups=None), "engine.pt cannot be read"),
    "no counter": (lambda v: v.pop("global_steps"), "global_steps"),
    "counter, text": (lambda v: v.update(global_steps="x"), "global_steps='x'"),
    "client": (lambda v: v.update(client_state=5), "engine.pt cannot be read"),
    "scheduler": (lambda v: v["scheduler"].clear(), "no 'last_batch_iteration'"),
    "scheduler, text": (
        lambda v: v["scheduler"].update(last_batch_iteration="x"),
        "last_batch_iteration='x'",
    ),
    "nothing": (lambda v: v.clear(), "engine.pt cannot be read"),
}
"""What is done to the values of a checkpoint without digests, and what is said of it."""


@pytest.mark.parametrize("name", EDITS)
def test_values_that_cannot_be_are_refused_before_anything_changes(
    tmp_path: Path, name: str
) -> None:
    edit, said = EDITS[name]
    with DOORS["DeepSpeed"]() as door:
        door.save(tmp_path)
        for listing in tmp_path.rglob(f"*{SUFFIX}"):
            listing.unlink()
        (file,) = tmp_path.rglob("engine.pt")
        values = torch.load(file, weights_only=True)
        edit(values)
        torch.save(values, file)
        before = door.contents()
        with pytest.raises(StowError, match=said):
            door.load(tmp_path)
        assert all_equal(door.contents(), before)


@pytest.mark.parametrize("of_rank", [0, 1])
def test_every_rank_says_what_one_of_them_found(ranks: Ranks, tmp_path: Path, of_rank: int) -> None:
    ranks(2).run(saved_by_engine, str(tmp_path), 2, "fp32")
    (file,) = tmp_path.rglob(f"__{of_rank}_0.distcp")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    errors = ranks(2).run(errors_of_loading, str(tmp_path))
    assert all(error is not None and file.name in error for error in errors)


def test_a_file_of_zeros_without_digests_is_an_error_of_ours(tmp_path: Path) -> None:
    with DOORS["DeepSpeed"]() as door:
        door.save(tmp_path)
        for listing in tmp_path.rglob(f"*{SUFFIX}"):
            listing.unlink()
        (file,) = tmp_path.rglob("*.distcp")
        whole = file.read_bytes()
        file.write_bytes(bytes(len(whole)))
        assert "cannot be read: it is damaged" in str(outcome(door, tmp_path))
        file.write_bytes(whole + b"\0")  # not what the metadata says
        assert f"{file} is gone, was cut short or is another" in str(outcome(door, tmp_path))


def test_an_interrupt_of_a_read_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        failure = KeyboardInterrupt()
        step = "read"
        raise CheckpointException(step, {0: (failure, StackSummary())})

    with DOORS["DeepSpeed"]() as door:
        door.save(tmp_path)
        monkeypatch.setattr("tensorstow.deepspeed.checkpoint.sharded.load_tensors", interrupted)
        with pytest.raises(KeyboardInterrupt):
            door.load(tmp_path)
