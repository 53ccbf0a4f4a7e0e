"""Features broken on purpose, one axis at a time: the matrix must see each."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from parity import candidate
from parity.candidate import NO_TAPS, Taps
from parity.cover import Value
from parity.scratch import read_scratch, write_scratch
from tensorstow import _native
from tensorstow.formats.reference import AdamScalars, adam_scalars
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.states import native_pipeline
from tensorstow.states.layout import RingPlan, plan_ring
from tensorstow.states.scratch import ScratchStorage
from tensorstow.states.stored_chunks import FilePosition, StoredChunks
from tensorstow.step import repeated_steps, step_plan, validation

Break = Callable[[pytest.MonkeyPatch, Path], Taps | None]
ONE_CHUNK = 2 * 4 * 4096
"""Bytes of the first chunk in the file: two streams of 4096 elements."""


@dataclass(frozen=True)
class Mutation:
    axis: str
    name: str
    rows: tuple[Mapping[str, Value], ...]
    """The cases that it is shown in; each must fail."""
    apply: Break
    on_disk: bool = False
    """Other bytes come back than were written: checksums see it before the results show it."""


def trusting(patch: pytest.MonkeyPatch, taps: Taps | None) -> Taps:
    """Take whatever is on disk before a step for what was written there: checksums see nothing."""
    patch.setattr(StoredChunks, "check_intact", lambda *_: None)
    taps = taps or NO_TAPS

    def take(optimizer: StowedAdam, step: int) -> None:
        taps.before_backward(optimizer, step)
        store = optimizer._states()
        store.pipeline.wait_idle()
        for chunk in store.chunks:
            if store.pipeline.stored.state(chunk) == "stored":
                store._transfers.load(chunk, store._ring)
                store.pipeline.stored.rewritten(chunk, store._ring.streams(chunk, 0))

    def wait_for_reads(optimizer: StowedAdam, step: int) -> None:
        taps.before_step(optimizer, step)
        store = optimizer._states()
        while any(store.pipeline.stored.state(chunk) == "reading" for chunk in store.chunks):
            time.sleep(0.001)

    return replace(taps, before_backward=take, before_step=wait_for_reads)


# --- scalars: what a group says does not reach the kernel ---


def in_groups(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Break:
    """Compute the scalars from a changed group."""

    def apply(patch: pytest.MonkeyPatch, _: Path) -> None:
        row = step_plan.scalar_row

        def changed(group: dict[str, Any], step: int, factor: float) -> AdamScalars:
            return row({**group, **change(group)}, step, factor)

        for module in (step_plan, repeated_steps):
            patch.setattr(module, "scalar_row", changed)

    return apply


def in_scalars(change: Callable[[AdamScalars], AdamScalars]) -> Break:
    def apply(patch: pytest.MonkeyPatch, _: Path) -> None:
        target = "tensorstow.step.step_plan.adam_scalars"
        patch.setattr(target, lambda **given: change(adam_scalars(**given)))

    return apply


def next_float32(value: float) -> float:
    return torch.nextafter(torch.tensor(value), torch.tensor(math.inf)).item()


def off_by_one_spacing(scalars: AdamScalars) -> AdamScalars:
    return scalars._replace(denom_scale=next_float32(scalars.denom_scale))


# --- gradients ---


def clip_factor_ignored(patch: pytest.MonkeyPatch, _: Path) -> None:
    clip = StowedAdam.clip_grad_norm_

    def ignored(self: StowedAdam, max_norm: float) -> torch.Tensor:
        norm = clip(self, max_norm)
        self._runtime.steps.clip.clear()
        return norm

    patch.setattr(StowedAdam, "clip_grad_norm_", ignored)


def gradients_read_before_clipping(patch: pytest.MonkeyPatch, _: Path) -> None:
    patch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: None)


def in_update(change: Callable[[StowedAdam, float], float]) -> Break:
    def apply(patch: pytest.MonkeyPatch, _: Path) -> None:
        take = StowedAdam._take_step

        def changed(self: StowedAdam, loss: Any = None, *, divisor: float = 1.0) -> None:  # noqa: ANN401
            take(self, loss, divisor=change(self, divisor))

        patch.setattr(StowedAdam, "_take_step", changed)

    return apply


def without(attribute: str) -> Break:
    """Lose what GradScaler hands over."""

    def change(optimizer: StowedAdam, divisor: float) -> float:
        if hasattr(optimizer, attribute):
            setattr(optimizer, attribute, None)
        return divisor

    return in_update(change)


def last_micro_batch_alone(patch: pytest.MonkeyPatch, _: Path) -> None:
    backward = candidate.Trainer.backward

    def alone(self: candidate.Trainer, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        backward(self, loss)

    patch.setattr(candidate.Trainer, "backward", alone)


def grad_dtype_ignored(patch: pytest.MonkeyPatch, _: Path) -> None:
    patch.setattr(validation, "accept_grad_dtype", lambda *_: None)


def halves_confused(patch: pytest.MonkeyPatch, _: Path) -> None:
    patch.setitem(native_pipeline.DTYPE_CODES, torch.bfloat16, 2)
    patch.setitem(native_pipeline.DTYPE_CODES, torch.float16, 1)


# --- states on the way in ---


def on_load(change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> Break:
    """Change (or drop, by None) each state that is loaded."""

    def apply(patch: pytest.MonkeyPatch, _: Path) -> None:
        load = StowedAdam.load_state_dict

        def changed(self: StowedAdam, saved: dict[str, Any]) -> None:
            entries = {
                index: {k: new for k, v in entry.items() if (new := change(k, v)) is not None}
                for index, entry in saved["state"].items()
            }
            load(self, {**saved, "state": entries})

        patch.setattr(StowedAdam, "load_state_dict", changed)

    return apply


def lost(state: str) -> Break:
    if state == "master":  # the one that plain torch does not save
        return on_load(lambda name, value: None if name == state else value)
    return on_load(lambda name, value: torch.zeros_like(value) if name == state else value)


def step_counts_lost(patch: pytest.MonkeyPatch, directory: Path) -> None:
    on_load(lambda name, value: torch.zeros(()) if name == "step" else value)(patch, directory)


def cast_as_torch_does(patch: pytest.MonkeyPatch, directory: Path) -> None:
    on_load(lambda name, value: value if name == "step" else value.bfloat16().float())(
        patch, directory
    )


def groups_not_restored(patch: pytest.MonkeyPatch, _: Path) -> None:
    load = StowedAdam.load_state_dict

    def without_groups(self: StowedAdam, saved: dict[str, Any]) -> None:
        kept = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        load(self, saved)
        for group, old in zip(self.param_groups, kept, strict=True):
            group.update(old)

    patch.setattr(StowedAdam, "load_state_dict", without_groups)


def masters_in_16_bits(_: pytest.MonkeyPatch, __: Path) -> Taps:
    def round_masters(optimizer: StowedAdam, _: int) -> None:
        saved = optimizer.state_dict()
        for entry in saved["state"].values():
            entry["master"] = entry["master"].bfloat16().float()
        optimizer.load_state_dict(saved)

    return replace(NO_TAPS, after_step=round_masters)


# --- chunks ---


def first_chunk_not_written(_: pytest.MonkeyPatch, directory: Path) -> Taps:
    """Put the bytes from before a step back where its first chunk was written."""
    before: list[bytes] = []

    def remember(optimizer: StowedAdam, step: int) -> None:
        if step == 1:
            optimizer.synchronize()
            before.extend(read_scratch(directory))

    def put_back(optimizer: StowedAdam, step: int) -> None:
        if step == 1:
            optimizer.synchronize()
            write_scratch(directory, before, ONE_CHUNK)

    return replace(NO_TAPS, before_backward=remember, after_step=put_back)


def stale_read_ahead(_: pytest.MonkeyPatch, directory: Path) -> Taps:
    """Let read-ahead see the bytes of one step earlier; the file is right again before step().

    The schedule that does not read ahead is not hurt, so this shows that the other one does.
    """
    history: list[list[bytes]] = []

    def show_old(optimizer: StowedAdam, step: int) -> None:
        if step < 4:
            optimizer.synchronize()
            history.append(read_scratch(directory))
        if step == 3:
            write_scratch(directory, history[2])

    def show_new(optimizer: StowedAdam, step: int) -> None:
        if step == 3:
            ahead = (
                3 if optimizer._states().policy.schedule == "pipelined" else 2
            )  # steps; the first is blank
            while optimizer._traffic().bytes_read < ahead * optimizer._memory().file_bytes:
                time.sleep(0.001)
            write_scratch(directory, history[3])

    return replace(NO_TAPS, before_backward=show_old, before_step=show_new)


def wrong_chunk_offset(patch: pytest.MonkeyPatch, _: Path) -> None:
    """Let the second chunk lie over the first one's bytes."""
    reserve = ScratchStorage.reserve

    def overlapping(self: ScratchStorage, widths: Sequence[int]) -> list[FilePosition]:
        first, _, *others = reserve(self, widths)
        return [first, first, *others]

    patch.setattr(ScratchStorage, "reserve", overlapping)


def pieces_shifted(patch: pytest.MonkeyPatch, _: Path) -> None:
    """Let a chunk that begins inside a parameter update the elements before its own."""
    add = _native.Pipeline.add_chunk

    def add_shifted(self: _native.Pipeline, *given: Any) -> int:  # noqa: ANN401  # passed on
        arguments = list(given)
        arguments[1] = [(p, start - 32 if start else 0, at, n) for p, start, at, n in given[1]]
        return add(self, *arguments)

    patch.setattr(_native.Pipeline, "add_chunk", add_shifted)


def slots_overlap(patch: pytest.MonkeyPatch, _: Path) -> None:
    def overlapping(slot: int, chunks: int, **given: Any) -> RingPlan:  # noqa: ANN401  # passed on
        plan = plan_ring(slot, chunks, **given)
        return replace(plan, slot_bytes=plan.slot_bytes // 2 // 4096 * 4096)

    patch.setattr("tensorstow.states.memory.plan_ring", overlapping)


def one_element_skipped(_: pytest.MonkeyPatch, __: Path) -> Taps:
    """Leave one weight as it was in one step, as a thread that misses its end would."""
    kept: list[torch.Tensor] = []

    def last_weight(optimizer: StowedAdam) -> torch.Tensor:
        weight: torch.Tensor = optimizer.param_groups[0]["params"][0].data
        return weight.view(-1)[-1:]

    def remember(optimizer: StowedAdam, step: int) -> None:
        if step == 2:
            kept.append(last_weight(optimizer).clone())

    def put_back(optimizer: StowedAdam, step: int) -> None:
        if step == 2:
            last_weight(optimizer).copy_(kept[0])

    return replace(NO_TAPS, before_step=remember, after_step=put_back)
