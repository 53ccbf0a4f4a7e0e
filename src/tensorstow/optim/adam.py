"""Adam and AdamW whose states are stowed over RAM and disk."""

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from tensorstow.optim import options
from tensorstow.optim.options import Directory, States
from tensorstow.optim.policy import PipelinePolicy
from tensorstow.optim.stowed import StowedAdam


class AdamW(StowedAdam):
    """``torch.optim.AdamW`` with its states in RAM, on disk, or shared between the two.

    ``states``: "ram", "disk", or the fraction of the states' bytes that goes to disk.
    ``dir``: a directory for scratch files, or several to stripe over; None picks a real disk and
    logs which. ``ram_budget``: bytes ("512MiB") for the buffers that states on disk pass
    through; more of it reads further ahead. ``grad_dtype``: lets fp32 parameters have 16-bit
    gradients. The other keywords are torch's; ``foreach=True``, ``fused=False``,
    ``capturable=True`` and ``differentiable=True`` are refused by name.
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
        states: States = "ram",
        dir: Directory = None,  # noqa: A002
        ram_budget: str | int | None = None,
        grad_dtype: torch.dtype | None = None,
        policy: PipelinePolicy | None = None,
    ) -> None:
        """Make the optimizer; see the class."""
        defaults = _torch_defaults(locals(), decoupled=True)
        where = options.placement(states, dir, ram_budget)
        super().__init__(params, defaults, where, policy=policy, grad_dtype=grad_dtype)

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
        states: States = "ram",
        dir: Directory = None,  # noqa: A002
        ram_budget: str | int | None = None,
        grad_dtype: torch.dtype | None = None,
        policy: PipelinePolicy | None = None,
    ) -> None:
        """Make the optimizer; see the class."""
        defaults = _torch_defaults(locals(), decoupled=decoupled_weight_decay)
        where = options.placement(states, dir, ram_budget)
        super().__init__(params, defaults, where, policy=policy, grad_dtype=grad_dtype)


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
