"""How optimizers end: dropped, in a cycle, behind wrappers, with the interpreter."""

import gc
import multiprocessing
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import children
from parity.beside import engine_of
from tensorstow import AdamW, PipelinePolicy
from tensorstow.optim.runtime import _ENDS, _LOCKS
from tensorstow.states.state_store import _KEPT
from unit.optim.test_wrappers import WRAPPERS, Delegating

WIDTH = 64
POLICY = PipelinePolicy(chunk_elements=1024)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])


def optimizer_of(layers: nn.Module, overlap: str = "forward") -> AdamW:
    return AdamW(
        layers.parameters(),
        lr=1e-2,
        states="disk",
        overlap=overlap,  # type: ignore[arg-type]
        module=layers,
        policy=POLICY,
    )


def step(layers: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.autograd.backward(layers(torch.ones(2, WIDTH)).square().mean())
    optimizer.step()


def slow(optimizer: AdamW) -> None:
    """Keep updates under way for a while behind every step."""
    engine = engine_of(optimizer)
    engine.inject_fault("read", times=-1, delay_us=1000)


def expected(steps: int) -> nn.Sequential:
    layers = model()
    optimizer = AdamW(layers.parameters(), lr=1e-2, policy=POLICY)
    for _ in range(steps):
        step(layers, optimizer)
        optimizer.zero_grad()
    return layers


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@contextmanager
def without_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Trainer:
    """Holds an optimizer that refers back to it."""

    def __init__(self, layers: nn.Module, optimizer: AdamW) -> None:
        self.layers, self.optimizer = layers, optimizer
        optimizer.trainer = self  # type: ignore[attr-defined]


@pytest.mark.parametrize("cycle", [False, True])
def test_updates_under_way_end_when_their_optimizer_is_dropped(
    cycle: bool,  # noqa: FBT001
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept = len(_KEPT)
    layers = model()
    optimizer = optimizer_of(layers)
    step(layers, optimizer)
    optimizer.zero_grad()
    slow(optimizer)
    alive = weakref.ref(optimizer)
    with without_collector():
        if cycle:
            Trainer(layers, optimizer)
        step(layers, optimizer)
        del optimizer
        if cycle:
            assert alive() is not None
            gc.collect()
    assert alive() is None
    assert same(layers, expected(2))
    assert len(_KEPT) == kept
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


def test_a_model_that_holds_its_optimizer_is_collected() -> None:
    layers = model()
    alive = weakref.ref(layers)
    layers.optimizer = optimizer_of(layers)  # type: ignore[assignment]
    step(layers, layers.optimizer)  # type: ignore[arg-type]
    kept = len(_KEPT)
    del layers
    gc.collect()
    assert alive() is None
    assert len(_KEPT) == kept - 1


class Copying:
    """As Fabric wraps: the attributes are shared."""

    def __init__(self, optimizer: AdamW) -> None:
        self.__dict__ = dict(optimizer.__dict__)
        self.__class__ = type("Copying", (Copying, type(optimizer)), {})


@pytest.mark.parametrize("wrapper", [*WRAPPERS, Copying])
def test_a_dropped_wrapper_ends_nothing(wrapper: Any) -> None:  # noqa: ANN401
    layers = model()
    optimizer = optimizer_of(layers)
    wrapped = wrapper(optimizer)
    step(layers, wrapped)
    del wrapped
    gc.collect()
    optimizer.zero_grad()
    step(layers, optimizer)
    optimizer.wait()
    assert same(layers, expected(2))


@pytest.mark.parametrize("wrapper", [Delegating, Copying])
def test_a_wrapper_goes_on_without_the_name_that_it_wraps(wrapper: type) -> None:
    layers = model()
    wrapped = wrapper(optimizer_of(layers))
    gc.collect()
    for _ in range(2):
        step(layers, wrapped)
        wrapped.zero_grad()
    del wrapped
    gc.collect()
    assert same(layers, expected(2))


SCRIPT = """
import atexit, sys, threading
import torch
from torch import nn
layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])

def total():
    return sum(p.detach().double().sum().item() for p in layers.parameters())

def last():
    print("exit", total().hex())

atexit.register(last)  # runs when all that is ours has ended

from tensorstow import AdamW, PipelinePolicy

torch.manual_seed(0)
for layer in layers:
    layer.reset_parameters()
policy = PipelinePolicy(chunk_elements=1024)
keys = dict(states="disk", module=layers, policy=policy, lr=1e-2)
if sys.argv[1] == "commit":
    keys |= dict(dir=sys.argv[2], commit_every=1)
optimizer = AdamW(layers.parameters(), overlap="forward", **keys)

def step():
    layers(torch.ones(2, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def train():
    for _ in range(3):
        step()
    if sys.argv[1] != "commit":
        optimizer._states().engine.inject_fault("read", times=-1, delay_us=1000)
    step()

if sys.argv[1] == "thread":
    threading.Timer(0.3, train).start()
else:
    train()
if sys.argv[1] == "atexit":
    def use():
        step()
        optimizer.wait()
        print("used", total().hex())
    atexit.register(use)
"""


AT_THE_END = """
import atexit, sys
import torch
from torch import nn

def late():
    try:
        make()
    except Exception as error:
        print(type(error).__name__, error)

if sys.argv[1] in {"late", "lazy"}:
    atexit.register(late)  # runs after ours: it is registered before

import tensorstow
if sys.argv[1] != "lazy":  # which imports the optimizers in the exit function
    tensorstow.AdamW

layers = nn.Linear(4, 4)

def make(name="run", of=layers):
    return tensorstow.AdamW(of.parameters(), states="disk", dir=f"{sys.argv[2]}/{name}")

def train(optimizer, of=layers):
    for _ in range(3):
        of(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

if sys.argv[1] not in {"late", "lazy"}:
    optimizer = make()
    train(optimizer)
if sys.argv[1] == "closed":
    optimizer.close()
if sys.argv[1] == "interrupt":
    others = nn.Linear(4, 4)
    first = make("first", others)
    train(first, others)
    runtime = optimizer._runtime
    def interrupted(**_):
        raise KeyboardInterrupt
    runtime.finish = interrupted  # the older one's, which ends first
if sys.argv[1] == "cycle":
    optimizer.me = optimizer
sys.tensorstow_test = layers  # what C++ or other modules hold is there until the very end
"""


def resumed_step(directory: Path) -> int | None:
    optimizer = AdamW(nn.Linear(4, 4).parameters(), states="disk", dir=directory)
    step = optimizer.resume()
    optimizer.close()
    return step


def ended(case: str, directory: Path) -> "subprocess.CompletedProcess[str]":
    return children.run("-c", AT_THE_END, case, directory, teardown=True, check=False)


@pytest.mark.parametrize("case", ["open", "closed", "cycle"])
def test_an_optimizer_of_a_module_ends_before_modules_are_taken_apart(
    case: str, tmp_path: Path
) -> None:
    done = ended(case, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert resumed_step(tmp_path / "run") == 3


def test_an_interrupt_at_the_end_costs_no_other_optimizer_its_commit(tmp_path: Path) -> None:
    done = ended("interrupt", tmp_path)
    assert "KeyboardInterrupt" in done.stderr
    assert resumed_step(tmp_path / "first") == 3


@pytest.mark.parametrize("case", ["late", "lazy"])
def test_no_run_begins_where_nothing_could_commit_it(case: str, tmp_path: Path) -> None:
    # Which function of atexit is registered first is decided by the import.
    command = [sys.executable, "-c", AT_THE_END, case, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.startswith("StowError An optimizer with dir= was requested after")
    assert done.stderr == ""


def train_in_a_cycle(directory: Path) -> None:
    layers = nn.Linear(4, 4)
    optimizer = AdamW(layers.parameters(), states="disk", dir=directory)
    optimizer.me = optimizer  # type: ignore[attr-defined]  # it is not dropped by the return
    layers(torch.ones(2, 4)).sum().backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_process_of_multiprocessing_commits_at_its_end(how: str, tmp_path: Path) -> None:
    """It ends by os._exit where it was forked, which runs no functions of atexit."""
    process = multiprocessing.get_context(how).Process(target=train_in_a_cycle, args=(tmp_path,))
    process.start()
    process.join(100)
    assert process.exitcode == 0
    assert resumed_step(tmp_path) == 1


@pytest.mark.parametrize("case", ["commit", "thread", "atexit"])
def test_a_script_that_closes_nothing_ends_silently_with_every_update(
    case: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, case, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    lines = [line for line in done.stderr.splitlines() if "scratch files" not in line]
    assert lines == []
    trained = expected(5 if case == "atexit" else 4)
    want = float(sum(p.detach().double().sum().item() for p in trained.parameters()))
    assert done.stdout.split()[-2:] == ["exit", want.hex()]
    if case == "commit":
        layers = model()
        optimizer = AdamW(layers.parameters(), states="disk", dir=tmp_path, policy=POLICY)
        assert optimizer.resume() == 4
        assert same(layers, expected(4))
        optimizer.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", range(len(_LOCKS)))
def test_the_collector_may_run_where_a_thread_begins(number: int, tmp_path: Path) -> None:
    """It did when a thread that held one of Python's locks made an object: nothing went on."""
    layers = model()
    optimizer = AdamW(layers.parameters(), lr=1e-2, policy=POLICY, dir=tmp_path, commit_every=1)
    step(layers, optimizer)
    optimizer.zero_grad()
    step(layers, optimizer)

    def collect() -> None:
        with _LOCKS[number]:
            gc.collect()

    with without_collector():
        ring: list[Any] = [optimizer]
        ring.append(ring)
        watcher = weakref.ref(optimizer._runtime)
        del optimizer, ring
        thread = threading.Thread(target=collect)
        thread.start()
        thread.join()
    for end in [*_ENDS]:
        end.wait()
    assert watcher() is None or watcher()._finished
    again = AdamW(model().parameters(), lr=1e-2, policy=POLICY, dir=tmp_path)
    assert again.resume() == 2
    again.close()
    assert same(layers, expected(2))


DROPPED_WHERE_A_THREAD_BEGINS = """
import gc, sys, threading, torch
from tensorstow import AdamW
from tensorstow.optim.runtime import _LOCKS
layers = torch.nn.Linear(8, 8)
ring = [AdamW(layers.parameters(), lr=1e-2, dir=sys.argv[1], commit_every=None)]
torch.autograd.backward(layers(torch.ones(2, 8)).sum())
ring[0].step()
ring[0].request_commit()
torch.autograd.backward(layers(torch.ones(2, 8)).sum())
ring[0].step()
ring.append(ring)
del ring
with _LOCKS[0]:
    gc.collect()
"""


def test_the_interpreter_waits_for_an_optimizer_that_ends_elsewhere(tmp_path: Path) -> None:
    children.run("-c", DROPPED_WHERE_A_THREAD_BEGINS, tmp_path, teardown=True)
    again = AdamW(nn.Linear(8, 8).parameters(), lr=1e-2, dir=tmp_path)
    assert again.resume() == 2
    again.close()
