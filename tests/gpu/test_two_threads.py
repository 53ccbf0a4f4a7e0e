"""Parameters on the device and in host memory: autograd calls their hooks in two threads.

[Note: Hooks] in step/calls.py says what holds there. Gradients are known to the bit on any device,
so the weights are those of the same training in host memory, on one thread.
"""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import make, same_states, same_weights

from tensorstow import AdamW, PipelinePolicy

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
