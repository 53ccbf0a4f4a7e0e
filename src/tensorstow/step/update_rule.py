"""Chooses how chunks are updated on the device: by the fused kernel or by torch's operations.

[Note: Two rules] Both give the same bits as the host. They differ only in time and memory: the
fused kernel is one launch per chunk and makes no temporaries; the reference is twenty launches or
more for each part of a parameter in a chunk, and runs on every torch device. The kernel needs
Triton and CUDA. Its result depends on the compilers and the driver of the machine, so it is tried
on a few numbers before a run uses it, once for each family. If that fails or differs from the
reference in any bit, the reference is used. ``tensorstow doctor`` prints which rule is used and
why.
"""

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from tensorstow.base.sizes import round_up
from tensorstow.formats.quantize import GROUP
from tensorstow.formats.reference import FormattedStates, adam_reference_in_format, adam_scalars
from tensorstow.io.device_link import Pairs
from tensorstow.states.layout import Family
from tensorstow.step.segment_update import SegmentUpdate, Update

if TYPE_CHECKING:
    from tensorstow.step.fused_kernel import FusedRule

logger = logging.getLogger("tensorstow")
_OLDEST_TRITON = (3, 6)
"""The version that torch 2.11 comes with; older ones were not tested."""


def update_by_reference(
    segments: Sequence[SegmentUpdate], streams: Sequence[Tensor], family: Family
) -> None:
    """Update ``segments`` and the chunk's ``streams`` in place by one step, one after the other."""
    for segment in segments:
        begin, end = segment.position, segment.position + segment.weight.numel()
        states = [
            spec.part(stream, begin, end)
            for stream, spec in zip(streams, family.specs, strict=True)
        ]
        adam_reference_in_format(
            segment.weight,
            segment.gradient,
            FormattedStates(states, family.format, family.amsgrad, segment.first, family.ema),
            segment.scalars,
            key=segment.key,
            seed_master=segment.seed_master,
        )


class TorchRule:
    """The reference: plain torch operations, each part of a parameter by itself."""

    name = "torch's operations"
    """For users."""

    def table_bytes(self, segments: int) -> int:
        """Return the bytes that this number of segments needs, on the host and on the device."""
        del segments
        return 0

    def prepare(
        self, segments: Sequence[SegmentUpdate], family: Family, on_host: Tensor, on_device: Tensor
    ) -> tuple[Pairs, Update]:
        """Return copies to the device that precede the update of a chunk, and the update.

        ``on_host`` and ``on_device`` are ``table_bytes`` of memory, unchanged until the copy and
        the update are over.
        """
        del on_host, on_device
        return (), lambda streams: update_by_reference(segments, streams, family)


UpdateRule: TypeAlias = "TorchRule | FusedRule"
"""Two ways to update the segments of a chunk, all of which are on one device."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The rule for one kind of states on one kind of device."""

    rule: UpdateRule
    why_not_fused: str = ""
    """Empty if ``rule`` is the fused kernel."""


@lru_cache
def rule_on(device: torch.device, family: Family) -> Choice:
    """Return the rule that updates states of ``family`` on ``device``; the first call tests it."""
    choice = _choose(device, family)
    why = f", not the fused kernel: {choice.why_not_fused}" if choice.why_not_fused else ""
    logger.info("on %s %s is updated by %s%s", device, family, choice.rule.name, why)
    return choice


def why_not_fused(device: torch.device) -> str:
    """Return the missing requirement of the fused kernel; empty: none."""
    if device.type != "cuda":
        return f"the fused kernel is compiled for CUDA, and this is {device.type}"
    if torch.version.hip is not None:
        return "the fused kernel's bits were compared on CUDA, and this is ROCm"
    try:
        triton: Any = importlib.import_module("triton")
    except ImportError as error:
        return f"Triton cannot be imported ({error}); `pip install triton` brings it"
    if tuple(map(int, triton.__version__.split(".")[:2])) < _OLDEST_TRITON:
        least = ".".join(map(str, _OLDEST_TRITON))
        return f"Triton {triton.__version__} is older than {least}"
    if triton.knobs.runtime.interpret:
        return "TRITON_INTERPRET is set, which runs Triton's kernels on the host"
    return ""


def _choose(device: torch.device, family: Family) -> Choice:
    why = why_not_fused(device)
    if why:
        return Choice(TorchRule(), why)
    # Triton is optional, and slow to import.
    from tensorstow.step.fused_kernel import FusedRule  # noqa: PLC0415

    fused = FusedRule()
    why = _fails(fused, device, family)
    return Choice(TorchRule(), why) if why else Choice(fused)


def _fails(rule: UpdateRule, device: torch.device, family: Family) -> str:
    """Update a few numbers by ``rule``; return why it cannot be used, or an empty string."""
    try:
        differ = not _agrees(rule, device, family)
    except Exception as error:  # noqa: BLE001  # compilers and drivers may raise anything
        return f"the fused kernel failed when it was tried: {type(error).__name__}: {error}"
    return "the fused kernel's bits are not the reference's on this device" if differ else ""


def _agrees(rule: UpdateRule, device: torch.device, family: Family) -> bool:
    """Return whether a step of ``rule`` on ``device`` has the reference's bits."""
    cpu = torch.device("cpu")
    want, got = _Trial(family, cpu), _Trial(family, device)
    update_by_reference(want.segments, want.streams, family)
    host_table = torch.empty(rule.table_bytes(len(got.segments)), dtype=torch.uint8)
    device_table = torch.empty_like(host_table, device=device)
    pairs, update = rule.prepare(got.segments, family, host_table, device_table)
    for target, source in pairs:
        target.copy_(source)
    update(got.streams)
    return all(
        # As bytes: -0.0 would equal 0.0 otherwise.
        torch.equal(a.view(torch.uint8), b.to(cpu).view(torch.uint8))
        for a, b in zip(want.tensors, got.tensors, strict=True)
    )


class _Trial:
    """Two parameters of finite numbers, some of them subnormal; the same ones at each call."""

    # Neither fills its last group.
    _SIZES = (1000 * GROUP + 5, 7)

    def __init__(self, family: Family, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)

        def numbers(count: int, dtype: torch.dtype) -> Tensor:
            exponents = torch.randint(-140, 10, (count,), generator=generator)
            values = torch.ldexp(torch.randn(count, generator=generator), exponents)
            return values.to(dtype).to(device)

        scalars = adam_scalars(
            lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, step=3, decoupled=True
        )
        self.segments = []
        position = 0
        for size in self._SIZES:
            weight, gradient = numbers(size, family.dtype), numbers(size, family.dtype)
            segment = SegmentUpdate(
                weight, gradient, position, 0, scalars, key=size, seed_master=position > 0
            )
            self.segments.append(segment)
            position += round_up(size, GROUP)
        self.streams = []
        for spec in family.specs:
            count = spec.length(position)
            if spec.dtype.is_floating_point:
                stream = numbers(count, spec.dtype)
                stream = stream if spec.name == "exp_avg" else stream.abs()
            else:
                codes = torch.randint(0, 100, (count,), generator=generator)
                stream = codes.to(spec.dtype).to(device)
            self.streams.append(stream)
        self.tensors = [*self.streams, *(segment.weight for segment in self.segments)]
