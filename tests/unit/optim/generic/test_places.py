"""Pieces have places of their own, on every directory in turn, and leave them for others."""

from pathlib import Path

import pytest
import torch

from tensorstow import _native
from tensorstow.base.errors import DirectoryError
from tensorstow.optim.generic.places import PieceFiles
from tensorstow.states.policy import PipelinePolicy

BLOCK = 4096


def places_in(directories: list[Path], expected: int = 0) -> PieceFiles:
    for directory in directories:
        directory.mkdir(exist_ok=True)
    return PieceFiles(directories, expected, PipelinePolicy())


def test_directories_take_turns(tmp_path: Path) -> None:
    places = places_in([tmp_path / "a", tmp_path / "b"])
    taken = [places.take(BLOCK) for _ in range(4)]
    assert [(p.file, p.offset) for p in taken] == [(0, 0), (1, 0), (0, BLOCK), (1, BLOCK)]
    assert places.file_bytes == 4 * BLOCK
    places.close()
    places.close()


def test_room_that_was_given_back_is_taken_again(tmp_path: Path) -> None:
    places = places_in([tmp_path])
    first, _ = places.take(BLOCK), places.take(2 * BLOCK)
    places.free(first)
    assert places.take(2 * BLOCK) != first
    assert places.take(BLOCK) == first
    places.close()


def test_bytes_come_back(tmp_path: Path) -> None:
    places = places_in([tmp_path / "a", tmp_path / "b"])
    sent = [torch.full((BLOCK,), i, dtype=torch.uint8) for i in range(5)]
    taken = [places.take(BLOCK) for _ in sent]
    for place, tensor in zip(taken, sent, strict=True):
        places.write(place, tensor).wait()
    for place, tensor in zip(taken, sent, strict=True):
        back = torch.empty_like(tensor)
        places.read(place, back).wait()
        assert torch.equal(back, tensor)
    places.close()


def test_a_disk_that_fills_up_is_an_error_at_the_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = places_in([tmp_path])
    monkeypatch.setattr(_native, "fallocate", lambda _fd, _length: 28)
    for _ in range(2):
        with pytest.raises(DirectoryError, match="No space left"):
            places.take(BLOCK)
    assert places.file_bytes == 0
    places.close()


def test_a_chosen_directory_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    places = PieceFiles([], BLOCK, PipelinePolicy())
    assert str(tmp_path) in caplog.text
    places.close()
