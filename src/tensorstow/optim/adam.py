"""Adam and AdamW whose states are stowed over RAM and disk."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from tensorstow.base.update_on import UpdateOn
from tensorstow.checkpoint.run import DEFAULT_EVERY, Extra
from tensorstow.optim import options
from tensorstow.optim.options import Directory, Durability, States
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.states.policy import Overlap, PipelinePolicy


class AdamW(StowedAdam):
    """``torch.optim.AdamW`` with its states in RAM, on disk, or shared between the two.

    ``states``: "host" (or "ram"), "disk", or the fraction of the states' bytes that goes to disk.
    ``dir``: the directory of a run, or several to stripe over, whose commits outlive the process;
    with ``durability="none"``, of scratch files; None picks a real disk for scratch and logs which.
    ``ram_budget``: bytes ("512MiB") for the buffers that states on disk pass through (48 MiB) and,
    beyond those, for states that never move. ``state_format``: "fp32"; "split", which loses nothing
    and is the default for bfloat16 parameters that move; "bf16" and "int8", which are inexact.
    ``update_on``: "host", the default; "device", where states stream through the accelerator that
    has the parameters and are updated there, which few cores and a fast link want; "hybrid", both
    at once, by the share that lets both end together (or a number: the device's share); "auto", the
    faster of "host" and "device". "hybrid" and "auto" measure the first steps. Same bits in all of
    them; None goes on as a resumed run did.
    ``overlap``: "none"; "forward", updates run beside the next forward of ``module``; "backward",
    beside the backward that makes the gradients (no clipping, no GradScaler; with
    ``accumulation_steps`` passes per step). ``commit_every``: a time ("10min"), a number of steps,
    or None for ``commit()`` by hand; ``extra`` returns what the caller keeps with each commit, and
    ``module`` gives names and buffers. ``grad_dtype``: lets fp32 parameters have 16-bit gradients.
    The other keywords are torch's; ``foreach=True``, ``capturable=True`` and
    ``differentiable=True`` are refused by name, ``fused`` changes nothing.
    """

    def __init__(  # noqa: PLR0913  # torch's own signature, then ours
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,  # noqa: FBT001, FBT002
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        states: States = "host",
        dir: Directory = None,  # noqa: A002
        ram_budget: str | int | None = None,
        state_format: str | None = None,
        update_on: UpdateOn | None = None,
        overlap: Overlap = "none",
        module: torch.nn.Module | None = None,
        accumulation_steps: int = 1,
        durability: Durability = None,
        commit_every: str | int | None = DEFAULT_EVERY,
        extra: Callable[[], Extra] | None = None,
        grad_dtype: torch.dtype | None = None,
        policy: PipelinePolicy | None = None,
    ) -> None:
        """Make the optimizer; see the class."""
        given = locals()
        super().__init__(
            params,
            _torch_defaults(given, decoupled=True),
            options.stowage(given),
            run=options.run(given),
            grad_dtype=grad_dtype,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Stay AdamW whatever is loaded, as torch's does: an Adam's groups say otherwise."""
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True


class Adam(StowedAdam):
    """``torch.optim.Adam`` with its states in RAM, on disk, or shared; see AdamW.

    ``decoupled_weight_decay=True`` makes it AdamW, as in torch.
    """

    def __init__(  # noqa: PLR0913  # torch's own signature, then ours
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,  # noqa: FBT001, FBT002
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        states: States = "host",
        dir: Directory = None,  # noqa: A002
        ram_budget: str | int | None = None,
        state_format: str | None = None,
        update_on: UpdateOn | None = None,
        overlap: Overlap = "none",
        module: torch.nn.Module | None = None,
        accumulation_steps: int = 1,
        durability: Durability = None,
        commit_every: str | int | None = DEFAULT_EVERY,
        extra: Callable[[], Extra] | None = None,
        grad_dtype: torch.dtype | None = None,
        policy: PipelinePolicy | None = None,
    ) -> None:
        """Make the optimizer; see the class."""
        given = locals()
        super().__init__(
            params,
            _torch_defaults(given, decoupled=decoupled_weight_decay),
            options.stowage(given),
            run=options.run(given),
            grad_dtype=grad_dtype,
        )


_TORCH_KEYS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "amsgrad",
    "maximize",
    "foreach",
    "capturable",
    "differentiable",
    "fused",
)


def _torch_defaults(given: dict[str, Any], *, decoupled: bool) -> dict[str, Any]:
    """Return the group defaults with exactly the keys that torch's classes keep in theirs."""
    return {**{k: given[k] for k in _TORCH_KEYS}, "decoupled_weight_decay": decoupled}
