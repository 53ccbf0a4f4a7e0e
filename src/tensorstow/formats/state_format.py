"""State formats: the streams that each one stores, and their conversion to fp32 and back.

[Note: State formats] in csrc/kernels/kernels.h defines the formats. This module has the same
streams by name, and their conversion to and from fp32 tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from tensorstow.base.errors import OptionError
from tensorstow.formats.quantize import (
    GROUP,
    dequantize_first,
    dequantize_second,
    quantize_first,
    quantize_second,
    round_to_bf16,
)
from tensorstow.formats.stochastic_rounding import random_bits

_TIE = -0x8000
"""The low half of a master that is exactly halfway between two bf16 numbers."""


def join_halves(weight: Tensor, low: Tensor, rounded_up: Tensor) -> Tensor:
    """Return the fp32 masters of bf16 ``weight`` with the int16 halves ``low``.

    ``rounded_up`` (bool): where a tie was rounded away from zero.
    """
    # As int16 a tie's low half lies below the weight. One that was rounded down lies above it.
    down = (low == _TIE) & ~rounded_up
    return (_high(weight) + low.int() + (down.int() << 16)).view(torch.float32)


def split_halves(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the low half (int16) of each fp32 master, and where it is a tie rounded up."""
    bits = master.view(torch.int32)
    # A tie goes to the even high half: up, if the last bit of its own is set.
    return bits.to(torch.int16), (bits & 0x1FFFF) == 0x18000


def join_bytes(weight: Tensor, low: Tensor) -> Tensor:
    """Return the 24-bit masters (fp32) of bf16 ``weight`` with the int8 distances ``low``."""
    return (_high(weight) + (low.int() << 8)).view(torch.float32)


def split_bytes(master: Tensor) -> Tensor:
    """Return the int8 distance of each fp32 master from its weight."""
    bits = master.view(torch.int32)
    distance = bits - _high(master.bfloat16())
    nearest = (distance + 0x7F + ((distance >> 8) & 1)) >> 8  # a tie to even
    return nearest.clamp(-0x7F, 0x7F).to(torch.int8)


def _high(weight: Tensor) -> Tensor:
    return weight.view(torch.int16).int() << 16


_PIECE = 1 << 19
"""Elements converted at a time: a few MiB of temporaries; a multiple of GROUP."""


class StateFormat(StrEnum):
    """The format of states in the ring and on disk; kernels.h has the same names."""

    FP32 = "fp32"
    SPLIT = "split"
    """The same bits as fp32; a bf16 parameter's master is stored as its low half alone."""
    BF16 = "bf16"
    """Moments in bf16, rounded stochastically."""
    INT8 = "int8"
    """Moments of one byte each, with a scale for every GROUP of them."""

    @property
    def exact(self) -> bool:
        """Return whether an update gives the same bits as with fp32 states."""
        return self in {StateFormat.FP32, StateFormat.SPLIT}


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """A stream with one element of ``dtype`` for every ``per`` elements of the parameter."""

    name: str
    dtype: torch.dtype
    per: int

    def length(self, elements: int) -> int:
        """Return the stream's elements for those of a parameter; a partial group counts whole."""
        return -(-elements // self.per)

    def nbytes(self, elements: int) -> int:
        """Return the stream's bytes for ``elements`` of a parameter."""
        return self.length(elements) * self.dtype.itemsize

    def part(self, stream: Tensor, begin: int, end: int) -> Tensor:
        """Return a stream's part for a parameter's elements; ``begin`` is that of a group."""
        return stream[begin // self.per : self.length(end)]


def state_names(dtype: torch.dtype, *, amsgrad: bool, ema: bool = False) -> tuple[str, ...]:
    """Return the names of the fp32 states that users see for a parameter of ``dtype``."""
    names = ["exp_avg", "exp_avg_sq"]
    if amsgrad:
        names.append("max_exp_avg_sq")
    if dtype != torch.float32:
        names.append("master")
    if ema:
        names.append("ema")
    return tuple(names)


def stores_master(dtype: torch.dtype, format: StateFormat) -> bool:
    """Return whether the fp32 weight is stored as such: as the parameter, or as its master."""
    return dtype != torch.bfloat16 or format == StateFormat.FP32


def streams_of(
    dtype: torch.dtype, format: StateFormat, *, amsgrad: bool, ema: bool = False
) -> tuple[StreamSpec, ...]:
    """Return the streams of a parameter of ``dtype``, in the order in which they are stored.

    Raises OptionError for amsgrad with an inexact format, and for averages (``ema``) of masters
    that are not stored in fp32.
    """
    if amsgrad and not format.exact:
        message = (
            f"amsgrad was requested with states in {format}: its running maximum needs an exact"
            " format. Use fp32 or split, or amsgrad=False."
        )
        raise OptionError(message)
    if ema and not stores_master(dtype, format):
        message = (
            f"ema was requested with states in {format}, which stores no fp32 master of a bfloat16"
            ' parameter to average. Leave state_format out, or use "fp32".'
        )
        raise OptionError(message)
    m, v = _MOMENT_DTYPES[format]
    dtypes = {
        "exp_avg": m,
        "exp_avg_sq": v,
        "max_exp_avg_sq": torch.float32,
        "master": _LOW_DTYPES[format] if dtype == torch.bfloat16 else torch.float32,
    }
    specs = [StreamSpec(name, dtypes[name], 1) for name in state_names(dtype, amsgrad=amsgrad)]
    if format == StateFormat.INT8:
        specs += [
            StreamSpec(name, torch.bfloat16, GROUP)
            for name in ("exp_avg_scale", "exp_avg_sq_scale")
        ]
    if ema:
        specs.append(StreamSpec("ema", torch.float32, 1))
    return tuple(specs)


def decode(
    streams: Sequence[Tensor],
    weight: Tensor,
    format: StateFormat,
    *,
    amsgrad: bool,
    ema: bool = False,
) -> dict[str, Tensor]:
    """Return the fp32 states by name.

    ``streams`` are those of ``streams_of``, 1-D tensors of whole groups except for the parameter's
    last one; ``weight`` has the parameter's elements that they belong to, on the same device.
    """
    specs = streams_of(weight.dtype, format, amsgrad=amsgrad, ema=ema)
    states = {
        name: torch.empty(weight.numel(), dtype=torch.float32, device=weight.device)
        for name in state_names(weight.dtype, amsgrad=amsgrad, ema=ema)
    }
    for begin, end in _pieces(weight.numel()):
        piece = _cut(streams, specs, begin, end)
        for name, values in _decode_piece(piece, weight[begin:end], format).items():
            states[name][begin:end] = values
    return states


def encode(
    states: Mapping[str, Tensor],
    weight: Tensor,
    out: Sequence[Tensor],
    format: StateFormat,
    *,
    amsgrad: bool,
    ema: bool = False,
    key: int | None = None,
    first: int = 0,
) -> None:
    """Write fp32 ``states`` to the streams ``out``; the arguments are as in ``decode``.

    bf16 and int8 moments are rounded to nearest without a ``key``, and stochastically with one, as
    the kernels do; ``first`` is then the index in the parameter of the first element. Without a key
    the states are the user's and are checked: raises OptionError for a negative second moment, and
    for a master that does not round to the weight if the format stores only the bits that the
    weight lacks; ``out`` may be partly written. With a key nothing synchronizes with a device.
    """
    specs = streams_of(weight.dtype, format, amsgrad=amsgrad, ema=ema)
    for begin, end in _pieces(weight.numel()):
        piece = {name: state[begin:end] for name, state in states.items()}
        chances: Chances = (None, None)
        if key is None:
            _check(piece, weight[begin:end], format)
        elif not format.exact:
            chances = random_bits(key, first + begin, end - begin, weight.device)
        encoded = _encode_piece(piece, weight[begin:end], format, chances)
        for name, stream in _cut(out, specs, begin, end).items():
            stream.copy_(encoded[name])


_MOMENT_DTYPES = {
    StateFormat.FP32: (torch.float32, torch.float32),
    StateFormat.SPLIT: (torch.float32, torch.float32),
    StateFormat.BF16: (torch.bfloat16, torch.bfloat16),
    StateFormat.INT8: (torch.int8, torch.uint8),
}
_LOW_DTYPES = {
    StateFormat.FP32: torch.float32,
    StateFormat.SPLIT: torch.int16,
    StateFormat.BF16: torch.int16,
    StateFormat.INT8: torch.int8,
}
Chances = tuple[Tensor | None, Tensor | None]


def _pieces(count: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + _PIECE, count)) for begin in range(0, count, _PIECE)]


def _cut(
    streams: Sequence[Tensor], specs: Sequence[StreamSpec], begin: int, end: int
) -> dict[str, Tensor]:
    return {
        spec.name: spec.part(stream, begin, end)
        for spec, stream in zip(specs, streams, strict=True)
    }


def _in_halves(dtype: torch.dtype, format: StateFormat) -> bool:
    """Return whether masters are split, with ties stored as signs of second moments."""
    return dtype == torch.bfloat16 and format in {StateFormat.SPLIT, StateFormat.BF16}


def _in_bytes(dtype: torch.dtype, format: StateFormat) -> bool:
    return dtype == torch.bfloat16 and format == StateFormat.INT8


def _decode_piece(
    piece: dict[str, Tensor], weight: Tensor, format: StateFormat
) -> dict[str, Tensor]:
    m, v = piece["exp_avg"], piece["exp_avg_sq"]
    states = dict(piece)
    if format == StateFormat.INT8:
        states["exp_avg"] = dequantize_first(m, states.pop("exp_avg_scale"))
        states["exp_avg_sq"] = dequantize_second(v, states.pop("exp_avg_sq_scale"))
    elif format == StateFormat.BF16:
        states["exp_avg"], states["exp_avg_sq"] = m.float(), v.float().abs()
    if _in_halves(weight.dtype, format):
        states["master"] = join_halves(weight, piece["master"], v.signbit())
        states["exp_avg_sq"] = states["exp_avg_sq"].abs()  # the sign was the master's
    elif _in_bytes(weight.dtype, format):
        states["master"] = join_bytes(weight, piece["master"])
    return states


def _encode_piece(
    states: dict[str, Tensor], weight: Tensor, format: StateFormat, chances: Chances
) -> dict[str, Tensor]:
    encoded = dict(states)
    m, v = states["exp_avg"], states["exp_avg_sq"]
    halves, in_bytes = _in_halves(weight.dtype, format), _in_bytes(weight.dtype, format)
    if halves or not format.exact:
        v = v.abs()  # NaN may have a sign, which would be read as a master's
    if format == StateFormat.BF16:
        m, v = round_to_bf16(m, chances[0]), round_to_bf16(v, chances[1])
    elif format == StateFormat.INT8:
        m, encoded["exp_avg_scale"] = quantize_first(m, chances[0])
        v, encoded["exp_avg_sq_scale"] = quantize_second(v, chances[1])
    if halves:
        encoded["master"], rounded_up = split_halves(states["master"])
        v = torch.where(rounded_up, -v, v)
    elif in_bytes:
        encoded["master"] = split_bytes(states["master"])
    encoded["exp_avg"], encoded["exp_avg_sq"] = m, v
    return encoded


def _check(states: Mapping[str, Tensor], weight: Tensor, format: StateFormat) -> None:
    """Raise OptionError for states that the format cannot store."""
    halves, in_bytes = _in_halves(weight.dtype, format), _in_bytes(weight.dtype, format)
    if halves or not format.exact:
        _refuse_negative(states["exp_avg_sq"])
    if halves or in_bytes:
        _check_master(states["master"], weight, format)


def _refuse_negative(v: Tensor) -> None:
    if (v < 0.0).any():
        message = (
            f"A second moment of {v.min().item()} was given: it is a mean of squares and cannot be"
            " negative. Check where these states come from."
        )
        raise OptionError(message)


def _check_master(master: Tensor, weight: Tensor, format: StateFormat) -> None:
    rounded = master.bfloat16()
    same = rounded.view(torch.int16) == weight.view(torch.int16)
    wrong = ~(same | (rounded.isnan() & weight.isnan()))
    if wrong.any():
        at = int(wrong.nonzero()[0])
        message = (
            f"A master of {master[at].item()} was given for a weight of {weight[at].item()}: with"
            f" states in {format} a master rounds to its weight. Take the weight for the master."
        )
        raise OptionError(message)
