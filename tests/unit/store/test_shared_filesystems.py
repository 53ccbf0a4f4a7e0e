"""A run on filesystems that several machines may have mounted, where they can be mounted here.

Two mounts of one directory stand for two machines: their kernels share no locks by themselves.
"""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import children
from pushed import Run, is_same, trained
from tensorstow.base.errors import LockedError
from tensorstow.base.mounts import mount_of
from tensorstow.store.lock import DirectoryLock

UMOUNT = shutil.which("umount") or "umount"
ABSENT = "filesystems/{} cannot be mounted here: {}"


def mount(kind: str, folder: Path, point: Path) -> None:
    """Mount ``folder`` at ``point``, or skip the test, which names what is missing."""
    upper, work = folder / "upper", folder / "work"
    for path in (upper, work, point):
        path.mkdir(parents=True, exist_ok=True)
    layers = f"lowerdir={folder},upperdir={upper},workdir={work}"
    commands: dict[str, list[str | Path]] = {
        "bindfs": ["bindfs", upper, point],
        "mergerfs": ["mergerfs", upper, point],
        "fuse-overlayfs": ["fuse-overlayfs", "-o", layers, point],
        "overlay": ["mount", "-t", "overlay", "overlay", "-o", layers, point],
    }
    if shutil.which(str(commands[kind][0])) is None:
        pytest.skip(ABSENT.format(kind, "the program is not installed"))
    if (done := subprocess.run(commands[kind], capture_output=True, check=False)).returncode:
        pytest.skip(ABSENT.format(kind, done.stderr.decode(errors="replace").strip()))


@pytest.fixture(params=["bindfs", "mergerfs", "fuse-overlayfs", "overlay"])
def mounted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    mount(request.param, tmp_path / "layers", tmp_path / "point")
    yield tmp_path / "point"
    subprocess.run([UMOUNT, "--lazy", tmp_path / "point"], check=True)


@pytest.fixture
def twice(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    points = tmp_path / "one", tmp_path / "two"
    for point in points:
        mount("bindfs", tmp_path / "folder", point)
    yield points
    for point in points:
        subprocess.run([UMOUNT, "--lazy", point], check=True)


def test_a_run_commits_and_goes_on(mounted: Path) -> None:
    wanted = trained(mounted / "run", "one", "two")
    assert is_same(mounted / "run", wanted)
    assert not mount_of(mounted).is_memory


def test_one_machine_has_the_store(twice: tuple[Path, Path]) -> None:
    one, two = twice
    run = Run(one / "run")
    with run.optimizer:
        run.step()
        run.optimizer.commit()
        with pytest.raises(LockedError, match="locks of this filesystem do not reach other"):
            Run(two / "run")
        run.step()
        run.optimizer.commit()
        wanted = run.state()
    assert is_same(two / "run", wanted)


def test_a_run_that_was_killed_on_this_machine_goes_on(twice: tuple[Path, Path]) -> None:
    one, two = twice
    code = f"""
import os, signal
from pathlib import Path
from pushed import Run
run = Run(Path({str(one / "run")!r}))
run.step()
run.optimizer.commit()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert children.run("-c", code, check=False).returncode != 0
    run = Run(two / "run")
    with run.optimizer:
        assert run.optimizer.resume() == 1
    DirectoryLock(one / "run").release()
