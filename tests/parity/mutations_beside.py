"""Features broken on purpose: updates beside compute, formats, commits and what stays in RAM."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from parity.candidate import NO_TAPS, Taps
from tensorstow.checkpoint import commits, resume
from tensorstow.checkpoint.committed_extents import CommittedExtents
from tensorstow.io.device_link import DeviceEvent
from tensorstow.optim import step_runner
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.states.chunks import Chunk
from tensorstow.states.state_store import StateStore
from tensorstow.states.stored import StoreStorage
from tensorstow.step import backward_overlap, forward_waits, schedule
from tensorstow.step.backward_overlap import ConsumedGradients
from tensorstow.step.managed_param import ManagedParam, StepPlan
from tensorstow.store.records import ChunkRecord

Use = Callable[[torch.Tensor, DeviceEvent | None], None]


def parameters_wait_for_nothing(patch: pytest.MonkeyPatch) -> None:
    """Let those who read a parameter itself have what is there."""
    patch.setattr(schedule, "mark_unpublished", lambda *_: None)


def nobody_waits(patch: pytest.MonkeyPatch, _: Path) -> None:
    parameters_wait_for_nothing(patch)
    patch.setattr(forward_waits.ForwardWaits, "_before", lambda *_: None)


def blocks_wait_for_nothing(patch: pytest.MonkeyPatch, _: Path) -> None:
    """Let the root wait for what is outside of blocks, and nobody for the rest."""
    parameters_wait_for_nothing(patch)
    needs = forward_waits.ForwardWaits._needs

    def none_of_blocks(self: forward_waits.ForwardWaits, module: torch.nn.Module) -> frozenset[int]:
        return frozenset() if id(module) in self._inside else needs(self, module)

    patch.setattr(forward_waits.ForwardWaits, "_needs", none_of_blocks)


def weights_not_published(patch: pytest.MonkeyPatch, _: Path) -> None:
    def forget(param: ManagedParam) -> None:
        param.host = None

    for module in (schedule, backward_overlap):
        patch.setattr(module, "publish_weight", forget)


def another_gradient(patch: pytest.MonkeyPatch, _: Path) -> None:
    """Let a parameter be updated by the gradient of another one of its size."""
    consume = ConsumedGradients.consume
    last: list[torch.Tensor] = []

    def confused(self: ConsumedGradients, number: int, parameter: torch.Tensor, use: Use) -> None:
        def use_last(gradient: torch.Tensor, copied: DeviceEvent | None) -> None:
            same = [g for g in last if g.numel() == gradient.numel()]
            last.append(gradient)
            use(same[-1] if same else gradient, copied)

        consume(self, number, parameter, use_last)

    patch.setattr(ConsumedGradients, "consume", confused)


def first_micro_batches_lost(patch: pytest.MonkeyPatch, _: Path) -> None:
    """Let the context drop what it was to accumulate."""
    accumulate = StowedAdam.accumulate

    @contextmanager
    def dropping(self: StowedAdam) -> Iterator[None]:
        with accumulate(self):
            yield
        for parameter in self._parameters():
            parameter.grad = None

    patch.setattr(StowedAdam, "accumulate", dropping)


def _in_streams(change: Callable[[Chunk, Any], None]) -> Taps:
    """Change what is kept of the states after each step."""

    def put(optimizer: StowedAdam, _: int) -> None:
        optimizer.synchronize()
        store = optimizer._states()
        for chunk in store.chunks:
            if store.pipeline.stored.state(chunk) != "blank":
                for _, streams in store._transfers.in_memory([chunk], store._ring):
                    change(chunk, streams)
                    if not chunk.resident:
                        store._transfers.save(chunk, store._ring)
                    store.pipeline.stored.rewritten(chunk, streams)

    return replace(NO_TAPS, after_step=put)


def low_halves_lost(_: pytest.MonkeyPatch, __: Path) -> Taps:
    def drop(chunk: Chunk, streams: Any) -> None:  # noqa: ANN401  # tensors by position
        for spec, stream in zip(chunk.family.specs, streams, strict=True):
            if spec.dtype == torch.int16:
                stream.zero_()

    return _in_streams(drop)


def masters_rounded_in_fp32(_: pytest.MonkeyPatch, __: Path) -> Taps:
    """Do the same where the whole master is kept."""

    def drop(chunk: Chunk, streams: Any) -> None:  # noqa: ANN401  # tensors by position
        for spec, stream in zip(chunk.family.specs, streams, strict=True):
            if spec.name == "master":
                stream.copy_(stream.to(chunk.family.dtype).float())

    return _in_streams(drop)


def ring_is_stale(_: pytest.MonkeyPatch, __: Path) -> Taps:
    """Let the slots that keep what was written hold something else when the next step begins."""

    def spoil(optimizer: StowedAdam, step: int) -> None:
        if step == 3:
            store = optimizer._states()
            store.pipeline.wait_written()
            assert store._ring._arena is not None
            store._ring._arena.tensor(0, store._ring.plan.nbytes, torch.uint8).zero_()

    return replace(NO_TAPS, before_backward=spoil)


# --- commits ---


def committed_extent_is_written_again(patch: pytest.MonkeyPatch, _: Path) -> None:
    patch.setattr(CommittedExtents, "retarget", lambda *_: None)


def commit_without_its_weights(patch: pytest.MonkeyPatch, _: Path) -> None:
    """Let a step that commits not put the new weights beside the states."""
    make_plan = step_runner.make_plan

    def without(*given: Any, commits: bool) -> StepPlan:  # noqa: ANN401  # passed on
        del commits
        return make_plan(*given, commits=False)

    patch.setattr(step_runner, "make_plan", without)


def commit_of_weights_before_the_step(patch: pytest.MonkeyPatch, _: Path) -> None:
    """Let resume take the weights of the model as it is for those of the commit."""
    patch.setattr(resume, "_load_weights", lambda *_: None)


def step_counts_not_committed(patch: pytest.MonkeyPatch, _: Path) -> None:
    hyper = commits.hyper_of

    def without(*given: Any) -> dict[str, Any]:  # noqa: ANN401  # passed on
        return {**hyper(*given), "steps": {}}

    patch.setattr(commits, "hyper_of", without)


def groups_not_committed(patch: pytest.MonkeyPatch, _: Path) -> None:
    hyper, first = commits.hyper_of, {}

    def of_first_commit(*args: Any) -> dict[str, Any]:  # noqa: ANN401  # passed on
        saved = hyper(*args)
        return {**saved, "groups": first.setdefault("groups", saved["groups"])}

    patch.setattr(commits, "hyper_of", of_first_commit)


def what_stays_is_not_committed(patch: pytest.MonkeyPatch, _: Path) -> None:
    record = commits.chunk_record

    def blank_if_resident(chunk: Chunk, store: StateStore, space: StoreStorage) -> ChunkRecord:
        made = record(chunk, store, space)
        return replace(made, blank=True, checksums=b"") if chunk.resident else made

    patch.setattr(commits, "chunk_record", blank_if_resident)


def what_stays_is_not_updated(patch: pytest.MonkeyPatch, _: Path) -> Taps:
    """Put the states of resident chunks back to what they were before a step."""
    kept: dict[int, list[torch.Tensor]] = {}
    del patch

    def remember(optimizer: StowedAdam, step: int) -> None:
        if step == 1:
            optimizer.synchronize()
            for chunk in optimizer._states().chunks:
                kept[chunk.number] = [s.clone() for s in chunk.resident]

    def put_back(optimizer: StowedAdam, step: int) -> None:
        if step == 1:
            optimizer.synchronize()
            for chunk in optimizer._states().chunks:
                for stream, before in zip(chunk.resident, kept[chunk.number], strict=True):
                    stream.copy_(before)

    return replace(NO_TAPS, before_backward=remember, after_step=put_back)
