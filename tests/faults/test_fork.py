"""Forks: data loaders work, a child is told, no exit of a child disturbs the parent."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import children
from tensorstow import AdamW, PipelinePolicy
from tensorstow.base.errors import ForkError

# Python 3.12 and newer warn about any fork while threads exist; ours are what is tested here.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # on one core
]

WIDTH = 128
POLICY = PipelinePolicy(chunk_elements=4096)


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


class Training:
    def __init__(self, directory: Path | None) -> None:
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        if directory is None:
            self.optimizer = AdamW([self.weight])
        else:
            self.optimizer = AdamW(
                [self.weight], states="disk", dir=directory, durability="none", policy=POLICY
            )
        self.taken = 0

    def step(self, rows: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward((rows @ self.weight).square().mean())
        self.optimizer.step()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step(Rows()[self.taken][None])
            self.taken += 1

    def slow_writes(self) -> None:
        """Keep writes in flight for a while behind every step."""
        engine = self.optimizer._states().engine
        assert engine is not None
        engine.inject_fault("write", times=-1, delay_us=2000)


def in_ram(count: int) -> torch.Tensor:
    training = Training(None)
    training.steps(count)
    return training.weight.detach()


def test_a_data_loader_forks_while_states_are_in_flight(tmp_path: Path) -> None:
    training, plain = Training(tmp_path), Training(None)
    training.slow_writes()
    for _ in range(3):  # workers are forked anew in each epoch, behind the last step's writes
        loader = DataLoader(Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork")
        for rows in loader:
            training.step(rows)
        for rows in DataLoader(Rows(), batch_size=4):
            plain.step(rows)
    assert torch.equal(training.weight, plain.weight)
    ours, theirs = (t.optimizer.state_dict()["state"][0] for t in (training, plain))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def in_child(act: Callable[[], str]) -> str:
    """Run ``act`` in a forked child that ends at once; return what it says."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = act()
        except BaseException as error:  # noqa: BLE001  # the parent judges
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    assert wait_for(pid) == 0
    return said


def wait_for(pid: int, seconds: float = 20) -> int:
    """Return the child's exit status; fail (and end it) where it hangs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    pytest.fail("the child hung")


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("use", ["step", "synchronize", "state_dict"])
def test_a_child_that_uses_the_optimizer_is_told(tmp_path: Path, use: str, fraction: float) -> None:
    training = Training(tmp_path if fraction else None)
    training.steps(2)
    training.optimizer.zero_grad()
    torch.autograd.backward(training.weight.square().sum())

    def act() -> str:
        with pytest.raises(ForkError, match="process that steps it") as caught:
            getattr(training.optimizer, use)()
        return type(caught.value).__name__

    assert in_child(act) == "ForkError"
    training.steps(2)
    assert torch.equal(training.weight, in_ram(4))


def test_backward_in_a_child_reads_nothing_ahead_and_does_not_raise(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.steps(2)

    def act() -> str:
        training.weight.grad = None
        torch.autograd.backward(training.weight.sum())
        return str(training.weight.grad is not None)

    before = training.optimizer._traffic().bytes_read
    assert in_child(act) == "True"
    assert training.optimizer._traffic().bytes_read == before
    training.steps(2)
    assert torch.equal(training.weight, in_ram(4))


def leave(how: str) -> None:
    if how == "sys.exit":
        sys.exit(3)
    if how == "os._exit":
        os._exit(3)


@pytest.mark.parametrize("how", ["os._exit", "sys.exit", "return"])
def test_an_exit_of_a_child_does_not_disturb_the_parent(tmp_path: Path, how: str) -> None:
    training = Training(tmp_path)
    training.slow_writes()
    training.steps(2)
    child = multiprocessing.get_context("fork").Process(target=leave, args=(how,))
    child.start()
    training.steps(2)
    child.join(20)
    assert child.exitcode == (0 if how == "return" else 3)
    training.steps(2)
    assert torch.equal(training.weight, in_ram(6))


# A child that ends as an interpreter does: modules torn down, every object destroyed, atexit run.
SCRIPT = """
import gc, os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import torch
from tensorstow import AdamW, PipelinePolicy
directory, how = sys.argv[1:]
p = torch.nn.Parameter(torch.ones(40_000))
policy = PipelinePolicy(chunk_elements=4096)
optimizer = AdamW([p], states="disk", dir=directory, durability="none", policy=policy)
p.grad = torch.ones_like(p)
optimizer.step()
optimizer._states().engine.inject_fault("write", times=-1, delay_us=2000)
optimizer.step()
pid = os.fork()
if pid == 0:
    if how == "delete":
        del optimizer
        gc.collect()
    elif how == "close":
        optimizer.close()
    sys.exit(0)
_, status = os.waitpid(pid, 0)
optimizer.step()
state = optimizer.state_dict()["state"][0]
again = torch.nn.Parameter(torch.ones(40_000))
plain = AdamW([again])
again.grad = torch.ones_like(again)
for _ in range(3):
    plain.step()
want = plain.state_dict()["state"][0]
assert all(torch.equal(state[name], want[name]) for name in want)
assert torch.equal(p, again)
print("parent is well, child left with", os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("how", ["exit", "delete", "close"])
def test_a_child_that_ends_as_an_interpreter_does(tmp_path: Path, how: str) -> None:
    out = children.run("-c", SCRIPT, tmp_path, how, teardown=True, check=False)
    assert (out.returncode, out.stdout, out.stderr) == (
        0,
        "parent is well, child left with 0\n",
        "",
    )


# The child is forked while a step is under way, or open between backward and step().
IN_MID_STEP = """
import os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import torch
from tensorstow import AdamW, PipelinePolicy
overlap, how = sys.argv[1:]
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
optimizer = AdamW(
    model.parameters(), states="disk", overlap=overlap, module=model,
    policy=PipelinePolicy(chunk_elements=4096),
)

def backward():
    model(torch.ones(2, 64)).square().mean().backward()

for _ in range(2):
    backward(); optimizer.step(); optimizer.zero_grad()
engine = optimizer._states().engine
engine.inject_fault("read", times=-1, delay_us=1000)
engine.inject_fault("write", times=-1, delay_us=1000)
left = []
for turn in range(2):
    backward()
    if overlap != "backward":
        optimizer.step()
    pid = os.fork()
    if pid == 0:
        if how == "close":
            optimizer.close()
        elif how == "delete":
            del optimizer
        sys.exit(0)
    left.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    if overlap == "backward":
        optimizer.step()
    optimizer.zero_grad()
optimizer.close()
print(left, flush=True)
os._exit(0)  # how this process ends is not looked at
"""


@pytest.mark.parametrize(
    ("how", "overlap"),
    [("exit", "forward"), ("exit", "backward"), ("delete", "none"), ("delete", "backward")],
)
def test_children_forked_in_mid_step_exit(overlap: str, how: str) -> None:
    out = children.run("-c", IN_MID_STEP, overlap, how, teardown=True, check=False)
    assert (out.returncode, out.stdout) == (0, "[0, 0]\n"), out.stderr
