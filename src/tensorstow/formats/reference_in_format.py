"""The update rule on encoded states, in plain torch: decode, update, encode."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tensorstow.formats.reference import AdamScalars, AdamState, adam_reference
from tensorstow.formats.state_format import StateFormat, decode, encode, state_names


@dataclass(frozen=True, slots=True)
class FormattedStates:
    """The states of a 1-D parameter as they are kept: the streams of ``streams_of``."""

    streams: Sequence[Tensor]
    format: StateFormat
    amsgrad: bool
    first: int = 0
    """Index in the parameter of the first element."""


def adam_reference_in_format(
    param: Tensor,
    grad: Tensor,
    kept: FormattedStates,
    scalars: AdamScalars,
    *,
    key: int = 0,
    seed_master: bool = False,
) -> None:
    """Update ``param`` and ``kept`` in place by one step, as ``adam_reference`` does.

    All on one device, any. ``key`` tells the random bits of one parameter and step from those of
    others.
    """
    in_place = kept.format == StateFormat.FP32
    if in_place:
        names = state_names(param.dtype, amsgrad=kept.amsgrad)
        states = dict(zip(names, kept.streams, strict=True))
    else:
        states = decode(kept.streams, param, kept.format, amsgrad=kept.amsgrad)
    state = AdamState(
        states["exp_avg"],
        states["exp_avg_sq"],
        master=states.get("master"),
        vmax=states.get("max_exp_avg_sq"),
    )
    adam_reference(param, grad, state, scalars, seed_master=seed_master)
    if in_place:
        return
    encode(
        states,
        param,
        kept.streams,
        kept.format,
        amsgrad=kept.amsgrad,
        key=key,
        first=kept.first,
    )
