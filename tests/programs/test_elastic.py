"""torchrun starts runs again whose rank was killed or signalled: they lose nothing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ranks.elastic import DOORS

ENDS = ("kill", "signal")


@contextmanager
def torchrun(door: str, folder: Path, end: str, *words: str) -> Iterator["subprocess.Popen[str]"]:
    """Start two ranks; kill what is left of them afterwards."""
    folder.mkdir(exist_ok=True)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("LOCAL_")}
    # Else torchrun gives restarted ranks the addresses of the ranks that have ended (torch 2.13).
    environ |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = subprocess.Popen(
        [*command, *words, "-m", "ranks.elastic", door, str(folder), end],
        env=environ,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield job
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()


def weights(folder: Path) -> list[list[bytes]]:
    files = [folder / f"weights-{rank}.pt" for rank in range(2)]
    return [[t.view(torch.uint8).numpy().tobytes() for t in torch.load(f)] for f in files]


def finished(door: str, folder: Path, end: str, *words: str) -> list[list[bytes]]:
    with torchrun(door, folder, end, *words) as job:
        _, err = job.communicate(timeout=240)
        assert job.returncode == 0, err
    assert (folder / "has-come").exists() == bool(end)
    return weights(folder)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[bytes]]]:
    """Return the weights that each door's run ends with, if nothing happens."""
    return {door: finished(door, tmp_path_factory.mktemp(door), "") for door in DOORS}


@pytest.mark.soak
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("door", DOORS)
def test_torchrun_goes_on_with_the_same_bits(
    tmp_path: Path, door: str, end: str, unbroken: dict[str, list[list[bytes]]]
) -> None:
    """A signal's status is no success, by which torchrun starts all ranks again."""
    assert finished(door, tmp_path / "run", end, "--max-restarts=1") == unbroken[door]


@pytest.mark.soak
@pytest.mark.parametrize("door", DOORS)
def test_a_signal_to_torchrun_reaches_its_ranks(
    tmp_path: Path, door: str, unbroken: dict[str, list[list[bytes]]]
) -> None:
    """As Slurm and Kubernetes send it; the same command goes on later."""
    with torchrun(door, tmp_path, "wait") as job:
        while not (tmp_path / "waits").exists():
            assert job.poll() is None, job.communicate()[1]
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        (tmp_path / "waits").unlink()
        job.communicate(timeout=120)
        assert job.returncode != 0
    assert not (tmp_path / "weights-0.pt").exists()
    assert finished(door, tmp_path, "") == unbroken[door]
