"""``stow``: places a model and its optimizer on DEVICE, HOST and DISK."""

import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tensorstow.base.budget import Budget
from tensorstow.base.directories import Paths, read_paths
from tensorstow.base.errors import OptionError
from tensorstow.base.keywords import keyword_only, names_keywords
from tensorstow.base.plan import Plan
from tensorstow.base.tiers import Tier
from tensorstow.fsdp.automatic import choose_plan, plan_request
from tensorstow.fsdp.first_steps import FirstSteps, HostRoom, buffers_of
from tensorstow.fsdp.initialization import InitialValues
from tensorstow.fsdp.model_memory import ModelMemory
from tensorstow.fsdp.placed_activations import PlacedActivations
from tensorstow.fsdp.placements import StowRequest, choose_placement, with_overlap
from tensorstow.fsdp.read_only import stow_read_only
from tensorstow.fsdp.read_sources import ReadOptions
from tensorstow.fsdp.report import ParameterPart
from tensorstow.fsdp.sharding import current_device, on_every_rank
from tensorstow.fsdp.traced_model import ExampleBatch
from tensorstow.fsdp.units import found_in, units_of
from tensorstow.fsdp.validation import (
    WITH_PLAN,
    WITHOUT_OPTIMIZER,
    OptimizerFactory,
    refuse_given,
    validate_arguments,
    with_options,
)
from tensorstow.fsdp.vertical_order import VerticalOrder
from tensorstow.io.allocator import cache_large_blocks, empty_cache
from tensorstow.optim.generic.stowed_optimizer import StowedOptimizer
from tensorstow.optim.placed import PlacedOptimizer, PlacedOptimizerT
from tensorstow.planner.placement import Conditions, Item, items_of
from tensorstow.planner.sizes import Sizes
from tensorstow.report.run_record import PredictedStep

Path = str | os.PathLike[str] | None
_PLANS: "weakref.WeakKeyDictionary[nn.Module, Plan]" = weakref.WeakKeyDictionary()


@names_keywords
def plan_of(model: nn.Module) -> Plan:
    """Return the plan that a model was placed by.

    Args:
        model: A model that ``stow`` has returned.

    Returns:
        The plan that was given, or that ``plan="auto"`` chose; with "forward" where its
        ``overlap="auto"`` meant that.

    Raises:
        OptionError: ``stow`` has not placed this model.
    """
    plan = found_in(_PLANS, model)
    if plan is None:
        devices = " and ".join(sorted({str(p.device) for p in model.parameters()})) or "no device"
        message = (
            "plan_of() was called for a model that stow() did not place: it has no plan, and its"
            f" parameters are where torch has them, on {devices}."
        )
        raise OptionError(message)
    return plan


@overload
def stow(
    model: nn.Module,
    optimizer: Callable[..., PlacedOptimizerT],
    *,
    plan: Plan | Literal["auto"] = "auto",
    budget: Budget | None = None,
    compute_dtype: torch.dtype | None = None,
    dir: Paths | None = None,
    mesh: DeviceMesh | None = None,
    units: Sequence[nn.Module] | None = None,
    weights: Path = None,
    init: Callable[[nn.Module], None] | None = None,
    tokens: int | None = None,
    batch: object = None,
    **optimizer_options: Any,  # noqa: ANN401  # of any class
) -> tuple[nn.Module, PlacedOptimizerT]: ...


@overload
def stow(
    model: nn.Module,
    optimizer: None,
    *,
    plan: Plan | Literal["auto"] = "auto",
    budget: Budget | None = None,
    compute_dtype: torch.dtype | None = None,
    units: Sequence[nn.Module] | None = None,
    weights: Path = None,
    init: Callable[[nn.Module], None] | None = None,
) -> tuple[nn.Module, None]: ...


def stow(  # noqa: PLR0913  # the one function for everything
    model: nn.Module,
    optimizer: OptimizerFactory | None,
    *,
    plan: Plan | Literal["auto"] = "auto",
    budget: Budget | None = None,
    compute_dtype: torch.dtype | None = None,
    dir: Paths | None = None,  # noqa: A002
    mesh: DeviceMesh | None = None,
    units: Sequence[nn.Module] | None = None,
    weights: Path = None,
    init: Callable[[nn.Module], None] | None = None,
    tokens: int | None = None,
    batch: object = None,
    **optimizer_options: Any,
) -> tuple[nn.Module, PlacedOptimizer | None]:
    """Place a model and the states of its optimizer on device, host and disk.

    ``model, optimizer = stow(model, tensorstow.AdamW, lr=1e-4)``: keywords that are not listed here
    go to the optimizer. The model is changed in place; every rank starts with the values of rank 0.

    Without an optimizer the model is only read: ``stow(model, None, weights=folder)``. Its weights
    on disk stay in their files, from which they are read ahead of use in each forward; they have
    no gradients and cannot be changed. ``plan="auto"`` then keeps as many units in memory as the
    budget has room for. Each rank has a model of its own.

    Args:
        model: The model. It may be on the meta device.
        optimizer: ``tensorstow.AdamW`` or ``Adam``, or ``partial(tensorstow.StowedOptimizer,
            torch.optim.SGD)`` (by a ``Plan``, with parameters in the memory that computes), or a
            function that makes parameter groups. It is called with the named parameters,
            ``optimizer_options``, and the keywords that place the states (``states``, ``overlap``,
            ``module``, ``dir``, ...; ``StowedOptimizer``: ``states``, ``dir``, ``ram_budget``), and
            returns an optimizer of tensorstow. None: the model is only read.
        plan: A ``Plan``. Default: "auto", the fastest placement that fits ``budget``, by the rates
            that ``tensorstow calibrate`` measured; without rates the first that fits. What it is
            and why is logged (INFO), and ``tensorstow.plan_of(model)`` returns it.
        budget: The bytes per rank and tier for ``plan="auto"``. Default: None, parts of what this
            machine has free: half of the memory that computes, 0.8 of the rest and of the disk.
        compute_dtype: The dtype of forward and backward; master weights keep the parameters' dtype.
            Default: None, the parameters' dtype.
        dir: The directory of what is on disk, and of commits; several for several drives: each has
            a part of all weights, states and activations, by the rates that ``tensorstow
            calibrate`` measured, or equal parts. Default: None, scratch files.
        mesh: The ranks: a mesh of dimensions (shard,) or (replicate, shard). Default: None, all
            ranks; a model on one rank that needs no casts and no transfers is not sharded.
        units: The modules whose parameters are unsharded together. Default: None, the model's
            repeated blocks.
        weights: Safetensors to load: a file or a directory. Default: None, the model's own values.
            Files with a list of digests, as ``save_safetensors`` writes one, are verified first,
            which reads them once more; each rank of a machine reads some. Files without a list load
            without a check for damage, which is logged once.
        init: Sets the first values of one module of a model on the meta device. Default: None, the
            module's ``reset_parameters``.
        tokens: For ``plan="auto"``, the tokens of a micro-batch of one rank (samples, if the model
            has no tokens): they set the time of computing. Default: None, those of
            ``batch``, or 2048.
        batch: For ``plan="auto"``, the arguments of forward for a micro-batch of one rank: a
            tuple, a dict of keywords, or one argument; the values do not count. Activations are
            counted then (forward and backward are traced without memory, which takes a second or
            more for each place that they may be in), and placed if they do not fit. Default:
            None, they have the half of the memory that the budget leaves.
        optimizer_options: Options of the optimizer, such as ``lr``.

    Returns:
        The model and its optimizer, or None.

    Raises:
        OptionError: Arguments that cannot be used; nothing was changed.
        KeywordError: An option that neither ``stow`` nor the optimizer has; nothing was changed.
        BudgetError: No placement fits the budget; nothing was changed.
        StoreFormatError: The files at ``weights`` are not the model's; nothing was changed.
        DamageError: A file at ``weights`` is not what was written; nothing was changed.
    """
    types = {"plan": plan, "compute_dtype": compute_dtype, "mesh": mesh, "budget": budget}
    validate_arguments(model, optimizer, **types, tokens=tokens, init=init)
    # Units are gathered and freed in turn ([Note: Large blocks] in io.allocator).
    cache_large_blocks()
    empty_cache()  # budgets are of what is free
    directories, device = read_paths(dir, "dir"), current_device()
    make = with_options(optimizer, optimizer_options, keyword_only(stow))
    if make is None:
        refuse_given(WITHOUT_OPTIMIZER, dir=dir, mesh=mesh, tokens=tokens, batch=batch)
        values = InitialValues(model, weights, init)
        fixed = None if plan == "auto" else plan
        options = ReadOptions(fixed, budget, compute_dtype, units, device)
        _PLANS[model] = stow_read_only(model, values, options)
        return model, None
    parts, step = units_of(model, units), None
    values = InitialValues(model, weights, init)
    if plan == "auto":
        undecided = plan_request(parts, device, mesh, make, directories, values)
        example = ExampleBatch(model, parts, batch, compute_dtype, tokens)
        chosen, step = choose_plan(undecided, example, budget, device, directories)
    else:
        refuse_given(WITH_PLAN, budget=budget, tokens=tokens, batch=batch)
        chosen = with_overlap(plan, make)
    request = StowRequest(model, parts, chosen, compute_dtype, device, values, make, dir)
    place, ranks = choose_placement(request, mesh)
    # Placing takes the parameters out of their units.
    sizes = Sizes.of(parts, ranks, values.coded_bytes(parts, ranks))
    placed = place()
    report = _register_reports(request, placed, sizes, step)
    _place_activations(request, placed)
    empty_cache()  # of what loading took
    if plan == "auto":  # a budget of the user's stays as it is
        room = HostRoom(buffers_of(parts)) if budget is None else None
        first = FirstSteps(lambda made: report().compared(made._memory()), step, room)  # noqa: SLF001
        first.watch(model, placed)
    if chosen.micro_batches > 1:  # outside of recomputation: that is for each micro-batch
        VerticalOrder(model, parts, chosen.micro_batches, device).register()
    _PLANS[model] = chosen
    return model, placed


def _register_reports(
    request: StowRequest, optimizer: PlacedOptimizer, sizes: Sizes, step: PredictedStep | None
) -> Callable[[], ParameterPart]:
    """Let the optimizer report and release the model's memory too.

    Return a factory of the part of reports that has the parameters, and the predictions.
    """
    policy, plan = optimizer.offload_policy, request.plan
    conditions = Conditions(
        request.device.type == "cpu",
        commits=policy.placement.durable,
        state_format=policy.format,
        averages=any(group.get("ema") is not None for group in optimizer.param_groups),
    )

    def predict() -> Sequence[Item]:
        # Optimizers with another share of states on disk (HybridAdam) do not follow the plan.
        follows = policy.placement.disk_fraction == float(plan.states == Tier.DISK)
        follows = follows and not isinstance(optimizer, StowedOptimizer)  # its states differ
        return items_of(plan, sizes, conditions) if follows else []

    model = weakref.ref(request.model)
    part = partial(ParameterPart, model, request.links, predict, step)
    optimizer._recorded_parts.append(part)  # noqa: SLF001  # a hook of the engine
    optimizer._register_released_part(ModelMemory(model))  # noqa: SLF001  # the same
    return part


def _place_activations(request: StowRequest, optimizer: PlacedOptimizer) -> None:
    """Place what forward saves for backward as the plan says, until the optimizer is closed."""
    if request.plan.keeps_activations:
        return

    def place() -> PlacedActivations:
        return PlacedActivations(request.model, request.units, request.plan, request.directory)

    try:
        placed = on_every_rank(place, "place activations")
    except BaseException:
        # stow() raises, so nobody else has the optimizer to close it.
        optimizer.close()
        raise
    optimizer._register_close_hook(placed.close)  # noqa: SLF001  # a hook of the engine
    optimizer._recorded_parts.append(lambda: placed)  # noqa: SLF001  # a hook of the engine
