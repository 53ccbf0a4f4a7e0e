"""Parameters on the device and in host memory: autograd calls their hooks in two threads.

[Note: Hooks] in step/call_lock.py says what holds there. Gradients are known to the bit on any
device, so the weights are those of the same training in host memory, on one thread.
"""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import make, same_states, same_weights

from tensorstow import AdamW, DelayedUpdate, PipelinePolicy, Plan, stow
from tensorstow.base.errors import OptionError
from tensorstow.base.update_on import Overlap

PAIRS = 24
TINY = PipelinePolicy(chunk_elements=256)
"""Chunks of some parameters each, on both sides."""
OVERLAPS = ("none", "forward", "backward")


class Pair(nn.Module):
    """A parameter on each side; what has both sides is a block."""

    def __init__(self, number: int, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.here = nn.Parameter(torch.randn(30 + number, generator=generator))
        self.there = nn.Parameter(torch.randn(50 + number, generator=generator).to(device))


class Both(nn.Module):
    """Many small parameters on both sides, whose gradients come in both threads at once."""

    def __init__(self, device: torch.device, first: int = 0) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(Pair(first + n, device) for n in range(PAIRS))

    def forward(self, step: int) -> Tensor:
        # The gradient of each parameter is what it is multiplied with, exactly.
        generator = torch.Generator().manual_seed(step)
        sides = [[pair.here for pair in self.pairs], [pair.there for pair in self.pairs]]
        sums = []
        for side in sides:
            sizes = [parameter.numel() for parameter in side]
            gradients = torch.randn(sum(sizes), generator=generator).to(side[0].device)
            terms = zip(side, gradients.split(sizes), strict=True)
            sums.append(torch.stack([(p * g).sum() for p, g in terms]).sum())
        return sums[0] + sums[1].cpu()


@pytest.fixture
def _restless() -> Iterator[None]:
    """Let Python go from thread to thread as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


pytestmark = pytest.mark.usefixtures("_restless")


def train(model: Both, optimizer: AdamW, *, backwards: int = 1, clip: float | None = None) -> None:
    """Take some steps, in which one pair is frozen for a while."""
    for step in range(6):
        model.pairs[5].requires_grad_(not 1 < step < 4)
        for backward in range(backwards):
            torch.autograd.backward(model(10 * step + backward))
        if clip is not None:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()


def pair_of(device: torch.device, **given: Any) -> tuple[Both, AdamW]:  # noqa: ANN401
    model = Both(device)
    return model, make(model, **{"policy": TINY, **given})


WAYS = [
    ("none", "disk", 1, None),
    ("none", "ram", 2, 0.5),
    ("forward", "ram", 1, None),
    ("forward", "disk", 2, 0.5),
    ("backward", "ram", 1, None),
    ("backward", "disk", 1, None),
    ("backward", "disk", 2, None),
]


@pytest.mark.parametrize(("overlap", "states", "backwards", "clip"), WAYS)
def test_two_threads_give_the_bits_of_one(
    overlap: str, states: str, backwards: int, clip: float | None, device: torch.device
) -> None:
    want = pair_of(torch.device("cpu"), states="ram")
    train(*want, backwards=backwards, clip=clip)
    given = {"accumulation_steps": backwards} if overlap == "backward" else {}
    model, optimizer = pair_of(device, states=states, overlap=overlap, **given)
    train(model, optimizer, backwards=backwards, clip=clip)
    assert same_weights(model, want[0])
    assert same_states(optimizer, want[1])
    optimizer.close()


def test_the_hooks_are_called_in_two_threads(device: torch.device) -> None:
    model, optimizer = pair_of(device, overlap="backward")
    threads: dict[str, set[int]] = {"here": set(), "there": set()}
    for pair in model.pairs:
        for side, seen in threads.items():
            hook: Any = getattr(pair, side).register_post_accumulate_grad_hook
            hook(lambda _, seen=seen: seen.add(threading.get_ident()))
    train(model, optimizer)
    assert threads["here"] == {threading.get_ident()}
    assert len(threads["there"]) == 1
    assert threads["here"].isdisjoint(threads["there"])
    optimizer.close()


def test_a_step_that_commits_may_be_opened_by_either_thread(
    device: torch.device, tmp_path: Path
) -> None:
    want = pair_of(torch.device("cpu"), states="ram")
    train(*want)
    given = {"states": "disk", "dir": tmp_path, "overlap": "backward", "commit_every": 2}
    model, optimizer = pair_of(device, **given)
    train(model, optimizer)
    optimizer.close()
    model, optimizer = pair_of(device, **given)
    assert optimizer.resume() == 6
    assert same_weights(model, want[0])
    assert same_states(optimizer, want[1])
    optimizer.close()


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_backward_of_two_models_in_two_threads(overlap: str, device: torch.device) -> None:
    """The hooks of both models' device parameters are called in one thread, in turn."""
    wants = [pair_of(torch.device("cpu"), states="ram") for _ in range(2)]
    gots = [pair_of(device, states="disk", overlap=overlap) for _ in range(2)]
    for want in wants:
        train(*want)
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(train, *got) for got in gots]:
            done.result(timeout=120)
    for got, want in zip(gots, wants, strict=True):
        assert same_weights(got[0], want[0])
        assert same_states(got[1], want[1])
        got[1].close()


def test_each_stream_that_reads_new_weights_is_behind_them(device: torch.device) -> None:
    """The second stream's forward finds nothing under way: the first one's has waited."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(device)
    optimizer = make(model, states="ram", overlap="forward")
    x = torch.ones(4, 64, device=device)
    sides = [torch.Stream(device=device) for _ in range(2)]
    for _ in range(3):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        outs = []
        for side in sides:
            side.wait_stream(torch.accelerator.current_stream(device))
            with side, torch.no_grad():
                outs.append(model(x))
        torch.accelerator.synchronize()
        assert torch.equal(*outs)
    optimizer.close()


@pytest.mark.parametrize("overlap", ["forward", DelayedUpdate(warmup_steps=3)], ids=str)
@pytest.mark.parametrize("first", ["module", "weight"])
def test_a_stream_that_asks_is_behind_new_weights_whoever_read_them_before(
    first: str, overlap: Overlap | DelayedUpdate, device: torch.device
) -> None:
    """Outside of a module's forward: the recipe of ``updated()``."""
    model = nn.Linear(64, 64).to(device)
    optimizer = make(model, states="ram", overlap=overlap)
    x = torch.ones(4, 64, device=device)
    caller, side = torch.accelerator.current_stream(device), torch.Stream(device=device)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        with torch.no_grad():
            seen = [model(x)] if first == "module" else [p.clone() for p in model.parameters()]
        with side, optimizer.updated():
            copy = model.weight.detach().clone()
        caller.wait_stream(side)
        torch.accelerator.synchronize()
        assert torch.equal(copy.cpu(), model.weight.detach().cpu())
        del seen
    optimizer.close()


class FailedInHostMemoryError(Exception):
    """What a hook of a host parameter raises."""


def test_a_hook_that_comes_behind_resume_is_of_a_backward_that_is_over(
    device: torch.device, tmp_path: Path
) -> None:
    """backward() raises in the caller's thread while a hook waits in the device's."""
    want = pair_of(torch.device("cpu"), states="ram")
    train(*want)
    model, optimizer = pair_of(device, states="disk", dir=tmp_path, overlap="backward")
    held, resumed = threading.Event(), threading.Event()
    pair = model.pairs[3]

    def late(_: Tensor) -> None:
        held.set()
        assert resumed.wait(60)

    def fail(_: Tensor) -> None:
        assert held.wait(60)
        raise FailedInHostMemoryError

    handles = [pair.there.register_hook(late), pair.here.register_hook(fail)]
    optimizer.commit()
    with pytest.raises(FailedInHostMemoryError):
        torch.autograd.backward(model(99))
    assert optimizer.resume() == 0
    resumed.set()
    torch.ones(1, device=device, requires_grad=True).sum().backward()  # behind what came late
    assert pair.there.grad is None
    for handle in handles:
        handle.remove()
    train(model, optimizer)
    assert same_weights(model, want[0])
    assert same_states(optimizer, want[1])
    optimizer.close()


# --- a function of the user's that calls backward inside of a call ---


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_backward_inside_a_call_is_refused_as_in_host_memory(
    overlap: str, device: torch.device, tmp_path: Path
) -> None:
    """The hooks in the device's thread are a part of the call, which waits for them."""
    asked: list[bool] = []
    model = nn.Linear(8, 8).to(device)

    def extra() -> dict[str, int]:
        if asked:
            model(torch.ones(2, 8, device=device)).sum().backward()
        return {}

    optimizer = make(model, dir=tmp_path, overlap=overlap, extra=extra)
    asked.append(True)
    if overlap == "backward":
        with pytest.raises(OptionError, match=r"backward\(\) was called inside commit\(\)"):
            optimizer.commit()
    else:
        assert optimizer.commit() == 0
    asked.clear()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 8, device=device)).sum().backward()
        optimizer.step()
    assert optimizer.commit() == 2
    optimizer.close()


def test_a_stowed_model_s_backward_inside_a_call_gathers_its_weights(
    device: torch.device, tmp_path: Path
) -> None:
    """In the device's thread, which does not wait for the call that waits for it."""
    asked: list[float] = []

    def extra() -> dict[str, int]:
        if asked:
            model(torch.ones(2, 8, device=device)).sum().backward()
            asked.append(sum(p.grad.full_tensor().sum().item() for p in model.parameters()))
        return {}

    make_one = partial(AdamW, lr=1e-3, extra=extra, commit_every=None)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, optimizer = stow(layers, make_one, plan=Plan(parameters="host"), dir=tmp_path)
    asked.append(0.0)
    assert optimizer.commit() == 0
    assert len(asked) == 2
    optimizer.close()


def test_a_backward_beside_a_call_of_another_thread_waits_for_it(
    device: torch.device, tmp_path: Path
) -> None:
    inside, over = threading.Event(), threading.Event()

    def extra() -> dict[str, int]:
        if inside_is_asked:
            inside.set()
            assert not over.wait(0.3), "it did not wait for the call"
        return {}

    inside_is_asked: list[bool] = []
    model = nn.Linear(8, 8).to(device)
    optimizer = make(model, dir=tmp_path, overlap="backward", extra=extra)
    inside_is_asked.append(True)
    with ThreadPoolExecutor(1) as threads:
        commit = threads.submit(optimizer.commit)
        assert inside.wait(60)
        model(torch.ones(2, 8, device=device)).sum().backward()
        over.set()
        assert commit.result() == 0
    inside_is_asked.clear()
    optimizer.step()
    optimizer.close()
