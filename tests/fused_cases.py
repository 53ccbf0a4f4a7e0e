"""Updates by the fused kernel beside the reference's, for tests with and without an accelerator."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tensorstow.formats.quantize import GROUP
from tensorstow.formats.reference import adam_scalars
from tensorstow.formats.state_format import StateFormat, StreamSpec, stores_master
from tensorstow.states.layout import Family
from tensorstow.step.segment_update import SegmentUpdate
from tensorstow.step.update_rule import update_by_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECIAL = (
    0.0,
    -0.0,
    float("inf"),
    -float("inf"),
    float("nan"),
    1e-45,
    -1e-40,
    3.4e38,
    6e-8,
    65504.0,
)


FAMILIES = tuple(
    Family(dtype, amsgrad, kept, ema)
    for dtype in DTYPES
    for kept in StateFormat
    for amsgrad, ema in ((False, False), (True, False), (False, True))
    if (kept.exact or not amsgrad) and (stores_master(dtype, kept) or not ema)
)
SCALARS = (
    adam_scalars(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, step=3, decoupled=True),
    adam_scalars(  # beta1 below a half goes to the gradient from the other end
        lr=1e-2,
        betas=(0.2, 0.99),
        eps=1e-3,
        weight_decay=0.01,
        step=1,
        decoupled=False,
        grad_factor=-0.37,
        ema_weight=0.7,
    ),
    adam_scalars(
        lr=1e-30,
        betas=(0.0, 0.5),
        eps=0.0,
        weight_decay=0.0,
        step=1000,
        decoupled=False,
        ema_weight=1e-4,
    ),
)


def there(segment: SegmentUpdate, device: torch.device) -> SegmentUpdate:
    """Return a copy on ``device``."""
    weight = segment.weight.clone().to(device)
    return replace(segment, weight=weight, gradient=segment.gradient.to(device))


@dataclass(slots=True)
class Case:
    """One chunk, before a step."""

    family: Family
    streams: list[Tensor]
    segments: list[SegmentUpdate]


def make_case(family: Family, sizes: Sequence[int], seed: int) -> Case:
    """Return a chunk of parameters of ``sizes``, with any values."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    position = 0
    for number, size in enumerate(sizes):
        dtype = DTYPES[_below(3, generator)]
        parts.append(
            SegmentUpdate(
                numbers(size, family.dtype, generator),
                numbers(size, dtype, generator),
                position,
                first=GROUP * _below(1 << 30, generator),
                scalars=SCALARS[_below(len(SCALARS), generator)],
                key=(_below(1 << 62, generator) << 2) + number,
                seed_master=_below(2, generator) == 1,
            )
        )
        position += -(-size // GROUP) * GROUP
    streams = [_stream(spec, position, family, generator) for spec in family.specs]
    return Case(family, streams, parts)


def _below(end: int, generator: torch.Generator) -> int:
    return int(torch.randint(end, (), generator=generator))


def numbers(count: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return numbers of all magnitudes, few of them of any bits, and few special ones."""
    usual = torch.randn(count, generator=generator)
    usual *= torch.exp(6 * torch.randn(count, generator=generator))
    bits = torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator)
    special = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (count,), generator=generator)]
    kind = torch.randint(40, (count,), generator=generator)
    any_bits = bits.to(torch.int32).view(torch.float32)
    return torch.where(kind == 0, any_bits, torch.where(kind == 1, special, usual)).to(dtype)


def _stream(spec: StreamSpec, elements: int, family: Family, generator: torch.Generator) -> Tensor:
    count = -(-elements // spec.per)
    if not spec.dtype.is_floating_point:
        info = torch.iinfo(spec.dtype)
        least = max(info.min, -127) if spec.dtype == torch.int8 else info.min
        return torch.randint(least, info.max + 1, (count,), generator=generator).to(spec.dtype)
    found = numbers(count, spec.dtype, generator)
    has_signs = family.dtype == torch.bfloat16 and family.format != StateFormat.FP32
    return found if spec.name == "exp_avg" or has_signs else found.abs()


def updated_by_reference(case: Case) -> Case:
    """Return the chunk after a step of the reference, on the CPU."""
    parts = [there(part, torch.device("cpu")) for part in case.segments]
    streams = [stream.clone() for stream in case.streams]
    update_by_reference(parts, streams, case.family)
    return Case(case.family, streams, parts)


def updated_by_kernel(case: Case, device: torch.device) -> Case:
    """Return the chunk after a step of the fused kernel on ``device``, on the CPU again."""
    parts = [there(part, device) for part in case.segments]
    streams = [stream.clone().to(device) for stream in case.streams]
    from tensorstow.step import fused_kernel  # noqa: PLC0415  # needs Triton

    table = torch.empty(fused_kernel.table_bytes(len(parts)), dtype=torch.uint8)
    blocks = fused_kernel.fill_table(parts, table)
    with np.errstate(all="ignore"):  # Triton's interpreter is numpy
        fused_kernel.update(
            table.to(device),
            len(parts),
            blocks,
            streams,
            case.family,
        )
    cpu = torch.device("cpu")
    return Case(
        case.family, [stream.to(cpu) for stream in streams], [there(part, cpu) for part in parts]
    )


def differences(got: Case, want: Case) -> Iterator[str]:
    """Tell what differs in a bit; which NaN a NaN is, and so its low bits, is not specified."""
    for number, (ours, theirs) in enumerate(zip(got.segments, want.segments, strict=True)):
        if not same(ours.weight, theirs.weight):
            yield f"weight {number}"
    for spec, ours, theirs in zip(got.family.specs, got.streams, want.streams, strict=True):
        if spec.name == "master" and not spec.dtype.is_floating_point:
            for part in want.segments:
                own = slice(part.position, part.position + part.weight.numel())
                known = ~part.weight.isnan()
                if not torch.equal(ours[own][known], theirs[own][known]):
                    yield f"{spec.name} of {part.first}"
        elif not same(ours, theirs):
            yield spec.name


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether both have the same bits, or NaN in the same places."""
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    whole = {2: torch.int16, 4: torch.int32}[a.itemsize]
    return bool(((a.view(whole) == b.view(whole)) | (a.isnan() & b.isnan())).all())
