"""Opening leaves no head behind the manifest: a second crash would look like lost commits."""

from pathlib import Path

import pytest

from powerloss.contents import commit
from tensorstow.io.engine import open_engine
from tensorstow.store.datafiles import find_head, put_head
from tensorstow.store.store import Store


@pytest.mark.parametrize("is_moved", [False, True])
def test_heads_follow_when_a_run_is_opened(tmp_path: Path, *, is_moved: bool) -> None:
    place = tmp_path / "run"
    place.mkdir()
    engine = open_engine("threads")
    with Store.open([place], engine) as store:
        commit(store, 1)
        before, run = store._manifest.head(), store._manifest.run
        if not is_moved:
            commit(store, 2)
    if is_moved:
        place = place.rename(tmp_path / "moved")
    else:  # as if the process had died before the last head was written
        for head in (before, type(before)(run, before.transaction - 1)):
            put_head(place / "states-0.bin", head)
    with Store.open([place], engine) as store:
        known = find_head(place / "states-0.bin", run)
        assert known is not None
        assert known.transaction == store._manifest.transaction == before.transaction + 1
