"""The examples of several ranks and of a cluster, with ``--tiny``, as launchers start them."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tree import ROOT

EXAMPLES = ROOT / "examples"
ENVIRON = {
    **{k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}},
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(sys.path),
}
SRUN = """#!/bin/sh
# Starts two tasks, as srun does, and returns the higher of their statuses.
while [ "${1#--}" != "$1" ]; do shift; done
export SLURM_STEP_ID=0
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" &
first=$!
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" &
second=$!
echo $first $second >tasks
wait $first; one=$?
wait $second; two=$?
exit $((one > two ? one : two))
"""
SCONTROL = """#!/bin/sh
# Knows the job's machines, and notes what is put back into the queue.
case "$1" in
  show) echo 127.0.0.1 ;;
  *) echo "$*" >>requeued ;;
esac
"""


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def steps_in(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"^step (\d+): loss [\d.]+$", text, re.MULTILINE)]


def torchrun(place: Path, *words: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [*command, str(EXAMPLES / "several_ranks.py"), "--tiny", *words],
        cwd=place,
        env=ENVIRON,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def sbatch(
    place: Path, *words: str, python: str = f'exec {sys.executable} "$@"'
) -> subprocess.Popen[str]:
    """Start the batch script as Slurm does, with two tasks; its commands are stood in for."""
    tools = place / "bin"
    if not tools.exists():
        tools.mkdir()
        (place / "examples").symlink_to(EXAMPLES)
        made = {"srun": SRUN, "scontrol": SCONTROL, "python": f"#!/bin/sh\n{python}\n"}
        for name, text in made.items():
            (tools / name).write_text(text, encoding="utf-8")
            (tools / name).chmod(0o755)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "here", "SLURM_NTASKS": "2"}
    return subprocess.Popen(
        ["/bin/bash", "examples/restart.sbatch", "--tiny", *words],
        cwd=place,
        env={**ENVIRON, **job, "SLURM_CPUS_PER_TASK": "1", "PATH": f"{tools}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(job: subprocess.Popen[str]) -> tuple[int, list[int]]:
    out, err = job.communicate(timeout=110)
    assert "Traceback" not in err, err
    return job.returncode, steps_in(out)


def first_step(job: subprocess.Popen[str]) -> int:
    """Wait until the job has taken a step, and return its number."""
    assert job.stdout is not None
    while line := job.stdout.readline():
        if found := steps_in(line):
            return found[0]
    raise AssertionError(job.communicate()[1])


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Return the weights after six steps of two ranks."""
    place = tmp_path_factory.mktemp("unbroken")
    assert steps_in(torchrun(place)) == [1, 2, 3, 4, 5, 6]
    return weights(place / "finetuned/model")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def test_several_ranks_go_on_where_they_ended(
    tmp_path: Path, unbroken: dict[str, torch.Tensor]
) -> None:
    assert steps_in(torchrun(tmp_path, "--steps=4")) == [1, 2, 3, 4]
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"rank-0-of-2", "rank-1-of-2"}
    assert steps_in(torchrun(tmp_path, "--steps=6")) == [5, 6]
    assert same(weights(tmp_path / "finetuned/model"), unbroken)


def test_a_job_commits_when_its_tasks_get_signals_and_goes_on_from_there(tmp_path: Path) -> None:
    job = sbatch(tmp_path, "--steps=1000000")
    first = first_step(job)
    assert first == 1
    tasks = [int(task) for task in (tmp_path / "tasks").read_text().split()]
    job.send_signal(signal.SIGTERM)  # to the batch script too, which is to outlive its tasks
    os.kill(tasks[1], signal.SIGUSR1)
    os.kill(tasks[0], signal.SIGTERM)
    status, steps = finish(job)
    assert status == 75
    assert (tmp_path / "requeued").read_text() == f"requeue {os.getpid()}\n"
    assert not (tmp_path / "finetuned/model").exists()
    last = max([first, *steps]) + 1  # which ends in step(), before its line
    status, steps = finish(sbatch(tmp_path, f"--steps={last + 2}"))
    assert (status, steps) == (0, [last + 1, last + 2])  # none was lost, and none was repeated
    assert weights(tmp_path / "finetuned/model")
    assert (tmp_path / "requeued").read_text() == f"requeue {os.getpid()}\n"


@pytest.mark.parametrize(("status", "is_put_back"), [(75, True), (1, False), (0, False)])
def test_a_job_that_has_failed_is_not_put_back(
    status: int,
    is_put_back: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    job = sbatch(tmp_path, python=f"exit {status}")
    job.communicate(timeout=10)
    assert job.returncode == status
    assert (tmp_path / "requeued").exists() == is_put_back
