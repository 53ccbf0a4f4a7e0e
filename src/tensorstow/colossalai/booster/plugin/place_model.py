"""Places a model by a plan and wraps it: the base of the plugins over ``stow``."""

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from tensorstow.base import notices
from tensorstow.base.errors import OptionError
from tensorstow.base.fields import read_value
from tensorstow.base.plan import Plan
from tensorstow.base.tiers import Tier
from tensorstow.colossalai.booster.plugin.plugin_base import Plugin
from tensorstow.colossalai.grad_scaler import DynamicGradScaler
from tensorstow.colossalai.interface import ModelWrapper, OptimizerWrapper
from tensorstow.colossalai.optimizer_maker import disk_fraction_of, maker_of
from tensorstow.fsdp.optimizer_factory import move_schedule
from tensorstow.fsdp.sharding import current_device, rank_here, world_size
from tensorstow.fsdp.stow import stow
from tensorstow.fsdp.units import Unit, units_of
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.planner.sizes import Sizes

logger = logging.getLogger("tensorstow")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How a placed model is trained.

    Args:
        precision: "fp32", "bf16" or "fp16". None: "fp16" on an accelerator, "fp32" on the CPU.
        make_scaler: Makes the loss scale of fp16. None: the loss is not scaled.
        max_norm: The 2-norm to which gradients are clipped; 0: they are not clipped.
        master_weights: Whether parameters keep their dtype, instead of being cast for good to that
            of the computation.
        outputs_fp32: Whether outputs are cast to fp32.
        verbose: Whether the report on the placement is a warning rather than information.
        casts: Whether parameters are cast to the precision; False: forward uses their dtype.

    Raises:
        OptionError: A value that cannot be used.
    """

    precision: str | None = None
    make_scaler: Callable[[], DynamicGradScaler] | None = None
    max_norm: float = 0.0
    master_weights: bool = True
    outputs_fp32: bool = False
    verbose: bool = False
    casts: bool = True

    def __post_init__(self) -> None:
        """Check the values, also those that this precision does not use; raises OptionError."""
        read_value(Literal["fp32", "bf16", "fp16"] | None, self.precision, "precision")
        if not self.max_norm >= 0.0:
            message = f"max_norm={self.max_norm} was given: it must be 0 (no clipping) or positive."
            raise OptionError(message)
        if self.make_scaler is not None:
            self.make_scaler()

    @property
    def meant(self) -> str:
        """The precision, or its default on this device."""
        if self.precision is not None:
            return self.precision
        return "fp32" if current_device().type == "cpu" else "fp16"

    def compute_dtype(self, model: nn.Module) -> torch.dtype | None:
        """Return the dtype to which forward casts a model's parameters; None: all have it."""
        dtype = DTYPES[self.meant]
        other_dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} - {dtype}
        return dtype if other_dtypes and self.casts else None

    @property
    def inputs_dtype(self) -> torch.dtype | None:
        """The dtype to which forward's inputs are cast; None: they are not cast."""
        return DTYPES[self.meant] if self.casts and self.meant != "fp32" else None

    @property
    def kept_dtype(self) -> torch.dtype | None:
        """The dtype to which parameters are cast for good; None: they keep theirs."""
        return None if self.master_weights else DTYPES[self.meant]


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """The inputs by which a plugin chooses a plan."""

    units: Sequence[Unit]
    sizes: Sizes
    states: Tier
    device_is_host: bool


Decision = tuple[Plan, Collection[str]]
"""The plan, and the names of parameters whose states are in host memory on any tier."""
Wrappers = tuple[type[ModelWrapper], type[OptimizerWrapper]]
"""The classes of the returned model and optimizer."""


class PlacingPlugin(Plugin):
    """A plugin that places models by ``stow``; a subclass decides the plan."""

    _training: TrainingOptions
    _replicas = 1
    """Groups of ranks that each hold a full copy."""
    _init: Callable[[nn.Module], None] | None = None
    """As of ``stow``."""
    _wrappers: Wrappers = (ModelWrapper, OptimizerWrapper)

    @abstractmethod
    def _decide(self, asked: PlacementRequest) -> Decision:
        """Return the plan of a model."""

    def _place(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any
    ) -> tuple[nn.Module, Optimizer | None]:
        refuse_boosted(model)
        began, training = time.perf_counter(), self._training
        with _cast(model, training.kept_dtype):
            dtype = training.compute_dtype(model)
            units = units_of(model)
            sizes = Sizes.of(units, max(world_size() // self._replicas, 1))
            states = Tier.DISK if disk_fraction_of(optimizer) > 0 else Tier.HOST
            on_cpu = current_device().type == "cpu"
            plan, below = self._decide(PlacementRequest(units, sizes, states, on_cpu))
            make = maker_of(optimizer, model, frozenset(below).__contains__)
            placed, placed_optimizer = stow(
                model, make, plan=plan, compute_dtype=dtype, init=self._init
            )
        seconds = time.perf_counter() - began
        _report(plan, sizes, placed_optimizer, seconds, verbose=training.verbose)
        of_model, of_optimizer = self._wrappers
        wrapped = of_model(
            placed, outputs_fp32=training.outputs_fp32, inputs_dtype=training.inputs_dtype
        )
        if optimizer is None:
            return wrapped, None
        scaler = None
        if training.meant == "fp16" and training.make_scaler is not None:
            scaler = training.make_scaler()
        wrapper = of_optimizer(placed_optimizer, max_norm=training.max_norm, scaler=scaler)
        if lr_scheduler is not None:
            move_schedule(lr_scheduler, wrapper)
        return wrapped, wrapper


@contextmanager
def _cast(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Cast the parameters; undo it if the block fails. None: leave them."""
    parameters = (p for p in model.parameters() if p.is_floating_point() and p.dtype != dtype)
    before = [] if dtype is None else [(p, p.data) for p in parameters]
    for parameter, values in before:
        parameter.data = values.to(dtype)
    try:
        yield
    except BaseException:
        for parameter, values in before:
            parameter.data = values
        raise


def _report(
    plan: Plan, sizes: Sizes, optimizer: StowedAdam, seconds: float, *, verbose: bool
) -> None:
    """Log the bytes of each tier, as upstream does for its chunks."""
    used = sizes.whole_bytes
    wasted = sizes.share_bytes * sizes.ranks - used if sizes.ranks > 1 else 0
    below = sum(u.share_bytes for u in sizes.units if plan.tier_of(u.name) == Tier.HOST)
    memory = optimizer._memory()  # noqa: SLF001  # usage() without its copies
    line = (
        f"placing {len(sizes.units)} units is completed in {seconds:.2f} s: used"
        f" {used / 2**20:.2f} MiB, wasted {wasted / 2**20:.2f} MiB"
        f" ({100 * wasted / max(used + wasted, 1):.2f}%), {below / 2**20:.2f} MiB of this rank's"
        f" parameters in host memory, {memory.ram_bytes / 2**20:.2f} MiB of its states there,"
        f" {memory.disk_bytes / 2**20:.2f} MiB on disk"
    )
    logger.log(logging.WARNING if verbose else logging.INFO, line)
    if rank_here() == 0 and not verbose:
        notices.show(line)


def refuse_boosted(model: nn.Module) -> None:
    """Raise OptionError for a model that ``boost`` returned."""
    if isinstance(model, ModelWrapper):
        message = "boost() was given a model that boost() returned: boost a model once."
        raise OptionError(message)
