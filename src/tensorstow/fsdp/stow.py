"""``stow``: places a model and its optimizer on DEVICE, HOST and DISK."""

import os
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from tensorstow.base.activation_placement import ActivationPlacement
from tensorstow.base.allocator import give_back_large_blocks
from tensorstow.base.budget import Budget
from tensorstow.base.directories import choose_directory, make_directories
from tensorstow.base.errors import BudgetError, OptionError
from tensorstow.base.keywords import names_keywords
from tensorstow.base.plan import Plan
from tensorstow.base.sizes import format_bytes, format_count, round_up
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import is_update_on, reaches_device
from tensorstow.formats.state_format import StateFormat
from tensorstow.fsdp.automatic import choose_plan
from tensorstow.fsdp.first_steps import ChosenPlan, FirstSteps, HostRoom, buffers_of
from tensorstow.fsdp.fp32_sums import accumulate_in_fp32, widen_gradient
from tensorstow.fsdp.frozen_files import FrozenFiles
from tensorstow.fsdp.gradient_offload import GradientOffload
from tensorstow.fsdp.h2d_prefetch import H2DPrefetcher
from tensorstow.fsdp.initialization import InitialValues
from tensorstow.fsdp.module_hooks import guard_modules, watch_backwards
from tensorstow.fsdp.placed_activations import PlacedActivations, validate_activations
from tensorstow.fsdp.read_only import stow_read_only
from tensorstow.fsdp.read_sources import ReadOptions
from tensorstow.fsdp.report import ParameterPart
from tensorstow.fsdp.shard_storage import FrozenLayout, Prefetcher, ShardStorage
from tensorstow.fsdp.sharding import (
    DiskPool,
    Sharding,
    current_device,
    host_group,
    make_mesh,
    move_buffers,
    on_every_rank,
    shard_unit,
    world_size,
)
from tensorstow.fsdp.shared_weights import SharedWeights
from tensorstow.fsdp.state_dicts import register_state_dict_hooks
from tensorstow.fsdp.traced_model import ExampleBatch
from tensorstow.fsdp.units import ROOT, Unit, aliases_of, found_in, units_of
from tensorstow.fsdp.unshard import MicroBatches, UnshardHooks, reduce_with_last
from tensorstow.fsdp.validation import (
    OptimizerFactory,
    accepts,
    describe_units,
    given_keywords,
    refuse_with_plan,
    stays_on_device,
    takes_scalars,
    validate_arguments,
    validate_class,
    validate_device,
    validate_factory,
    validate_mesh,
    validate_no_hooks_of,
    validate_optimizer,
    validate_parameters,
    validate_same_on_ranks,
    validate_units,
    validate_unused,
)
from tensorstow.fsdp.vertical_order import VerticalOrder
from tensorstow.io.device_link import DeviceLink, is_away, open_link
from tensorstow.io.files import ALIGN
from tensorstow.memory.buffer_pool import BufferPool
from tensorstow.optim.generic.stowed_optimizer import StowedOptimizer
from tensorstow.optim.one_optimizer import note_placed
from tensorstow.optim.placed import PlacedOptimizer, PlacedOptimizerT
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.planner.bounds import MIN_UNITS_IN_MEMORY
from tensorstow.planner.placement import Conditions, Item, items_of
from tensorstow.planner.search import PlanRequest
from tensorstow.planner.sizes import (
    Sizes,
    UnitSizes,
    bytes_around,
    least_in_memory,
    most_in_memory,
)

Path = str | os.PathLike[str] | None
_STATE_TIERS = ("host", "ram", "disk")


@dataclass(frozen=True, eq=False, slots=True)
class _Request:
    """The checked arguments of ``stow``."""

    model: nn.Module
    units: Sequence[Unit]
    plan: Plan
    compute_dtype: torch.dtype | None
    device: torch.device
    values: InitialValues
    optimizer: OptimizerFactory
    directory: Path
    links: list[DeviceLink] = field(default_factory=list)
    """Every link that weights and gradients go over."""

    def open_link(self) -> DeviceLink:
        """Return a new link to the device, and remember it."""
        self.links.append(open_link(self.device))
        return self.links[-1]


_PLANS: "weakref.WeakKeyDictionary[nn.Module, Plan]" = weakref.WeakKeyDictionary()


@names_keywords
def plan_of(model: nn.Module) -> Plan:
    """Return the plan that a model was placed by.

    Args:
        model: A model that ``stow`` has returned.

    Returns:
        The plan that was given, or that ``plan="auto"`` chose.

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
    dir: Path = None,
    mesh: DeviceMesh | None = None,
    units: Sequence[nn.Module] | None = None,
    weights: Path = None,
    init: Callable[[nn.Module], None] | None = None,
    tokens: int | None = None,
    batch: object = None,
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


@names_keywords
def stow(  # noqa: PLR0913  # the one door to everything
    model: nn.Module,
    optimizer: OptimizerFactory | None,
    *,
    plan: Plan | Literal["auto"] = "auto",
    budget: Budget | None = None,
    compute_dtype: torch.dtype | None = None,
    dir: Path = None,  # noqa: A002
    mesh: DeviceMesh | None = None,
    units: Sequence[nn.Module] | None = None,
    weights: Path = None,
    init: Callable[[nn.Module], None] | None = None,
    tokens: int | None = None,
    batch: object = None,
) -> tuple[nn.Module, PlacedOptimizer | None]:
    """Place a model and the states of its optimizer on device, host and disk.

    The model is changed in place; every rank starts with the values of rank 0.

    Without an optimizer the model is only read: ``stow(model, None, weights=folder)``. Its weights
    on disk stay in their files, from which they are read ahead of use in each forward; they have
    no gradients and cannot be changed. ``plan="auto"`` then keeps as many units in memory as the
    budget has room for. Each rank has a model of its own.

    Args:
        model: The model. It may be on the meta device.
        optimizer: A callable that takes the named parameters and the keywords that place the states
            (``states``, ``overlap``, ``module``, ``dir``, ...) and returns an optimizer of
            tensorstow: ``partial(tensorstow.AdamW, lr=1e-5)``, or a function that makes parameter
            groups, or a StowedOptimizer with the ``states``, ``dir`` and ``ram_budget`` it is
            given (on the CPU, by a ``Plan``, with parameters in memory). None: the model is only
            read.
        plan: A ``Plan``. Default: "auto", the fastest placement that fits ``budget``, by the rates
            that ``tensorstow calibrate`` measured; without rates the first that fits. What it is
            and why is logged (INFO), and ``tensorstow.plan_of(model)`` returns it.
        budget: The bytes per rank and tier for ``plan="auto"``. Default: None, parts of what this
            machine has free: half of the memory that computes, 0.8 of the rest and of the disk.
        compute_dtype: The dtype of forward and backward; master weights keep the parameters' dtype.
            Default: None, the parameters' dtype.
        dir: The directory of states on disk and commits. Default: None, scratch files.
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

    Returns:
        The model and its optimizer, or None.

    Raises:
        OptionError: Arguments that cannot be used; nothing was changed.
        BudgetError: No placement fits the budget; nothing was changed.
        StoreFormatError: The files at ``weights`` are not the model's; nothing was changed.
        DamageError: A file at ``weights`` is not what was written; nothing was changed.
    """
    types = {"plan": plan, "compute_dtype": compute_dtype, "mesh": mesh, "budget": budget}
    validate_arguments(model, optimizer, **types, tokens=tokens, init=init, dir=dir)
    device = current_device()
    choice: ChosenPlan | None = None
    if optimizer is None:
        validate_unused(dir=dir, mesh=mesh, tokens=tokens, batch=batch)
        explicit_plan = None if plan == "auto" else plan
        options = ReadOptions(explicit_plan, budget, compute_dtype, units, weights, init, device)
        _PLANS[model] = stow_read_only(model, options)
        return model, None
    chosen = units_of(model, units)
    if plan == "auto":
        plan_request = _plan_request(chosen, device, mesh, optimizer, dir)
        example = ExampleBatch(model, chosen, batch, compute_dtype, tokens)
        plan, step = choose_plan(plan_request, chosen, budget, device, dir, example)
        choice = ChosenPlan(step, is_of_machine=budget is None)
    else:
        refuse_with_plan(budget=budget, tokens=tokens, batch=batch)
    validate_units(plan, chosen)
    if not plan.keeps_activations or plan.activation_units:
        validate_activations(plan, chosen)
    validate_device(plan, device)
    validate_factory(optimizer, _placement_keywords(plan, model, optimizer, dir))
    place: Callable[[_Request], PlacedOptimizer] = _place_whole
    group, shards = None, 1
    if mesh is not None or not _stays_whole(plan, chosen, device, compute_dtype):
        ranks = world_size() if mesh is None else mesh.size()
        is_shared = ranks > 1 and _is_shared(plan, chosen, device, compute_dtype)
        if is_shared:
            validate_no_hooks_of(chosen)
        else:
            validate_parameters(chosen, scalars=takes_scalars(plan, device, compute_dtype))
        row = mesh or make_mesh(device, stage=plan.stage, replicas=plan.replicas)
        validate_mesh(row, plan, device)
        group, shards = host_group(), row.size(row.ndim - 1)
        arguments = {"plan": plan.to_json(), "compute_dtype": str(compute_dtype)}
        validate_same_on_ranks(arguments | dict(describe_units(chosen)), group)
        place = partial(_place_shared if is_shared else _place_sharded, mesh=row)
    values = InitialValues(weights, init, group, model)
    sizes = Sizes.of(chosen, shards)  # placing takes the parameters out of their units
    request = _Request(model, chosen, plan, compute_dtype, device, values, optimizer, dir)
    placed = _with_reports(place(request), request, sizes, choice)
    if plan.micro_batches > 1:  # outside of recomputation: that is for each micro-batch
        VerticalOrder(model, chosen, plan.micro_batches, device).register()
    _PLANS[model] = plan
    return model, placed


def _sharding(request: _Request, mesh: DeviceMesh) -> Sharding:
    plan, device = request.plan, request.device
    return Sharding(
        mesh,
        device,
        _precision(plan, request.compute_dtype),
        plan.stage == 3,
        unsharded=frozenset(plan.unsharded),
        h2d_prefetcher=_h2d_prefetcher(plan, device),
    )


def _precision(plan: Plan, compute_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return FSDP2's dtypes; gradients that wait unreduced are summed in its reduce dtype."""
    waits = plan.stage <= 1 and plan.accumulation_steps > 1  # stage 1, and no_sync() at stage 0
    return MixedPrecisionPolicy(compute_dtype, torch.float32 if waits else None)


def _with_reports(
    optimizer: PlacedOptimizer,
    request: _Request,
    sizes: Sizes,
    choice: ChosenPlan | None,
) -> PlacedOptimizer:
    """Add the parameters and the plan's predictions to reports of the optimizer.

    A plan that ``stow`` chose is compared with its first steps.
    """
    policy, plan = optimizer.offload_policy, request.plan
    conditions = Conditions(
        request.device.type == "cpu",
        commits=policy.placement.durable,
        state_format=policy.format,
    )

    def predict() -> Sequence[Item]:
        # Optimizers with another share of states on disk (HybridAdam) do not follow the plan.
        follows = policy.placement.disk_fraction == float(plan.states == Tier.DISK)
        follows = follows and not isinstance(optimizer, StowedOptimizer)  # its states differ
        return items_of(plan, sizes, conditions) if follows else []

    step = None if choice is None else choice.step
    model = weakref.ref(request.model)
    part = partial(ParameterPart, model, request.links, predict, step)
    optimizer.recorded_parts.append(part)
    _place_activations(request, optimizer)
    if choice is not None:
        room = HostRoom(buffers_of(request.units)) if choice.is_of_machine else None
        first = FirstSteps(lambda trained: part().compared(trained.memory()), step, room)
        first.watch(request.model, optimizer)
    return optimizer


def _place_whole(request: _Request) -> PlacedOptimizer:
    """Place an unsharded model on the device that computes, with its first values.

    Its gradients are offloaded, unless they are used on the device or as soon as they are made.
    """
    model, plan, device = request.model, request.plan, request.device
    request.values.check(request.units, aliases_of(model))
    request.values.fill(request.units, aliases_of(model))
    request.values.buffers(model)
    if device.type != "cpu":
        model.to(device)
    if is_away(device) and _gradients_wait_on_host(plan):
        stays = stays_on_device(request.optimizer)
        leaving = [p for name, p in model.named_parameters() if not stays(name)]
        GradientOffload(leaving, request.open_link()).register(model)
    else:
        accumulate_in_fp32(model.parameters())
    return _make_optimizer(request)


def _is_shared(
    plan: Plan, units: Iterable[Unit], device: torch.device, compute_dtype: torch.dtype | None
) -> bool:
    """Return whether every rank keeps the whole weights as plain parameters ([Note: Shares]).

    Otherwise FSDP2 shards them: it casts weights, and gathers those in host memory or on disk.
    """
    return (
        plan.stage < 3
        and not is_away(device)
        and compute_dtype is None
        and not plan.timing.begins_early
        and plan.micro_batches == 1
        and Tier.DISK not in {plan.tier_of(unit.name) for unit in units}
    )


def _place_shared(request: _Request, mesh: DeviceMesh) -> PlacedOptimizer:
    """Give every rank the whole weights, and its optimizer this rank's rows of them."""
    model, plan = request.model, request.plan
    request.values.check(request.units, aliases_of(model))
    request.values.fill(request.units, aliases_of(model))
    request.values.buffers(model)
    reduce_dtype = _precision(plan, None).reduce_dtype
    shared = SharedWeights(model, request.units, mesh, reduce_dtype)
    optimizer = _make_optimizer(request)
    shared.register(optimizer)
    if plan.stage == 1:
        MicroBatches(shared.set_reduces, plan.accumulation_steps).register(model, optimizer)
    return optimizer


def _place_activations(request: _Request, optimizer: PlacedOptimizer) -> None:
    """Place what forward saves for backward as the plan says, until the optimizer is closed."""
    if request.plan.keeps_activations:
        return

    def place() -> PlacedActivations:
        return PlacedActivations(request.model, request.units, request.plan, request.directory)

    try:
        placed = on_every_rank(place, "place activations")
    except BaseException:
        optimizer.close()
        raise
    optimizer.register_close_hook(placed.close)
    optimizer.recorded_parts.append(lambda: placed)


def _gradients_wait_on_host(plan: Plan) -> bool:
    """Return whether gradients leave the device during backward, and wait in host memory."""
    return not plan.timing.begins_early and not reaches_device(plan.update_on)


def _place_sharded(request: _Request, mesh: DeviceMesh) -> PlacedOptimizer:
    """Give a model to FSDP2, make its optimizer, and put every hook in place."""
    model, plan, sharding = request.model, request.plan, _sharding(request, mesh)
    request.values.check(request.units, aliases_of(model))
    scalars = _take_scalars(request)
    if scalars is not None:
        sharding = replace(sharding, scalars=scalars.parameters.values())
    unshard = UnshardHooks(model, request.units, sharding.reduction.reset)
    stored = _shard_all(request, sharding)
    whole = None
    if scalars is not None:
        whole = SharedWeights(model, [scalars], sharding.mesh, sharding.precision.reduce_dtype)
    offloaded: list[torch.Tensor] = [p for p, _ in stored]
    # In backward the optimizer itself fetches gradients of parameters on the device.
    waits = _gradients_wait_on_host(plan)
    if is_away(sharding.device) and waits:
        stays, home = stays_on_device(request.optimizer), {id(p) for p in offloaded}
        offloaded = [
            p
            for name, p in model.named_parameters()
            if isinstance(p, DTensor) and (id(p) in home or not stays(name))
        ]
    link = request.open_link() if is_away(sharding.device) and offloaded else None
    GradientOffload(
        offloaded, link, share_buffers=not waits, are_wide=plan.micro_batches > 1
    ).register(model)
    if plan.accumulation_steps > 1:
        _sum_wide_on_device(model, {id(p) for p in offloaded})
    optimizer = _make_optimizer(request)
    _wait_for_updates_before_reads(stored, optimizer)
    # Only StowedAdam updates a model on a device with memory of its own.
    if sharding.h2d_prefetcher is not None and isinstance(optimizer, StowedAdam):
        sharding.h2d_prefetcher.register(model, optimizer)
        request.links.append(sharding.h2d_prefetcher.link)
    if whole is not None:
        whole.register(optimizer)
    unshard.register(optimizer, stage=2 if plan.unsharded else plan.stage)
    watch_backwards(model)
    register_state_dict_hooks(model)
    guard_modules(model)
    if plan.stage == 1 and isinstance(model, FSDPModule):
        MicroBatches(reduce_with_last(model), plan.accumulation_steps).register(model, optimizer)
    return optimizer


def _take_scalars(request: _Request) -> Unit | None:
    """Take scalars out of their units, and return them with values; None: there are none."""
    parameters = {n: p for unit in request.units for n, p in unit.parameters.items() if not p.ndim}
    if not parameters:
        return None
    scalars = Unit(ROOT, request.model, parameters)
    request.values.fill([scalars], aliases_of(request.model))
    for unit in request.units:
        for name in parameters:
            unit.parameters.pop(name, None)
    return scalars


def _shard_all(request: _Request, sharding: Sharding) -> list[tuple[DTensor, ShardStorage]]:
    aliases = aliases_of(request.model)
    pool = _make_disk_pool(request, sharding)
    stored: list[tuple[DTensor, ShardStorage]] = []
    for unit in request.units:
        values = request.values.readers(unit, aliases)
        stored += shard_unit(unit, request.plan.tier_of(unit.name), sharding, values, pool)
        unit.parameters.clear()  # the whole tensors go, unit by unit
    request.values.buffers(request.model)
    move_buffers(request.model, sharding.device)
    return stored


def _h2d_prefetcher(plan: Plan, device: torch.device) -> H2DPrefetcher | None:
    """Return the prefetcher for a device that has memory of its own; None: it has none."""
    if not is_away(device):
        return None
    limit = None if plan.device_limit is None else int(plan.device_limit)
    return H2DPrefetcher(
        open_link(device), ahead=plan.prefetch, timing=plan.timing, limit_bytes=limit
    )


def _make_disk_pool(request: _Request, sharding: Sharding) -> DiskPool | None:
    """Allocate disk space for units on DISK, and bound their buffers in host memory."""
    plan = request.plan
    on_disk = [unit for unit in request.units if plan.tier_of(unit.name) == Tier.DISK]
    if not on_disk:
        return None
    frozen: dict[str, FrozenLayout] = {}
    if any(not p.requires_grad for unit in on_disk for p in unit.parameters.values()):
        files = FrozenFiles(on_disk, request.values, aliases_of(request.model))
        frozen = {u.name: files.layout(u, sharding.rank, sharding.ranks) for u in on_disk}
    units, total = [], 0
    for unit in on_disk:
        read = frozen.get(unit.name, FrozenLayout({}))
        others = {n: p for n, p in unit.parameters.items() if n not in read.at}
        stored = UnitSizes.of(replace(unit, parameters=others), sharding.ranks).share_bytes
        whole = stored + round_up(read.nbytes, ALIGN)
        units.append(replace(UnitSizes.of(unit, sharding.ranks), share_bytes=whole))
        total += round_up(stored, ALIGN) + (0 if read.runs else round_up(read.nbytes, ALIGN))
    sizes, around = [unit.share_bytes for unit in units], bytes_around(units)
    least = least_in_memory(sizes, around)
    capacity = int(plan.buffer_pool_bytes or 0) or most_in_memory(sizes, plan.prefetch, around)
    if capacity < least:
        message = (
            f"buffer_pool_bytes={format_bytes(capacity)} was given for parameters on disk, and"
            f" {MIN_UNITS_IN_MEMORY} units, of which one is computed with and others are updated,"
            f" have {format_bytes(least)}: give at least that, or smaller units."
        )
        raise BudgetError(message)
    if sharding.device.type == "cpu":
        give_back_large_blocks()
    directory = request.directory
    place = (
        choose_directory(total) if directory is None else make_directories([directory])[0]
    ).path
    return DiskPool(BufferPool(place, total, capacity, least), Prefetcher(plan.prefetch), frozen)


def _plan_request(
    units: Sequence[Unit],
    device: torch.device,
    mesh: DeviceMesh | None,
    optimizer: OptimizerFactory,
    directory: Path,
) -> PlanRequest:
    """Return the input of ``plan="auto"``, with the optimizer's keywords."""
    ranks = world_size() if mesh is None else mesh.size(mesh.ndim - 1)
    keywords = given_keywords(optimizer)
    states = Tier(keywords["states"]) if keywords.get("states") in _STATE_TIERS else None
    name = keywords.get("state_format")
    state_format = StateFormat(name) if name in set(StateFormat) else None  # else AdamW refuses it
    is_cpu, update_on = device.type == "cpu", keywords.get("update_on")
    is_durable = keywords.get("durability") != "none"
    commits = is_durable and (directory or keywords.get("dir")) is not None
    return PlanRequest(
        Sizes.of(units, ranks),
        Budget(),
        Conditions(is_cpu, commits=commits, state_format=state_format, states=states),
        Plan(accumulation_steps=keywords.get("accumulation_steps", 1)),
        keywords.get("overlap", None if accepts(optimizer, "overlap") else "none"),
        spend="ram_budget" not in keywords and accepts(optimizer, "ram_budget"),
        on_device=accepts(optimizer, "update_on"),
        update_on=None if is_cpu or not is_update_on(update_on) else update_on,
    )


def _stays_whole(
    plan: Plan, units: Iterable[Unit], device: torch.device, compute_dtype: torch.dtype | None
) -> bool:
    """Return whether parameters are where they are computed with, on one rank, as they are."""
    if plan.replicas > world_size():
        ranks = format_count(world_size(), "rank")
        message = f"replicas={plan.replicas} was given for {ranks}: each replica has at least one."
        raise OptionError(message)
    compute_tiers = {Tier.DEVICE, Tier.HOST} if device.type == "cpu" else {Tier.DEVICE}
    return (
        world_size() == 1
        and compute_dtype is None  # FSDP2 also casts what goes into forward
        and plan.micro_batches == 1  # which FSDP2 sums
        and {plan.tier_of(unit.name) for unit in units} <= compute_tiers
    )


def _make_optimizer(request: _Request) -> PlacedOptimizer:
    placed = _placement_keywords(request.plan, request.model, request.optimizer, request.directory)
    named = list(request.model.named_parameters())

    def make() -> PlacedOptimizer:
        optimizer = request.optimizer(named, **placed)
        if isinstance(optimizer, StowedOptimizer):
            validate_class(optimizer, request.plan, request.device)
        note_placed(validate_optimizer(optimizer, placed))
        return optimizer

    return on_every_rank(make, "make the optimizer")


def _placement_keywords(
    plan: Plan, model: nn.Module, optimizer: OptimizerFactory, directory: Path
) -> dict[str, Any]:
    """Return the optimizer's keywords for a plan, without those at their defaults."""
    placed: dict[str, Any] = {"module": model}
    if plan.states == Tier.DISK:
        placed["states"] = "disk"
    if plan.timing.is_overlapped:
        placed["overlap"] = plan.overlap
    if plan.update_on is not None:
        placed["update_on"] = plan.update_on
    if plan.timing.begins_early and plan.accumulation_steps > 1:
        placed["accumulation_steps"] = plan.accumulation_steps
    if plan.ram_budget is not None:
        placed["ram_budget"] = plan.ram_budget
    if directory is not None and not _is_for_scratch_alone(plan, optimizer):
        placed["dir"] = directory
    return placed


def _is_for_scratch_alone(plan: Plan, optimizer: OptimizerFactory) -> bool:
    """Return whether a directory is for parameters or activations, and not for the optimizer.

    The optimizer then has its states in memory, and does not commit.
    """
    keywords = given_keywords(optimizer)
    in_memory = plan.states != Tier.DISK and keywords.get("states") in {None, "host", "ram"}
    needs_directory = Tier.DISK in {plan.parameters, *plan.units.values()} or (
        ActivationPlacement.DISK in plan.activation_placements
    )
    return keywords.get("durability") == "none" and in_memory and needs_directory


def _sum_wide_on_device(model: nn.Module, offloaded: Collection[int]) -> None:
    """Let FSDP2 sum gradients that stay on the device in fp32.

    Args:
        model: The sharded model.
        offloaded: ``id`` of the parameters whose gradients leave the device.
    """
    for parameter in model.parameters():
        is_sharded = parameter.requires_grad and isinstance(parameter, DTensor)
        if is_sharded and id(parameter) not in offloaded:
            hook: Any = parameter.register_post_accumulate_grad_hook
            hook(widen_gradient)


def _wait_for_updates_before_reads(
    stored: Iterable[tuple[DTensor, ShardStorage]], optimizer: PlacedOptimizer
) -> None:
    """Block reads of a parameter until its pending update finishes."""
    reference = weakref.ref(optimizer)

    def waiting_for(parameter: torch.Tensor) -> Callable[[], None]:
        def wait() -> None:
            alive = reference()
            if alive is not None:
                alive.wait([parameter])

        return wait

    for parameter, storage in stored:
        storage.before_read = waiting_for(parameter)
