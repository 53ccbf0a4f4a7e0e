"""Places a model by a plan and wraps it; shared by the plugins over ``stow``."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tensorstow.base.errors import OptionError, StowError
from tensorstow.base.plan import Plan
from tensorstow.base.tiers import Tier
from tensorstow.colossalai.grad_scaler import DynamicGradScaler
from tensorstow.colossalai.interface import ModelWrapper, OptimizerWrapper
from tensorstow.colossalai.optimizer_maker import disk_fraction_of, maker_of
from tensorstow.fsdp.optimizer_factory import move_schedule
from tensorstow.fsdp.sharding import current_device, world_size
from tensorstow.fsdp.stow import stow
from tensorstow.fsdp.units import Unit, units_of
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.planner.sizes import Sizes

logger = logging.getLogger("tensorstow")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How a placed model is trained.

    Args:
        precision: "fp32", "bf16" or "fp16". None: "fp16" on an accelerator, "fp32" on the CPU.
        make_scaler: Makes the loss scale of fp16. None: the loss is not scaled.
        max_norm: The 2-norm that gradients are clipped to; 0: not at all.
        master_weights: Whether parameters keep their dtype, rather than being cast for good to the
            one that is computed in.
        outputs_fp32: Whether outputs are cast to fp32.
        verbose: Whether the report on the placement is a warning rather than information.
        casts: Whether parameters are cast to the precision; False: they are computed with as they
            are.

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
        """Check the values, those that only another precision uses too; raises OptionError."""
        if self.precision is not None and self.precision not in DTYPES:
            known = ", ".join(f'"{name}"' for name in DTYPES)
            message = f"precision={self.precision!r} was given: it is one of {known}."
            raise OptionError(message)
        if not self.max_norm >= 0.0:
            message = f"max_norm={self.max_norm} was given: it is 0 (no clipping) or positive."
            raise OptionError(message)
        if self.make_scaler is not None:
            self.make_scaler()

    @property
    def meant(self) -> str:
        """The precision that is meant."""
        if self.precision is not None:
            return self.precision
        return "fp32" if current_device().type == "cpu" else "fp16"

    def compute_dtype(self, model: nn.Module) -> torch.dtype | None:
        """Return what a model's parameters are cast to in forward and backward.

        Args:
            model: The model.

        Returns:
            The dtype; None: every parameter is of it.
        """
        dtype = DTYPES[self.meant]
        others = {p.dtype for p in model.parameters() if p.is_floating_point()} - {dtype}
        return dtype if others and self.casts else None

    @property
    def inputs_dtype(self) -> torch.dtype | None:
        """What goes into forward is cast to; None: it is not."""
        return DTYPES[self.meant] if self.casts and self.meant != "fp32" else None

    @property
    def kept_dtype(self) -> torch.dtype | None:
        """What parameters are cast to for good; None: they keep their dtype."""
        return None if self.master_weights else DTYPES[self.meant]


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """The inputs by which a plugin chooses a plan."""

    units: Sequence[Unit]
    sizes: Sizes
    states_on_disk: bool
    device_is_host: bool


Decision = tuple[Plan, Collection[str]]
"""The plan, and the parameters whose states are in host memory wherever they are, by name."""
Wrappers = tuple[type[ModelWrapper], type[OptimizerWrapper]]
"""The classes of the model and of the optimizer that are returned."""


def place(
    model: nn.Module,
    optimizer: Optimizer | None,
    lr_scheduler: Any,  # noqa: ANN401  # torch's, or any object with an optimizer
    decide: Callable[[PlacementRequest], Decision],
    training: TrainingOptions,
    *,
    replicas: int = 1,
    init: Callable[[nn.Module], None] | None = None,
    wrappers: Wrappers = (ModelWrapper, OptimizerWrapper),
) -> tuple[ModelWrapper, OptimizerWrapper | None]:
    """Place a model by ``stow``, and hand a scheduler over.

    Args:
        model: The model.
        optimizer: As of ``Booster.boost``.
        lr_scheduler: As of ``Booster.boost``.
        decide: Returns the plan.
        training: How it is trained.
        replicas: Groups of ranks that each hold a full copy.
        init: As of ``stow``.
        wrappers: The classes of what is returned.

    Returns:
        The model and its optimizer; None where none was given.

    Raises:
        OptionError: Something cannot be honoured; the model was not changed.
    """
    refuse_boosted(model)
    began = time.perf_counter()
    with _cast(model, training.kept_dtype):
        dtype = training.compute_dtype(model)
        units = units_of(model)
        sizes = Sizes.of(units, max(world_size() // replicas, 1))
        on_disk, on_cpu = disk_fraction_of(optimizer) > 0, current_device().type == "cpu"
        plan, below = decide(PlacementRequest(units, sizes, on_disk, on_cpu))
        make = maker_of(optimizer, model, frozenset(below).__contains__)
        placed, made = stow(model, make, plan=plan, compute_dtype=dtype, init=init)
    _report(plan, sizes, made, time.perf_counter() - began, verbose=training.verbose)
    of_model, of_optimizer = wrappers
    wrapped = of_model(
        placed, outputs_fp32=training.outputs_fp32, inputs_dtype=training.inputs_dtype
    )
    if optimizer is None:
        return wrapped, None
    scaler = None
    if training.meant == "fp16" and training.make_scaler is not None:
        scaler = training.make_scaler()
    wrapper = of_optimizer(made, max_norm=training.max_norm, scaler=scaler)
    if lr_scheduler is not None:
        move_schedule(lr_scheduler, wrapper)
    return wrapped, wrapper


@contextmanager
def _cast(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Cast the parameters, to what they were again where the block fails; None: leave them."""
    others = (p for p in model.parameters() if p.is_floating_point() and p.dtype != dtype)
    before = [] if dtype is None else [(p, p.data) for p in others]
    for parameter, values in before:
        parameter.data = values.to(dtype)
    try:
        yield
    except BaseException:
        for parameter, values in before:
            parameter.data = values
        raise


def _report(plan: Plan, sizes: Sizes, made: StowedAdam, seconds: float, *, verbose: bool) -> None:
    """Log what upstream logs of its chunks: what is there of what was placed."""
    used = sizes.whole_bytes
    wasted = sizes.share_bytes * sizes.ranks - used if sizes.ranks > 1 else 0
    below = sum(u.share_bytes for u in sizes.units if plan.tier_of(u.name) == Tier.HOST)
    memory = made.memory()
    logger.log(
        logging.WARNING if verbose else logging.INFO,
        "placing %d units is completed in %.2f s: used %.2f MiB, wasted %.2f MiB (%.2f%%),"
        " %.2f MiB of this rank's parameters in host memory, %.2f MiB of its states there, %.2f"
        " MiB on disk",
        len(sizes.units),
        seconds,
        used / 2**20,
        wasted / 2**20,
        100 * wasted / max(used + wasted, 1),
        below / 2**20,
        memory.ram_bytes / 2**20,
        memory.disk_bytes / 2**20,
    )


def refuse_boosted(model: nn.Module) -> None:
    """Refuse a model that ``boost`` returned.

    Args:
        model: The model.

    Raises:
        OptionError: It was placed before.
    """
    if isinstance(model, ModelWrapper):
        message = "boost() was given a model that it has returned: boost a model once."
        raise OptionError(message)


def check_copies(extra_dp_size: int) -> None:
    """Check how many groups of ranks hold a full copy each.

    Args:
        extra_dp_size: The number.

    Raises:
        OptionError: It is none.
    """
    if isinstance(extra_dp_size, bool) or extra_dp_size < 1:
        message = (
            f"extra_dp_size={extra_dp_size!r} was given: it is how many groups of ranks hold a full"
            " copy each, at least 1. Over all ranks there is one."
        )
        raise OptionError(message)


def refuse_values(
    plugin: str, refused: Mapping[str, tuple[object, str]], /, **given: object
) -> None:
    """Refuse arguments that have to be as they are by default.

    Args:
        plugin: The plugin's name.
        refused: The default of each, and why it has to be.
        given: The value of each.

    Raises:
        OptionError: One is another.
    """
    for name, default, why in _not_default(refused, given):
        message = (
            f"{name}={given[name]!r} was given to {plugin}: {why}. Leave it out ({default!r})."
        )
        raise OptionError(message)


def tell_idle(plugin: str, idle: Mapping[str, tuple[object, str]], /, **given: object) -> None:
    """Log which of the arguments that were given change nothing, and why.

    Args:
        plugin: The plugin's name.
        idle: The default of each, and why other values change nothing.
        given: The value of each.
    """
    for name, _, why in _not_default(idle, given):
        logger.warning("%s: %s=%r changes nothing: %s", plugin, name, given[name], why)


def _not_default(
    known: Mapping[str, tuple[object, str]], given: Mapping[str, object]
) -> Iterator[tuple[str, object, str]]:
    """Yield name, default and reason of each value that is not the default."""
    if known.keys() != given.keys():
        names = ", ".join(sorted(known.keys() ^ given.keys()))
        message = f"Arguments were checked by a table of others: {names}."
        raise StowError(message)
    for name, (default, why) in known.items():
        if given[name] is not default and given[name] != default:
            yield name, default, why
