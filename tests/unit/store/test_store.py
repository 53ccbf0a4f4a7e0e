"""The store: allocate, commit, pin, resume; one holder; nothing in use is ever handed out."""

import itertools
import stat
import sys
import threading
from pathlib import Path

import pytest
import torch

from powerloss.contents import (
    SHAPE,
    bytes_of,
    commit,
    layout_of,
    make_content,
    read_chunk,
    release_all,
)
from tensorstow.base.errors import (
    OptionError,
)
from tensorstow.io.engine import open_engine
from tensorstow.store.records import HEADER_BYTES, ChunkRecord, Content, Extent
from tensorstow.store.store import Store

MIB = 1 << 20


def reopen(store: Store) -> Store:
    directories = store.directories
    store.close()
    return Store.open(directories, open_engine())


def used_bytes(store: Store) -> int:
    space = store._space.extents
    return sum(space.sizes) - HEADER_BYTES * len(space.sizes) - sum(f.nbytes for f in space.free)


def test_a_new_store_is_empty(store: Store, tmp_path: Path) -> None:
    assert store.generation() is None
    assert store.generations() == []
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"lock", "manifest.sqlite", "manifest-copy.sqlite", "states-0.bin"}
    databases = ("manifest.sqlite", "manifest-copy.sqlite")
    ours = {f"{name}{end}" for name in databases for end in ("", "-wal", "-shm")}
    assert names <= {"lock", "states-0.bin"} | ours


def test_files_are_the_owners_alone(store: Store, tmp_path: Path) -> None:
    commit(store, 1)
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_what_was_committed_is_there_after_reopening(store: Store) -> None:
    content = make_content(store, 5, extra={"seed": [1, 2.5, None]})
    made = store.commit(content)
    assert (made.number, made.step, made.names) == (1, 5, ())
    again = reopen(store)
    found = again.generation()
    assert found == made
    assert found.created == made.created
    for record in found.chunks:
        wanted = bytes_of(SHAPE, 5000 + record.chunk)
        start = SHAPE.weight_offset if record.blank else 0
        assert torch.equal(read_chunk(again, record.extent)[start:], wanted[start:])
    (record,) = found.tensors
    assert torch.equal(again.read_tensor(record), torch.full((7,), 5))
    again.close()


def test_numbers_in_json_are_the_same_bits(store: Store) -> None:
    hyper = [{"lr": 0.1 + 0.2, "eps": 5e-324, "betas": [1 / 3, 0.999], "big": 2**70}]
    store.commit(Content(1, {"chunks": []}, hyper, float("inf"), []))
    found = store.generation()
    assert found is not None
    assert found.hyper == hyper
    assert found.extra == float("inf")


def test_a_commit_replaces_the_one_before(store: Store) -> None:
    contents = [commit(store, step) for step in range(1, 8)]
    (summary,) = store.generations()
    assert (summary.number, summary.step, summary.chunk_count) == (7, 7, 3)
    assert summary.bytes == 3 * SHAPE.nbytes + 4096 == used_bytes(store)
    # Two generations' room was enough for seven.
    assert len({c.chunks[0].extent for c in contents}) <= 3


def test_what_a_caller_holds_survives_the_commit_that_drops_it(store: Store) -> None:
    old = make_content(store, 1)
    store.commit(old)
    commit(store, 2)
    commit(store, 3)
    taken = {store.allocate(SHAPE.nbytes) for _ in range(8)}
    assert not taken & set(old.extents())
    release_all(store, old)
    assert store.allocate(SHAPE.nbytes) in old.extents()


def test_a_snapshot_stays_until_it_is_unpinned(store: Store) -> None:
    commit(store, 1)
    pinned = store.add_snapshot("first")
    assert (pinned.number, pinned.names) == (1, ("first",))
    store.add_snapshot("also", 1)
    for step in range(2, 6):
        commit(store, step)
    assert [(s.number, s.names) for s in store.generations()] == [(1, ("also", "first")), (5, ())]
    assert [s.number for s in store.generations() if s.names] == [1]
    first = store.generation("first")
    assert first is not None
    assert (first.step, first.names) == (1, ("also", "first"))
    held = used_bytes(store)
    store.drop_snapshot("first")
    assert used_bytes(store) == held
    store.drop_snapshot("also")
    assert used_bytes(store) == held // 2
    assert [s.number for s in store.generations()] == [5]


def test_the_newest_generation_outlives_its_name(store: Store) -> None:
    commit(store, 1)
    store.add_snapshot("here")
    store.drop_snapshot("here")
    assert [s.number for s in store.generations()] == [1]


def test_going_back_keeps_the_newer_until_the_next_commit(store: Store) -> None:
    commit(store, 1)
    store.add_snapshot("step-1")
    commit(store, 2)
    store = reopen(store)
    old = store.generation("step-1")
    assert old is not None
    for extent in old.extents():
        store.adopt(extent)
    assert [s.number for s in store.generations()] == [1, 2]
    commit(store, 2)
    assert [s.number for s in store.generations()] == [1, 3]
    store.close()


def test_ranks_that_must_agree_keep_one_more(store: Store) -> None:
    commit(store, 1)
    store.commit(make_content(store, 2), keep=1)
    store.commit(make_content(store, 3), keep=1)  # after going back: what lies between goes
    assert [s.number for s in store.generations()] == [1, 3]
    assert store.generation(1) is not None
    store.drop_older()
    assert [s.number for s in store.generations()] == [3]


def test_extents_are_free_once_both_manifests_have_dropped_them(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(store, 1)
    store.commit(make_content(store, 2), keep=1)
    transactions, used = store._transactions, []
    write_heads = transactions._write_heads
    noting = lambda: (used.append(used_bytes(store)), write_heads())  # noqa: E731
    monkeypatch.setattr(transactions, "_write_heads", noting)
    before = used_bytes(store)
    store.drop_older()
    assert used == [before]
    assert used_bytes(store) < before


def test_what_was_never_committed_is_free_after_reopening(store: Store) -> None:
    content = commit(store, 1)
    for _ in range(5):
        store.allocate(MIB)
    store = reopen(store)
    assert used_bytes(store) == sum(e.nbytes for e in content.extents())
    kept = set(content.extents())
    taken = [store.allocate(4096) for _ in range(2000)]
    ranges = sorted([*kept, *taken])
    assert all(a.end <= b.offset for a, b in itertools.pairwise(ranges))
    store.close()


def test_directories_take_turns(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in ("a", "b", "c")]
    for directory in directories:
        directory.mkdir()
    with Store.open(directories, open_engine()) as store:
        assert [f.path.name for f in store.files] == [f"states-{k}.bin" for k in range(3)]
        assert [store.allocate(8192).file for _ in range(6)] == [0, 1, 2, 0, 1, 2]
        commit(store, 1)
        found = store.generation()
        assert found is not None
        assert {r.extent.file for r in found.chunks} == {0, 1, 2}


def test_generations_that_are_not_there_are_named(store: Store) -> None:
    commit(store, 1)
    store.add_snapshot("a")
    commit(store, 2)
    with pytest.raises(OptionError, match=r"snapshot 'b' .* There are: 1 \(a\), 2\."):
        store.generation("b")
    with pytest.raises(OptionError, match="generation 7"):
        store.generation(7)
    with pytest.raises(OptionError, match="snapshot 'b'"):
        store.drop_snapshot("b")


@pytest.mark.parametrize("name", ["", "12"])
def test_names_that_are_none(store: Store, name: str) -> None:
    commit(store, 1)
    with pytest.raises(OptionError, match="with a letter"):
        store.add_snapshot(name)


def test_a_name_is_given_once_and_to_something(store: Store) -> None:
    with pytest.raises(OptionError, match="nothing is committed"):
        store.add_snapshot("a")
    commit(store, 1)
    store.add_snapshot("a")
    with pytest.raises(OptionError, match="generation 1 has that name"):
        store.add_snapshot("a")


def test_extents_that_nobody_has(store: Store) -> None:
    stranger = Extent(0, 8 * MIB, 4096)
    with pytest.raises(OptionError, match="does not hold"):
        store.release(stranger)
    with pytest.raises(OptionError, match="no kept generation"):
        store.adopt(stranger)
    record = ChunkRecord(0, stranger, blank=True, checksums=b"", weight_checksums=b"")
    with pytest.raises(OptionError, match="nobody holds it"):
        store.commit(Content(1, layout_of(1), None, None, [record]))
    with pytest.raises(OptionError, match="0 or more"):
        store.allocate(-1)
    assert store.generation() is None


def test_an_extent_of_nothing(store: Store) -> None:
    nothing = store.allocate(0)
    assert nothing.nbytes == 0
    store.adopt(nothing)
    store.release(nothing)


def test_what_json_cannot_hold_is_refused_before_anything_changes(store: Store) -> None:
    commit(store, 1)
    with pytest.raises(OptionError, match="whose extra cannot be kept"):
        store.commit(Content(2, {"chunks": []}, None, {"rng": object()}, []))
    twice = [ChunkRecord(0, Extent(0, 0, 0), blank=True, checksums=b"", weight_checksums=b"")] * 2
    with pytest.raises(OptionError, match="own number"):
        store.commit(Content(2, {"chunks": []}, None, None, twice))
    assert [s.number for s in store.generations()] == [1]
    commit(store, 2)


def test_a_closed_store_says_so(store: Store) -> None:
    store.close()
    store.close()
    with pytest.raises(OptionError, match="after it was closed"):
        store.allocate(1)


def test_commits_on_one_thread_and_requests_on_another(store: Store) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            while not stop.is_set():
                extents = [store.allocate(8192) for _ in range(5)]
                for extent in extents:
                    store.release(extent)
                store.generations()
        except BaseException as error:  # noqa: BLE001  # the test judges
            failures.append(error)

    thread = threading.Thread(target=ask)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # a thread that computes leaves the interpreter to others sooner
    try:
        thread.start()
        for step in range(1, 30):
            commit(store, step)
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)
    assert not failures
    assert [s.number for s in store.generations()] == [29]
