"""Damaged, cut and absent files of doors' checkpoints: each is an error that names the file."""

import logging
from pathlib import Path
from traceback import StackSummary

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from compare import all_equal
from doors import DOORS, Door
from ranks.pool import Ranks
from ranks.zero_read import errors_of_loading, saved_by_engine
from tensorstow.base.errors import StowError
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
        files = [
            p for p in tmp_path.rglob("*") if p.is_file() and p != tmp_path / "pytorch_model.bin"
        ]
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
            if file == tmp_path / "pytorch_model.bin" or file.name == "latest":
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
            file.write_bytes(whole)
    assert unnamed == []


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
