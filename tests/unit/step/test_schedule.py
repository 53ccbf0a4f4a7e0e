"""When updates run: what is beside what, shown by times, and by gradients in every order.

The disk is slow on purpose, as in test_overlap: one worker sleeps before each block. Sleeping
stands for compute too. What counts is how much of the one is beside the other, by the event log.
"""

import random
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compare import all_equal
from parity.beside import engine_of
from parity.cover import crossed
from tensorstow import AdamW, DelayedUpdate, PipelinePolicy
from tensorstow.base.errors import OptionError
from tensorstow.base.update_on import Overlap
from tensorstow.states import layout
from tensorstow.states.layout import Family, slot_bytes
from tensorstow.step.backward_overlap import BackwardOverlap
from tensorstow.step.managed_param import StepPlan
from tensorstow.step.schedule import Synchronous

CHUNK = 4096
CHUNKS = 6
DELAY_S = 0.005
READS_S = 2 * CHUNKS * DELAY_S  # two streams of a chunk
WRITES_S = READS_S
STEPS = 3
POLICY = PipelinePolicy(chunk_elements=CHUNK, backend="threads", depth=1)
FP32 = Family(torch.float32, amsgrad=False)


SLEPT: list[tuple[float, float]] = []


def sleep(seconds: float) -> None:
    """Sleep, and note from when to when."""
    start = time.monotonic()
    time.sleep(seconds)
    SLEPT.append((start, time.monotonic()))


class Sleeping(torch.autograd.Function):
    """Take ``seconds`` in forward and as many as are said in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:  # noqa: ANN401
        ctx.backward_s = backward_s
        sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        sleep(ctx.backward_s)
        return grads[0], None, None


class Layer(nn.Module):
    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(CHUNK))
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        slept = Sleeping.apply(x, self.forward_s, self.backward_s)
        out: Tensor = slept + self.weight.square().mean()
        return out


def model_of(forward_s: float, backward_s: float) -> nn.Sequential:
    """Return a model whose forward and backward take so long."""
    each = forward_s / CHUNKS, backward_s / CHUNKS
    return nn.Sequential(*(Layer(*each) for _ in range(CHUNKS)))


def hidden_of(
    directory: Path, overlap: Overlap | DelayedUpdate, forward_s: float, backward_s: float
) -> float:
    """Return how much of the disk's time or the model's, whichever is less, is beside the other.

    Both are measured, so that a busy machine makes both longer.
    """
    model = model_of(forward_s, backward_s)
    optimizer = AdamW(
        model.parameters(), states="disk", dir=directory, durability="none", overlap=overlap,
        module=model, policy=POLICY,
    )  # fmt: skip

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.zeros((), requires_grad=True)))
        optimizer.step()

    step()
    step()  # from here on every schedule knows its order
    optimizer.synchronize()
    engine = engine_of(optimizer)
    for operation in ("read", "write"):
        engine.inject_fault(operation, times=-1, delay_us=round(DELAY_S * 1e6))
    SLEPT.clear()
    optimizer.start_trace()
    for _ in range(STEPS):
        step()
    out = model(torch.zeros((), requires_grad=True))  # beside which the last updates may run
    if isinstance(overlap, DelayedUpdate):
        optimizer.zero_grad()
        torch.autograd.backward(out)
    optimizer.synchronize()
    disk = [(e.start, e.stop) for e in optimizer.trace() if e.lane in {"read", "write"}]
    optimizer.close()
    both = length(disk) + length(SLEPT) - length([*disk, *SLEPT])
    return both / min(length(disk), length(SLEPT))


def length(spans: Iterable[tuple[float, float]]) -> float:
    """Return how much time one span or another takes."""
    total, ended = 0.0, 0.0
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, ended))
        ended = max(ended, stop)
    return total


def test_the_disk_works_beside_backward(tmp_path: Path) -> None:
    """Without overlap some of it does too: the next chunks are read ahead."""
    backward_s = 1.5 * (READS_S + WRITES_S)
    assert hidden_of(tmp_path, "none", 0.0, backward_s) < 0.87
    assert hidden_of(tmp_path, "backward", 0.0, backward_s) > 0.87


def test_the_disk_works_beside_forward(tmp_path: Path) -> None:
    """Without overlap writes do alone. With it the first layer waits for the first chunk."""
    forward_s = READS_S + WRITES_S
    assert hidden_of(tmp_path, "none", forward_s, 0.0) < 0.8
    assert hidden_of(tmp_path, "forward", forward_s, 0.0) > 0.8


def test_the_disk_works_beside_both_if_updates_are_delayed(tmp_path: Path) -> None:
    """The next forward, which waits for nothing, takes no time here: backward alone does."""
    backward_s = 1.5 * (READS_S + WRITES_S)
    hidden: dict[bool, list[float]] = {False: [], True: []}
    for delayed in (False, True) * 3:  # in turns: a busy machine lessens both
        overlap = DelayedUpdate(warmup_steps=0) if delayed else "forward"
        hidden[delayed].append(hidden_of(tmp_path, overlap, 0.0, backward_s))
    assert median(hidden[True]) > median(hidden[False]) + 0.05
    assert median(hidden[True]) > 0.75


def test_updates_begin_before_backward_ends(tmp_path: Path) -> None:
    model = model_of(0.0, 0.12)
    optimizer = AdamW(
        model.parameters(), states="disk", dir=tmp_path, durability="none", overlap="backward",
        policy=POLICY,
    )  # fmt: skip
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.start_trace()
        torch.autograd.backward(model(torch.zeros((), requires_grad=True)))
        ended = time.monotonic()
        optimizer.step()
    updates = [event for event in optimizer.trace() if event.lane == "update"]
    assert [event.chunk for event in updates] == list(range(CHUNKS))[::-1]
    assert sum(event.stop < ended for event in updates) >= CHUNKS - 1
    optimizer.close()


# --- gradients in every order ---

SIZES = (700, 5000, 3, 1024, 0, 2500, 1023, 40, 3000, 1)
SMALL = 1024


def in_any_order(directory: Path | None, seed: int, **given: Any) -> list[Tensor]:  # noqa: ANN401
    """Train with gradients that come in another order each step, some of them not at all."""
    rng = random.Random(seed)  # noqa: S311  # an order, no secret
    parameters = [nn.Parameter(torch.full((n,), 0.5)) for n in SIZES]
    where = {} if directory is None else {"states": "disk", "dir": directory, **given}
    delay_s = given.pop("delay_s", 0.0)
    optimizer = AdamW(parameters, lr=0.1, **{k: v for k, v in where.items() if k != "delay_s"})
    engine = engine_of(optimizer)
    for operation in ("read", "write") if delay_s else ():
        engine.inject_fault(operation, times=-1, delay_us=round(delay_s * 1e6))
    for _ in range(8):
        optimizer.zero_grad()
        used = [p for p in parameters if rng.random() < 0.8]
        rng.shuffle(used)
        slow = [rng.random() < 0.3 for _ in used]
        total = torch.zeros((), requires_grad=True) * 1.0
        for parameter, sleeps in zip(used, slow, strict=True):
            total = Sleeping.apply(total, 0.0, 0.002 * sleeps) + parameter.square().sum()
        torch.autograd.backward(total)
        optimizer.step()
    optimizer.wait()
    out = [p.detach().clone() for p in parameters]
    optimizer.close()
    return out


@pytest.mark.timeout(60)
@crossed(
    seed=range(4),
    kind=("scratch", "commits", "commits and a share", "naive", "slow disk"),
    backend=("uring", "threads"),
)
def test_two_slots_are_enough_for_gradients_in_any_order(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    kind: str,
    backend: Any,  # noqa: ANN401
) -> None:
    commits = kind.startswith("commits")
    slot = slot_bytes(FP32, SMALL, with_weights=commits)
    budget = 2 * slot
    if kind == "commits and a share":
        monkeypatch.setattr(layout, "DEFAULT_RING_BYTES", budget)
        budget += 5 * FP32.state_bytes(SMALL)
    policy = PipelinePolicy(
        chunk_elements=SMALL, backend=backend, schedule="naive" if kind == "naive" else "pipelined"
    )
    got = in_any_order(
        tmp_path, seed, overlap="backward", policy=policy, ram_budget=budget,
        durability="commit" if commits else "none", commit_every=1 + seed % 3 if commits else None,
        delay_s=0.0005 if kind == "slow disk" else 0.0,
    )  # fmt: skip
    want = in_any_order(None, seed)
    assert all_equal(got, want)


# --- by themselves ---


def test_what_is_at_once_is_never_under_way(tmp_path: Path) -> None:
    optimizer = AdamW([nn.Parameter(torch.ones(4))])
    assert isinstance(optimizer._runtime.schedule, Synchronous)
    optimizer._runtime.schedule.wait()
    optimizer._runtime.schedule.finish()
    optimizer.close()
    del tmp_path


def test_a_step_that_did_not_begin_cannot_end() -> None:
    optimizer = AdamW([nn.Parameter(torch.ones(4))])
    schedule = BackwardOverlap(optimizer._params(), 1)
    assert not schedule.is_open
    schedule.check_unchanged()
    param = optimizer._params().all()[0]
    with pytest.raises(OptionError, match="outside of a step"):
        schedule.on_gradient(param)
    with pytest.raises(OptionError, match="before it had begun"):
        schedule.step(StepPlan([], [], []), optimizer.state)
    optimizer.close()


def test_gradients_are_zeroed_after_the_update_that_reads_them(tmp_path: Path) -> None:
    """``zero_grad(set_to_none=False)`` writes to the memory that a slow update still reads."""

    def trained(**given: Any) -> list[Tensor]:  # noqa: ANN401
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        optimizer = AdamW(net.parameters(), lr=1e-2, module=net, **given)
        if given:
            engine = engine_of(optimizer)
            engine.inject_fault("read", times=-1, delay_us=5000)
        for step in range(3):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            optimizer.wait()
        optimizer.close()
        return [p.detach().clone() for p in net.parameters()]

    scratch = {"states": "disk", "dir": tmp_path, "durability": "none", "policy": POLICY}
    assert all_equal(trained(overlap="forward", **scratch), trained())
