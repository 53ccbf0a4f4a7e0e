"""Arrays to update, laid out as they should be, and the calls that update them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tensorstow import _native
from tensorstow.formats.reference import adam_scalars
from tensorstow.io.arena import Arena

LR, BETA1, BETA2, EPS, DECAY, STEP = 1e-3, 0.9, 0.999, 1e-8, 0.01, 10
# Streams a power of two apart lose up to two thirds of the bandwidth: this is between them.
_STAGGER = (4 << 20) + 3 * 4096
_HYPER = adam_scalars(
    lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, step=STEP, decoupled=True
)


@dataclass(frozen=True, slots=True)
class AdamTensors:
    """One flat parameter with everything that its update touches."""

    param: torch.Tensor
    grad: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    master: torch.Tensor | None = None

    @property
    def nbytes_moved(self) -> int:
        """Return the bytes that one pass reads and writes."""
        state = 4 * self.m.numel()
        # m, v and the fp32 truth are read and written; the gradient read; a 16-bit weight written.
        once = self.grad.nbytes + (0 if self.master is None else self.param.nbytes)
        return 6 * state + once


def staggered(dtypes: Sequence[torch.dtype], count: int) -> list[torch.Tensor]:
    """Return tensors of ``count`` elements from one arena, in huge pages where there are any."""
    widths = [dtype.itemsize * count + _STAGGER for dtype in dtypes]
    arena = Arena(sum(widths), in_children=True)
    starts = [sum(widths[:i]) // 64 * 64 for i in range(len(widths))]
    return [arena.tensor(at, count, dtype) for at, dtype in zip(starts, dtypes, strict=True)]


def in_arena(count: int) -> AdamTensors:
    """Return fp32 arrays in an arena of ours."""
    return _filled(AdamTensors(*staggered([torch.float32] * 4, count)))


def from_torch(count: int) -> AdamTensors:
    """Return fp32 arrays as torch's allocator gives them."""
    return _filled(AdamTensors(*(torch.empty(count) for _ in range(4))))


def mixed_in_arena(count: int) -> AdamTensors:
    """Return a bf16 weight and gradient with fp32 states and master, in an arena of ours."""
    halves, wholes = [torch.bfloat16] * 2, [torch.float32] * 3
    return _filled(AdamTensors(*staggered([*halves, *wholes], count)))


def ours(t: AdamTensors) -> Callable[[], None]:
    """Return our one-pass update of ``t``."""
    master = 0 if t.master is None else t.master.data_ptr()

    def update() -> None:
        _native.adam_update(
            param=t.param.data_ptr(),
            grad=t.grad.data_ptr(),
            states=[t.m.data_ptr(), t.v.data_ptr(), 0, master, 0, 0, 0],
            n=t.m.numel(),
            param_dtype=str(t.param.dtype).removeprefix("torch."),
            grad_dtype=str(t.grad.dtype).removeprefix("torch."),
            format="fp32",
            first=0,
            key=0,
            seed_master=False,
            hyper=_HYPER,
            isa=None,
            on_pool=True,
        )

    return update


def torch_fused(
    param: torch.Tensor, grad: torch.Tensor, m: torch.Tensor, v: torch.Tensor
) -> Callable[[], None]:
    """Return torch's fused AdamW of the same arrays."""
    step = torch.tensor(float(STEP))

    def update() -> None:
        torch._fused_adamw_(  # what torch.optim.AdamW(fused=True) calls
            [param],
            [grad],
            [m],
            [v],
            [],
            [step],
            lr=LR,
            beta1=BETA1,
            beta2=BETA2,
            weight_decay=DECAY,
            eps=EPS,
            amsgrad=False,
            maximize=False,
        )

    return update


def _filled(t: AdamTensors) -> AdamTensors:
    """Touch every page, with values that neither overflow nor become denormal."""
    generator = torch.Generator().manual_seed(0)
    for tensor in (t.param, t.grad):
        tensor.uniform_(0.01, 0.02, generator=generator)
    if t.master is not None:
        t.master.copy_(t.param)
    t.m.zero_()
    t.v.zero_()
    return t
