"""Snapshots elsewhere: whole or not visible, incremental, checked, and gone on with."""

import json
import logging
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from typing import Any

import fsspec
import pytest

import children
from pushed import Run, is_same, names_in, trained
from tensorstow.base.errors import (
    DamageError,
    OptionError,
    RemoteError,
    StoreFormatError,
)
from tensorstow.cli.main import main
from tensorstow.store import inspect, remote_snapshots
from tensorstow.store.inspect import inspect_store, open_contents
from tensorstow.store.remote import Remote


def test_a_snapshot_goes_there_and_comes_back(tmp_path: Path, url: str) -> None:
    wanted = trained(tmp_path / "run", "one")
    assert main(["run", "push", str(tmp_path / "run"), url]) == 0
    assert main(["run", "pull", url, str(tmp_path / "back")]) == 0
    assert is_same(tmp_path / "back", wanted)
    assert main(["run", "scrub", str(tmp_path / "back")]) == 0


def test_what_did_not_change_is_not_sent_again(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "run", "one")
    assert main(["run", "push", str(tmp_path / "run"), url, "--snapshot=one", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    before = names_in(url)
    assert main(["run", "push", str(tmp_path / "run"), url, "--snapshot=one", "--name=two"]) == 0
    assert names_in(url) == before
    assert names_in(url, "snapshots") >= {"one.json", "two.json"}
    run = Run(tmp_path / "run")
    with run.optimizer:
        run.optimizer.resume()
        run.step()
        run.optimizer.snapshot("three", to=url)
    assert 0 < len(names_in(url) - before) < len(before)  # the frozen weights stay
    assert first["moved_bytes"] == first["total_bytes"] > 0


def test_it_is_copied_while_the_run_goes_on(tmp_path: Path, url: str) -> None:
    run = Run(tmp_path / "run")
    with run.optimizer:
        run.step()
        run.optimizer.snapshot("one", to=url)
        wanted = run.state()
        for _ in range(3):
            run.step()
            run.optimizer.commit()
        run.optimizer.snapshot("two", to=url)
        run.optimizer.drop("two")
        last = run.state()
    assert main(["run", "pull", url, str(tmp_path / "newest")]) == 0
    assert is_same(tmp_path / "newest", last, "two")
    for name, state in (("one", wanted), ("two", last)):
        assert main(["run", "pull", url, str(tmp_path / name), "--snapshot", name]) == 0
        assert is_same(tmp_path / name, state, name)


def test_the_command_pushes_a_live_run(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, put = threading.Event(), threading.Event(), Remote.put

    def put_late(there: Remote, name: str, data: bytes) -> None:
        if name.startswith("objects/"):
            begun.set()
            assert go_on.wait(60)
        put(there, name, data)

    monkeypatch.setattr(Remote, "put", put_late)
    run = Run(tmp_path / "run")
    with run.optimizer, ThreadPoolExecutor(1) as threads:
        run.step()
        run.optimizer.commit()
        wanted = run.state()
        push = threads.submit(main, ["run", "push", str(tmp_path / "run"), url])
        assert begun.wait(60)
        for _ in range(3):  # each would write where the one before the last was
            run.step()
            run.optimizer.commit()
        go_on.set()
        assert push.result() == 0
        run.step()
        run.optimizer.commit()
        assert len(inspect_store(tmp_path / "run").generations) == 1
    assert names_in(url, "snapshots") == {"step-1.json", "step-1/rank-0-of-1.json"}
    assert main(["run", "pull", url, str(tmp_path / "back")]) == 0
    assert is_same(tmp_path / "back", wanted)


def test_a_run_that_commits_too_often_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "run", "one")
    monkeypatch.setattr(inspect, "pin", lambda *_: False)
    assert main(["run", "push", str(tmp_path / "run"), str(tmp_path / "bucket")]) == 2
    assert "make a snapshot and push that" in capsys.readouterr().err


Fault = Callable[[str, object], None]


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fault], None]:
    """Let a function see each request, and its path; it raises where one is to fail."""

    def use(fault: Fault) -> None:
        for owner in (fsspec.get_filesystem_class("file"), fsspec.get_filesystem_class("memory")):
            for name in ("cat_file", "pipe_file", "find"):
                monkeypatch.setattr(owner, name, _failing(getattr(owner, name), name, fault))

    return use


def _failing(act: Callable[..., object], name: str, fault: Fault) -> Callable[..., object]:
    @wraps(act)
    def request(*given: object, **options: object) -> object:
        fault(name, given[1])
        return act(*given, **options)

    return request


def test_errors_are_repeated(
    tmp_path: Path, url: str, fail: Callable[[Fault], None], caplog: pytest.LogCaptureFixture
) -> None:
    wanted = trained(tmp_path / "run", "one")

    requests: set[tuple[str, str]] = set()

    def at_first(name: str, path: object) -> None:
        request = (name, re.sub(r"\.\w+\.part$", "", str(path)))
        if request not in requests:
            requests.add(request)
            message = "503 Slow Down"
            raise OSError(message)

    fail(at_first)
    with caplog.at_level(logging.WARNING):
        assert main(["run", "push", str(tmp_path / "run"), url]) == 0
        assert main(["run", "pull", url, str(tmp_path / "back")]) == 0
    assert "503 Slow Down" in caplog.text
    assert is_same(tmp_path / "back", wanted)


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_cut_connection_leaves_nothing_visible_and_is_gone_on_with(
    tmp_path: Path,
    url: str,
    kept: int,
    fail: Callable[[Fault], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    wanted = trained(tmp_path / "run", "one")
    is_cut, written = True, 0

    def cut(name: str, _: object) -> None:
        nonlocal written
        written += name == "pipe_file"
        if is_cut and written > kept:
            message = "connection reset"
            raise ConnectionResetError(message)

    fail(cut)
    assert main(["run", "push", str(tmp_path / "run"), url]) != 0
    assert "it goes on where it stopped" in capsys.readouterr().err
    is_cut = False
    assert names_in(url, "snapshots") == set()
    there = names_in(url)
    with pytest.raises(OptionError, match="has none that all ranks have written"):
        remote_snapshots.newest_snapshot(Remote(url))
    with pytest.raises(OptionError, match=r"does not have it\. It has: none"):
        remote_snapshots.find_snapshot(Remote(url), "one")
    assert main(["run", "push", str(tmp_path / "run"), url, "--json"]) == 0
    moved = json.loads(capsys.readouterr().out)
    assert moved["moved_bytes"] < moved["total_bytes"] or not there
    assert main(["run", "pull", url, str(tmp_path / "back")]) == 0
    assert is_same(tmp_path / "back", wanted)


def test_what_cannot_be_written_is_raised_at_the_end_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    run = Run(tmp_path / "run")
    run.step()
    run.optimizer.snapshot("one", to=str(tmp_path / "file" / "bucket"))
    with pytest.raises(RemoteError, match=r"The (list|write|read) of .* failed"):
        run.optimizer.close()


def test_bytes_that_changed_there_are_named(tmp_path: Path) -> None:
    url = str(tmp_path / "bucket")
    trained(tmp_path / "run", "one")
    assert main(["run", "push", str(tmp_path / "run"), url]) == 0
    for path in sorted((tmp_path / "bucket" / "objects").iterdir()):
        data = path.read_bytes()
        for other in (data[:-1], bytes([data[0] ^ 1]) + data[1:], None):
            path.unlink()
            if other is not None:
                path.write_bytes(other)
            snapshot = remote_snapshots.find_snapshot(Remote(url), "one")
            with (
                tensorstow_store(tmp_path / "back") as store,
                pytest.raises(DamageError, match=path.name),
            ):
                remote_snapshots.pull(Remote(url), snapshot, 0, store)
            path.write_bytes(data)
    assert main(["run", "pull", url, str(tmp_path / "back")]) == 0  # nothing was left of the others


def tensorstow_store(directory: Path) -> Any:  # noqa: ANN401  # a context of a store
    from tensorstow.io.engine import open_engine  # noqa: PLC0415
    from tensorstow.store.store import Store  # noqa: PLC0415

    directory.mkdir(exist_ok=True)
    return Store.open([directory], open_engine())


def test_lists_that_changed_there_are_named(tmp_path: Path) -> None:
    url, lists = str(tmp_path / "bucket"), tmp_path / "bucket" / "snapshots"
    trained(tmp_path / "run", "one")
    assert main(["run", "push", str(tmp_path / "run"), url, "--snapshot=one"]) == 0
    for path in (lists / "one.json", lists / "one" / "rank-0-of-1.json"):
        text = path.read_text()
        for other in ("{", "[]", text.replace('"', "'", 1), text[:-3]):
            path.write_text(other)
            with pytest.raises(DamageError, match="cannot be read"):
                remote_snapshots.find_snapshot(Remote(url), "one")
        path.write_text(text)
    snapshot = remote_snapshots.find_snapshot(Remote(url), "one")
    (listed,) = snapshot.ranks
    with tensorstow_store(tmp_path / "back") as store:
        newer = remote_snapshots.RemoteSnapshot("one", [{**listed, "format": 2}])
        with pytest.raises(StoreFormatError, match="has format 2, and this version reads 1"):
            remote_snapshots.pull(Remote(url), newer, 0, store)
        for key in ("../../secret", "0" * 63, 7):
            chunks = [{**listed["chunks"][0], "object": key}, *listed["chunks"][1:]]
            wrong = remote_snapshots.RemoteSnapshot("one", [{**listed, "chunks": chunks}])
            with pytest.raises(DamageError, match="cannot be read"):
                remote_snapshots.pull(Remote(url), wrong, 0, store)
        assert store.generations() == []


def test_a_name_is_of_one_commit(tmp_path: Path, url: str) -> None:
    trained(tmp_path / "run", "one")
    trained(tmp_path / "other", "none", "one")
    assert main(["run", "push", str(tmp_path / "run"), url, "--snapshot=one"]) == 0
    assert main(["run", "push", str(tmp_path / "run"), url, "--snapshot=one"]) == 0
    with open_contents(tmp_path / "other", "A test") as store:
        generation = store.generations[-1]
        with pytest.raises(OptionError, match="another commit has that name there"):
            remote_snapshots.push(Remote(url), store.files, generation, "one")


def test_a_name_is_of_one_number_of_ranks(tmp_path: Path, url: str) -> None:
    trained(tmp_path / "run", "one")
    assert main(["run", "push", str(tmp_path / "run"), url, "--snapshot=one"]) == 0
    with open_contents(tmp_path / "run", "A test") as store:
        given: dict[str, Any] = {"rank": 0, "world": 2, "commit": "id"}
        with pytest.raises(OptionError, match=r"tensorstow run clean .* --snapshot one --yes"):
            remote_snapshots.push(Remote(url), store.files, store.generations[-1], "one", **given)


def test_what_a_killed_push_left_is_written_anew(tmp_path: Path) -> None:
    url, lists = str(tmp_path / "bucket"), tmp_path / "bucket" / "snapshots"
    wanted = trained(tmp_path / "run", "one")
    assert main(["run", "push", str(tmp_path / "run"), url, "--snapshot=one"]) == 0
    (lists / "one.json.18abc.part").write_text("{")
    for path in (lists / "one.json", lists / "one" / "rank-0-of-1.json"):
        path.write_text("{")
        assert main(["run", "push", str(tmp_path / "run"), url, "--snapshot=one"]) == 0
    assert remote_snapshots.snapshot_names(Remote(url)) == ["one"]
    assert main(["run", "pull", url, str(tmp_path / "back")]) == 0
    assert main(["run", "pull", url, str(tmp_path / "back")]) == 0  # which has it
    assert is_same(tmp_path / "back", wanted)


def test_a_pull_leaves_runs_of_other_ranks_alone(tmp_path: Path, url: str) -> None:
    wanted = trained(tmp_path / "run", "one", "two")
    trained(tmp_path / "other", "one")
    with open_contents(tmp_path / "other", "A test") as store:
        for rank in (0, 1):
            given: dict[str, Any] = {"rank": rank, "world": 2, "commit": "id"}
            remote_snapshots.push(Remote(url), store.files, store.generations[-1], "one", **given)
    assert main(["run", "pull", url, str(tmp_path / "run")]) != 0
    assert is_same(tmp_path / "run", wanted)


def test_an_address_that_cannot_be_reached_leaves_no_snapshot(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    with run.optimizer:
        run.step()
        for url in ("nowhere://bucket", ""):
            with pytest.raises(OptionError, match="was named for a snapshot"):
                run.optimizer.snapshot("one", to=url)
        assert list(run.optimizer.snapshots()) == []


def test_the_end_of_the_interpreter_waits_for_the_copy(tmp_path: Path) -> None:
    code = f"""
import time, torch, tensorstow
from tensorstow.store.remote import Remote
listed = Remote.list
Remote.list = lambda *given: time.sleep(1) or listed(*given)  # till after the last line
p = torch.nn.Parameter(torch.ones(100_000))
o = tensorstow.AdamW([p], states="disk", dir={str(tmp_path / "run")!r}, commit_every=None)
p.grad = torch.ones(100_000)
o.step()
o.snapshot("one", to={str(tmp_path / "bucket")!r})
"""
    done = children.run("-c", code)
    assert done.returncode == 0
    assert remote_snapshots.snapshot_names(Remote(str(tmp_path / "bucket"))) == ["one"]


@pytest.mark.parametrize("name", ["", "..", "a/b", "a b", ".hidden", "x" * 129])
def test_names_are_parts_of_addresses(name: str) -> None:
    with pytest.raises(OptionError, match="its name is a part of an address"):
        remote_snapshots.check_name(name)


def test_addresses_that_nothing_reaches_say_what_to_install() -> None:
    with pytest.raises(OptionError, match="fsspec cannot reach it"):
        Remote("nowhere://bucket/run")


def test_a_directory_with_commits_is_not_overwritten(tmp_path: Path, url: str) -> None:
    wanted = trained(tmp_path / "run", "one")
    assert main(["run", "push", str(tmp_path / "run"), url]) == 0
    other = trained(tmp_path / "other", "none", "one")
    assert main(["run", "pull", url, str(tmp_path / "other")]) != 0
    assert is_same(tmp_path / "other", other)
    assert is_same(tmp_path / "run", wanted)


def test_several_ranks_make_one_snapshot(tmp_path: Path, url: str) -> None:
    wanted = trained(tmp_path / "run", "one")
    with open_contents(tmp_path / "run", "A test") as store:
        generation = store.generations[-1]
        for rank in (1, 0):
            given: dict[str, Any] = {"rank": rank, "world": 2, "commit": "id"}
            done = remote_snapshots.push(Remote(url), store.files, generation, "one", **given)
            assert done.is_complete == (rank == 0)
            assert ("one.json" in names_in(url, "snapshots")) == (rank == 0)
    assert main(["run", "pull", url, str(tmp_path / "back"), "--rank=1"]) == 0
    assert [path.name for path in (tmp_path / "back").iterdir()] == ["rank-1-of-2"]
    assert is_same(tmp_path / "back" / "rank-1-of-2", wanted)
    assert main(["run", "pull", url, str(tmp_path / "back"), "--rank=2"]) != 0
