"""Runs one update or one checksum over synthetic data, to be timed."""

from collections.abc import Callable

import torch

import tensorstow._native as _native
from tensorstow.base.profile import dtype_key
from tensorstow.formats.reference import adam_scalars
from tensorstow.formats.state_format import StateFormat
from tensorstow.io.arena import Arena
from tensorstow.states.kernels import prepare_kernels
from tensorstow.states.layout import STREAMS, Family

PARAMETERS = 8 << 20
"""Parameters of a trial: their bytes exceed any cache."""
_APART = (4 << 20) + 3 * 4096
"""Gap between streams: a power of two would cost up to two thirds of the bandwidth."""
FAMILIES = (
    (torch.float32, StateFormat.FP32),
    (torch.float32, StateFormat.BF16),
    (torch.float32, StateFormat.INT8),
    (torch.bfloat16, StateFormat.FP32),
    (torch.bfloat16, StateFormat.SPLIT),
    (torch.bfloat16, StateFormat.BF16),
    (torch.bfloat16, StateFormat.INT8),
    (torch.float16, StateFormat.FP32),
)
"""Kinds of states whose update is measured."""


def checksum_trial(nbytes: int) -> Callable[[], None]:
    """Return a function that computes the checksum of ``nbytes`` bytes on one core."""
    data = torch.ones(nbytes, dtype=torch.uint8)

    def run() -> None:
        _native.checksum(data.data_ptr(), data.nbytes)

    return run


def update_trial(dtype: torch.dtype, state_format: StateFormat) -> Callable[[], None]:
    """Return a function that updates ``PARAMETERS`` parameters with the kernel, as a run does."""
    prepare_kernels()
    family = Family(dtype, amsgrad=False, format=state_format)
    kinds = [("param", dtype, 1), ("grad", dtype, 1)]
    kinds += [(spec.name, spec.dtype, spec.per) for spec in family.specs]
    widths = [PARAMETERS // per * kind.itemsize + _APART for _, kind, per in kinds]
    arena = Arena(sum(widths), in_children=True)
    at = [sum(widths[:turn]) // 64 * 64 for turn in range(len(widths))]
    streams = {
        name: arena.tensor(start, PARAMETERS // per, kind)
        for start, (name, kind, per) in zip(at, kinds, strict=True)
    }
    arena.tensor(0, arena.nbytes, torch.uint8).zero_()  # touches every page
    for name in ("param", "grad"):
        streams[name].fill_(0.01)

    def address(name: str) -> int:
        return streams[name].data_ptr() if name in streams else 0

    hyper = adam_scalars(
        lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, step=10, decoupled=True
    )

    def update() -> None:
        _native.adam_update(
            param=address("param"),
            grad=address("grad"),
            states=[address(name) for name in STREAMS],
            n=PARAMETERS,
            param_dtype=dtype_key(dtype),
            grad_dtype=dtype_key(dtype),
            format=str(state_format),
            first=0,
            key=1,
            seed_master=False,
            hyper=hyper,
            isa=None,
            on_pool=True,
        )

    return update
