"""Copies that a process did not complete are gone on with, or said by name."""

import json
import logging
import signal
import threading
from pathlib import Path

import pytest

import children
from pushed import Run, is_same, names_in, trained
from tensorstow.base.errors import OptionError, RemoteError
from tensorstow.cli.main import main
from tensorstow.store.remote import Remote
from tensorstow.store.remote_snapshots import snapshot_names
from tensorstow.store.upload_notes import note_path, read_notes, remove_note, write_note

KILLED = """
import os, signal, sys
from pathlib import Path
from pushed import Run
from tensorstow.store.remote import Remote
put = Remote.put
def die(remote, name, data):
    if name.startswith(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    put(remote, name, data)
Remote.put = die
run = Run(Path(sys.argv[1]))
run.step()
run.optimizer.snapshot("one", to=sys.argv[2])
run.optimizer.close()
"""


@pytest.mark.parametrize("at", ["pushes/", "objects/", "snapshots/one/", "snapshots/one.json"])
def test_a_copy_that_a_crash_ended_goes_on(
    tmp_path: Path, at: str, caplog: pytest.LogCaptureFixture
) -> None:
    words = ("-c", KILLED, tmp_path / "run", tmp_path / "bucket", at)
    assert children.run(*words, check=False).returncode == -signal.SIGKILL
    url = str(tmp_path / "bucket")
    assert snapshot_names(Remote(url)) == []
    run = Run(tmp_path / "run")
    with run.optimizer, caplog.at_level(logging.WARNING):
        assert run.optimizer.resume() == 1
        wanted = run.state()
        run.step()
    assert f"the copy of snapshot 'one' to {url} was not complete" in caplog.text
    assert read_notes(tmp_path / "run") == {}
    assert names_in(url, "pushes") == set()
    assert main(["run", "pull", url, str(tmp_path / "back")]) == 0
    assert is_same(tmp_path / "back", wanted, "one")


def test_a_copy_that_failed_goes_on_after_the_next_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "bucket")
    run = Run(tmp_path / "run")
    run.step()
    with monkeypatch.context() as patch:
        patch.setattr(Remote, "put", lambda *_: Remote("memory://x")._refuse("A put", OSError()))
        run.optimizer.snapshot("one", to=url)
        with pytest.raises(RemoteError):
            run.optimizer.close()
    assert read_notes(tmp_path / "run") == {"one": url}
    assert note_path(tmp_path / "run", "one").stat().st_mode & 0o777 == 0o600
    run = Run(tmp_path / "run")
    with run.optimizer:
        run.optimizer.resume()
        run.optimizer.resume()  # which does not send it twice
    assert snapshot_names(Remote(url)) == ["one"]
    assert read_notes(tmp_path / "run") == {}


def test_a_copy_in_progress_is_noted_and_not_sent_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, put, lists = threading.Event(), Remote.put, []

    def put_late(there: Remote, name: str, data: bytes) -> None:
        assert go_on.wait(60)
        lists.append(name)
        put(there, name, data)

    monkeypatch.setattr(Remote, "put", put_late)
    monkeypatch.chdir(tmp_path)
    run = Run(tmp_path / "run")
    with run.optimizer:
        run.step()
        run.optimizer.snapshot("one", to="bucket")
        assert read_notes(tmp_path / "run") == {"one": str(tmp_path / "bucket")}
        run.optimizer.resume()
        go_on.set()
    assert lists.count("snapshots/one.json") == 1
    assert read_notes(tmp_path / "run") == {}


def test_a_snapshot_that_was_not_made_leaves_no_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = str(tmp_path / "bucket")
    run = Run(tmp_path / "run")
    with run.optimizer:
        run.step()
        run.optimizer.snapshot("one")
        write_note(tmp_path / "run", "one", "memory://earlier")
        with pytest.raises(OptionError, match="has that name"):
            run.optimizer.snapshot("one", to=url)
        assert read_notes(tmp_path / "run") == {"one": "memory://earlier"}
        with pytest.raises(TypeError):
            run.optimizer.snapshot("two", {"no": object()}, to=url)
        assert read_notes(tmp_path / "run").keys() == {"one"}
        run.optimizer.drop("one")
    assert read_notes(tmp_path / "run") == {}
    write_note(tmp_path / "run", "never", url)  # the process died before it was made
    run = Run(tmp_path / "run")
    with run.optimizer, caplog.at_level(logging.WARNING):
        run.optimizer.resume()
    assert f"snapshot 'never' was to be copied to {url}, and it is not there" in caplog.text
    assert read_notes(tmp_path / "run") == {}


def test_a_copy_that_cannot_be_sent_is_said_with_the_command(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path / "run", "one")
    write_note(tmp_path / "run", "one", "nowhere://bucket/a b")
    run = Run(tmp_path / "run")
    with run.optimizer, caplog.at_level(logging.WARNING):
        run.optimizer.resume()
    command = f"tensorstow run push {tmp_path / 'run'} 'nowhere://bucket/a b' --snapshot one"
    assert command in caplog.text
    assert read_notes(tmp_path / "run") == {"one": "nowhere://bucket/a b"}


def test_the_command_completes_a_copy(tmp_path: Path) -> None:
    url = str(tmp_path / "bucket")
    trained(tmp_path / "run", "one", "two")
    for name in ("one", "two"):
        write_note(tmp_path / "run", name, url)
    for options in (["--snapshot=two", "--name=three"], ["--snapshot=one"]):
        assert main(["run", "push", str(tmp_path / "run"), url, *options]) == 0
    assert read_notes(tmp_path / "run").keys() == {"two"}
    remove_note(tmp_path / "run", "two", "memory://elsewhere")
    assert read_notes(tmp_path / "run").keys() == {"two"}


@pytest.mark.parametrize("body", ["{", "[]", '{"snapshot": "two", "to": "x"}', '{"to": 1}'])
def test_a_file_that_is_no_note_stays(
    tmp_path: Path, body: str, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path / "run", "one")
    note_path(tmp_path / "run", "one").write_text(body)
    with caplog.at_level(logging.WARNING):
        assert read_notes(tmp_path / "run") == {}
    assert "does not say which snapshot was to be copied" in caplog.text
    write_note(tmp_path / "run", "three", "memory://x")
    assert main(["run", "clean", str(tmp_path / "run"), "--yes"]) == 0
    assert list((tmp_path / "run").iterdir()) == [note_path(tmp_path / "run", "one")]


def test_notes_hold_what_is_needed(tmp_path: Path) -> None:
    write_note(tmp_path, "one", "s3://bucket/run")
    note = json.loads(note_path(tmp_path, "one").read_bytes())
    assert note == {"snapshot": "one", "to": "s3://bucket/run"}
