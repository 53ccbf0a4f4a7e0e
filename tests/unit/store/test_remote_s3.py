"""Snapshots in a bucket: a server that speaks S3, which fails, is slow, or refuses."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pushed import Run, is_same, names_in, trained
from s3_server import FaultyServer, bucket
from tensorstow.base.errors import RemoteError
from tensorstow.cli.main import main
from tensorstow.store import remote
from tensorstow.store.remote import Remote
from tensorstow.store.remote_snapshots import snapshot_names
from tensorstow.store.upload_notes import read_notes

URL = "s3://bucket/run"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    with bucket(monkeypatch) as front:
        yield front


@pytest.mark.usefixtures("server")
def test_a_snapshot_goes_to_a_bucket_and_comes_back(tmp_path: Path) -> None:
    wanted = trained(tmp_path / "run", "one", "two")
    for name in ("one", "two"):
        assert main(["run", "push", str(tmp_path / "run"), URL, "--snapshot", name]) == 0
    assert main(["run", "scrub", URL]) == 0
    assert main(["run", "pull", URL, str(tmp_path / "back")]) == 0
    assert is_same(tmp_path / "back", wanted)
    before = names_in(URL)
    assert main(["run", "clean", URL, "--snapshot=one", "--yes"]) == 0
    assert names_in(URL) < before
    assert main(["run", "scrub", URL]) == 0
    assert main(["run", "push", str(tmp_path / "run"), "s3://no-such-bucket/run"]) == 2


@pytest.mark.parametrize("fault", ["500 InternalError", "503 SlowDown", "cut"])
def test_each_request_fails_once(
    tmp_path: Path, server: FaultyServer, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = trained(tmp_path / "run", "one")
    requests: set[tuple[str, str]] = set()

    def at_first(*request: str) -> str | None:
        is_new = request not in requests
        requests.add(request)
        return fault if is_new else None

    monkeypatch.setattr(remote, "_PAUSES", (0.0,) * 5)  # one call of fsspec is several requests
    server.fault = at_first
    assert main(["run", "push", str(tmp_path / "run"), URL]) == 0
    assert main(["run", "pull", URL, str(tmp_path / "back")]) == 0
    assert {"GET", "PUT", "DELETE"} <= {method for method, _ in requests}
    assert is_same(tmp_path / "back", wanted)


@pytest.mark.parametrize("fault", ["500 InternalError", "503 SlowDown", "cut"])
def test_a_server_that_fails_for_good_is_gone_on_with(
    tmp_path: Path, server: FaultyServer, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = trained(tmp_path / "run", "one")
    written = 0

    def after_two_objects(method: str, path: str) -> str | None:
        nonlocal written
        written += method == "PUT" and "/objects/" in path
        return fault if written > 2 else None

    server.fault = after_two_objects
    assert main(["run", "push", str(tmp_path / "run"), URL]) == 2
    assert "then push or pull again: it goes on where it stopped" in capsys.readouterr().err
    server.fault = lambda *_: None
    assert snapshot_names(Remote(URL)) == []
    sent = names_in(URL)
    assert sent
    server.fault = lambda method, path: (
        "500 Again" if method == "PUT" and path.rpartition("/")[2] in sent else None
    )
    assert main(["run", "push", str(tmp_path / "run"), URL]) == 0  # nothing goes there twice
    server.fault = lambda method, path: "cut" if method == "GET" and "/objects/" in path else None
    assert main(["run", "pull", URL, str(tmp_path / "back")]) == 2
    assert main(["run", "scrub", URL]) == 2
    server.fault = lambda *_: None
    assert main(["run", "pull", URL, str(tmp_path / "back")]) == 0
    assert is_same(tmp_path / "back", wanted)


def test_a_slow_server_does_not_hold_steps_up(tmp_path: Path, server: FaultyServer) -> None:
    run = Run(tmp_path / "run")
    server.fault = lambda *_: 0.5
    with run.optimizer:
        run.step()
        run.optimizer.snapshot("one", to=URL)
        wanted = run.state()
        for _ in range(3):
            run.step()
            run.optimizer.commit()
        assert read_notes(tmp_path / "run")  # the copy is still under way
        server.fault = lambda *_: None
    assert main(["run", "pull", URL, str(tmp_path / "back")]) == 0
    assert is_same(tmp_path / "back", wanted)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("403 AccessDenied", "Check that these credentials may read, write, list and delete"),
        ("403 RequestTimeTooSkewed", "This machine's clock is wrong: set it"),
        ("404 NoSuchBucket", "Check the address"),
    ],
)
def test_a_bucket_that_refuses_is_said_and_nothing_is_lost(
    tmp_path: Path, server: FaultyServer, fault: str, said: str
) -> None:
    run = Run(tmp_path / "run")
    run.step()
    server.fault = lambda method, _: fault if method == "PUT" else None
    run.optimizer.snapshot("one", to=URL)
    run.step()  # the run goes on, and its commits
    run.optimizer.commit()
    wanted = run.state()
    with pytest.raises(RemoteError, match=said):
        run.optimizer.close()
    assert read_notes(tmp_path / "run") == {"one": URL}
    server.fault = lambda *_: None
    assert is_same(tmp_path / "run", wanted)
    assert snapshot_names(Remote(URL)) == ["one"]  # which that sent
