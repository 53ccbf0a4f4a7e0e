"""The scripts for clusters: run, parsed, or run with stand-ins for their schedulers."""

import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from ports import free_port
from tensorstow.cli.main import make_parser
from tree import ROOT

CLUSTER = ROOT / "examples" / "cluster"


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401  # the examples' function
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return runpy.run_path(str(ROOT / "examples" / "several_ranks.py"))["parse"]


def script_and_options(words: list[str]) -> tuple[str, list[str]]:
    """Return the script that torchrun starts, and the options that it gets."""
    (at,) = (i for i, word in enumerate(words) if word.endswith(".py"))
    return words[at], words[at + 1 :]


@pytest.mark.soak
def test_torchrun_goes_on_when_a_rank_is_killed(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "HEAD": "127.0.0.1",
        "NODES": "1",
        "RANKS": "2",
        "PORT": str(free_port()),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    options = ["--tiny", "--steps=12", "--commit-every=1"]
    options += [f"--dir={tmp_path / 'run'}", f"--output={tmp_path / 'output'}"]
    job = subprocess.Popen(
        ["/bin/bash", str(CLUSTER / "torchrun.sh"), *options],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        steps = []
        for step in steps_of(job):
            steps.append(step)
            if step == 4 and steps.count(4) == 1:
                os.kill(ranks_of(job.pid)[1], signal.SIGKILL)
        assert job.wait(60) == 0
    finally:
        assert job.stdout is not None
        job.stdout.close()
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert steps[-1] == 12
    # After the restart, the first steps were not taken again: their commits were found.
    assert all(now == last + 1 or 2 < now <= last for last, now in pairwise(steps))
    assert (tmp_path / "output" / "model").exists()


def steps_of(job: "subprocess.Popen[str]") -> Iterator[int]:
    """Yield the steps that a job prints, as it prints them."""
    assert job.stdout is not None
    while line := job.stdout.readline():
        if found := re.match(r"step (\d+): loss", line):
            yield int(found[1])


def ranks_of(agent: int) -> list[int]:
    """Return the processes that torchrun has started."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        listed = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        ranks = [
            int(p) for p in listed if b"several_ranks" in Path(f"/proc/{p}/cmdline").read_bytes()
        ]
        if len(ranks) == 2:
            return ranks
        time.sleep(0.05)
    raise AssertionError(listed)


def test_the_jobset_starts_the_script_with_options_that_it_has(parse: Any) -> None:  # noqa: ANN401
    job = yaml.safe_load((CLUSTER / "jobset.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (group,) = job["spec"]["replicatedJobs"]
    spec = group["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["parallelism"] == spec["completions"] == 2
    assert "--nnodes=2" in container["command"]
    head = f"{job['metadata']['name']}-{group['name']}-0-0.{job['metadata']['name']}:"
    assert f"--rdzv-endpoint={head}29500" in container["command"]
    script, options = script_and_options(container["command"])
    assert (ROOT / script).exists()
    args = parse(options)
    (mount,) = container["volumeMounts"]
    assert args.dir.startswith(mount["mountPath"])


def test_skypilot_s_task_runs_commands_that_there_are(parse: Any) -> None:  # noqa: ANN401
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    for part in ("setup", "run"):
        subprocess.run(["/bin/bash", "-n"], input=task[part], text=True, check=True)
    lines = task["run"].replace("\\\n", " ").splitlines()
    (pull,) = (line for line in lines if "run pull" in line)
    words = shlex.split(pull.partition("||")[0])
    assert make_parser().parse_args(words[1:]).directory == Path("/opt/run")
    (train,) = (line for line in lines if "torchrun" in line)
    script, options = script_and_options(shlex.split(train))
    assert (ROOT / script).exists()
    assert parse(options).snapshot_every == 200


def test_ray_s_workers_train_in_the_group_that_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in for Ray: one worker, in this process, with a group that was made before."""
    import torch.distributed as dist  # noqa: PLC0415

    class Trainer:
        def __init__(self, loop: Any, **options: Any) -> None:  # noqa: ANN401
            self.loop, self.options = loop, options

        def fit(self) -> None:
            store = dist.FileStore(str(tmp_path / "meeting"), 1)
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            self.loop(self.options["train_loop_config"])
            assert not dist.is_initialized()

    train, of_torch = ModuleType("ray.train"), ModuleType("ray.train.torch")
    for name in ("FailureConfig", "RunConfig", "ScalingConfig"):
        setattr(train, name, dict)
    of_torch.TorchTrainer = Trainer  # type: ignore[attr-defined]
    for module in (ModuleType("ray"), train, of_torch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    options = ["--tiny", "--steps=2", f"--dir={tmp_path / 'run'}", f"--output={tmp_path / 'out'}"]
    monkeypatch.setattr(sys, "argv", ["ray_train.py", *options])
    monkeypatch.setattr(sys, "path", [*sys.path])
    runpy.run_path(str(CLUSTER / "ray_train.py"), run_name="__main__")
    assert "step 2: loss" in capsys.readouterr().out
    assert (tmp_path / "out" / "model").exists()


def test_snapshots_go_to_the_bucket_while_training_goes_on(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    options = ["--tiny", "--steps=5", f"--dir={tmp_path / 'run'}", f"--output={tmp_path / 'out'}"]
    options += [f"--bucket={bucket}", "--snapshot-every=2"]
    command = [sys.executable, "examples/restart.py", *options]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert sorted(p.name for p in (bucket / "snapshots").glob("*.json")) == [
        "step-2.json",
        "step-4.json",
    ]
