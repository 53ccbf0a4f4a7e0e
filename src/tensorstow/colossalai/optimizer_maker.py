"""Recreates the optimizer given to ``boost`` over the placed model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tensorstow.base.errors import OptionError
from tensorstow.colossalai.adam import CPUAdam, HybridAdam, ParamsInHostMemory
from tensorstow.formats.state_format import StateFormat
from tensorstow.fsdp.optimizer_factory import groups_of, names_of, with_groups
from tensorstow.fsdp.validation import KeepsOnDevice
from tensorstow.optim.adam import Adam, AdamW
from tensorstow.optim.step_runner import ParamFilter
from tensorstow.optim.stowed_adam import StowedAdam

_OF_TORCH = (torch.optim.Adam, torch.optim.AdamW)
_OURS = (CPUAdam, HybridAdam, Adam, AdamW)


class PlacedAdam(HybridAdam):
    """HybridAdam that also takes the states of some parameters on an accelerator to the host.

    Args:
        params: Groups of named parameters.
        in_host_memory: Returns by a parameter's name whether its states are in host memory or on
            disk; those of parameters in host memory always are.
        keywords: As of ``HybridAdam``.
    """

    def __init__(
        self,
        params: Sequence[Mapping[str, Any]],
        in_host_memory: Callable[[str], bool],
        **keywords: Any,
    ) -> None:
        named = (pair for group in params for pair in group["params"])
        self._in_host_memory = {id(p) for name, p in named if in_host_memory(name)}
        super().__init__(params, **keywords)  # type: ignore[arg-type]  # groups, as torch's

    def _make_param_filter(self) -> ParamFilter:
        return ParamsInHostMemory(self._in_host_memory)


@dataclass(frozen=True, eq=False, slots=True)
class OptimizerMaker(KeepsOnDevice):
    """The optimizer factory given to ``stow``."""

    make: Callable[..., StowedAdam]
    in_host_memory: Callable[[str], bool]
    """Whether the states of a parameter, by its name, are in host memory or on disk."""

    def __call__(self, named: Any, **placement: Any) -> StowedAdam:
        """Make the optimizer over named parameters, with the keywords of the placement."""
        return self.make(named, in_host_memory=self.in_host_memory, **placement)

    def stays_on_device(self, name: str) -> bool:
        """Return whether a parameter that is on the device is updated there."""
        return not self.in_host_memory(name)


def maker_of(
    optimizer: Optimizer | None, model: nn.Module, in_host_memory: Callable[[str], bool]
) -> OptimizerMaker:
    """Return a factory that recreates an optimizer over the placed model.

    It creates a PlacedAdam with the groups, the share of states on disk and the directory of the
    given optimizer, which is closed when the new one is created. Without one the model is not
    trained, and the new optimizer has no parameters and no states. Raises OptionError for another
    class, one that has taken steps, or one whose states would change.
    """
    if optimizer is None:
        return OptimizerMaker(with_groups(PlacedAdam, [{"params": []}]), in_host_memory)
    if type(optimizer) not in {*_OF_TORCH, *_OURS}:
        message = (
            f"optimizer={type(optimizer).__name__} was given: boost() takes HybridAdam, CPUAdam,"
            " AdamW and Adam (tensorstow's or torch's). Another class trains a model that is not"
            " placed: tensorstow.StowedOptimizer."
        )
        raise OptionError(message)
    groups = names_of(model, groups_of(optimizer))
    keywords = _keywords_of(optimizer) if isinstance(optimizer, StowedAdam) else {}

    def make(placed: Any, **placement: Any) -> StowedAdam:
        if isinstance(optimizer, StowedAdam):
            optimizer.close()  # the optimizer over the placed model takes its place
        for group in optimizer.param_groups:  # frees the old parameters
            group["params"] = []
        return PlacedAdam(placed, **{**keywords, **placement})

    return OptimizerMaker(with_groups(make, groups), in_host_memory)


def disk_fraction_of(optimizer: Optimizer | None) -> float:
    """Return the share of the states that an optimizer keeps on disk, 0 to 1."""
    if not isinstance(optimizer, StowedAdam):
        return 0.0
    return optimizer.offload_policy.placement.disk_fraction


def _keywords_of(optimizer: StowedAdam) -> dict[str, Any]:
    policy = optimizer.offload_policy
    placement = policy.placement
    is_overlapped = policy.timing.is_overlapped and not policy.is_overlap_chosen
    if placement.durable or is_overlapped or policy.update_on is not None:
        message = (
            "An optimizer with dir=, overlap= or update_on= was given to boost(), which decides"
            " these itself: use tensorstow.stow(), which takes them in its plan, or leave them"
            " out."
        )
        raise OptionError(message)
    if policy.format not in {None, StateFormat.SPLIT, StateFormat.FP32}:
        message = (
            f'An optimizer with state_format="{policy.format}" was given to boost(), which keeps'
            " states exactly: leave the format out, or use tensorstow.stow()."
        )
        raise OptionError(message)
    return {
        "nvme_offload_fraction": placement.disk_fraction,
        "nvme_offload_dir": placement.directories or None,
        "ram_budget": placement.ram_budget,
        "policy": policy.policy,
    }
