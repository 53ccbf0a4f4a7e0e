"""A store, and places elsewhere that answer without pauses."""

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from tensorstow.io.engine import open_engine
from tensorstow.store import remote, remote_marks
from tensorstow.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open([tmp_path], open_engine()) as opened:
        yield opened


@pytest.fixture(params=["folder", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "bucket")
        return
    yield f"memory://{tmp_path.name}"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_PAUSES", (0.0, 0.0))
    monkeypatch.setattr(remote_marks, "_PAUSES", (0.01,) * 50)
