"""``tensorstow verify`` is interrupted as a terminal does it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def test_an_interrupt_leaves_no_file_and_no_process(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "tensorstow", "verify", str(tmp_path), "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # A job that a shell puts in the background ignores it, and so does what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    deadline = time.monotonic() + 90
    while not list(tmp_path.glob("*/killed-*")) and time.monotonic() < deadline:
        assert child.poll() is None
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does: to all of the group
    _, said = child.communicate(timeout=60)
    assert (child.returncode, said.decode().strip()) == (130, "tensorstow: interrupted")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)
