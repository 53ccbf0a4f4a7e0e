"""A run that is killed (kill -9) in the middle of a step and resumed."""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from demo.configurations import FOLDER, TURN_STEPS, ModelSize
from tensorstow.base.directories import check_directory
from tensorstow.base.errors import DirectoryError
from tensorstow.cli.process import kill_in_an_update, started

COMMITTED = 1
"""The step after which it commits; it is killed during the update of the next one."""
NAME = "the run that is killed"
_DIRECTORY = "killed-run"
Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Crash:
    """The result of the run that was killed."""

    committed: int
    """Steps at its last commit, from which it resumed."""
    steps: int
    """Steps at the end."""
    checksum: str
    """Checksum of its parameters at the end."""


def kill_and_resume(
    out: Path, scratch: Path, scale: ModelSize, *, small: bool, tell: Announce
) -> Crash:
    """Train, commit, kill the process during an update, and resume in a new process."""
    run = _make_directory(out, scratch, scale)
    arguments = ["--directory", str(run), *(["--small"] if small else [])]
    try:
        endless = ["--until", "1000000", "--commits", str(COMMITTED)]
        with started(NAME, "demo.durable", [*arguments, *endless], FOLDER) as first:
            kill_in_an_update(first, COMMITTED, lambda _, part: tell(part))
        with started(
            NAME, "demo.durable", [*arguments, "--until", str(TURN_STEPS)], FOLDER
        ) as second:
            last = {}
            for last in second.messages():
                if "part" in last:
                    tell(f"resumed: {last['part']}")
        return Crash(last["start"], TURN_STEPS, last["checksum"])
    finally:
        shutil.rmtree(run, ignore_errors=True)


def _make_directory(out: Path, scratch: Path, scale: ModelSize) -> Path:
    """Return an empty directory: in ``out`` if it can hold a run, else next to scratch."""
    shutil.rmtree(out / _DIRECTORY, ignore_errors=True)  # of a demo that was killed itself
    try:
        check_directory(out, scale.run_disk_bytes)
    except DirectoryError:
        return Path(tempfile.mkdtemp(prefix="tensorstow-demo-", dir=scratch))
    (out / _DIRECTORY).mkdir()
    return out / _DIRECTORY
