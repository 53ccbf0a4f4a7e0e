import os
from pathlib import Path

import pytest
import torch

from tensorstow.base.errors import DirectoryError
from tensorstow.checkpoint import torch_file
from tensorstow.checkpoint.torch_file import load_torch_file


def test_tensors_are_mapped_if_the_format_allows_it(tmp_path: Path) -> None:
    for is_zip in (True, False):
        path = tmp_path / f"{is_zip}.pt"
        torch.save({"a": torch.arange(4)}, path, _use_new_zipfile_serialization=is_zip)
        for maps in (True, False):
            assert load_torch_file(path, maps=maps)["a"].tolist() == [0, 1, 2, 3]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file.pt")
    with pytest.raises(DirectoryError, match="it is a pipe where"):
        load_torch_file(tmp_path / "file.pt")


def test_no_more_is_read_whole_than_memory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.pt"
    torch.save({"a": torch.arange(4)}, path)
    monkeypatch.setattr(torch_file, "memory_bytes", lambda: 100)
    with pytest.raises(DirectoryError, match="where at most 100 B are plausible"):
        load_torch_file(path)
    assert load_torch_file(path, maps=True)["a"].tolist() == [0, 1, 2, 3]
