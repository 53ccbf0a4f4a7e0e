"""``stow``: a model and its optimizer over DEVICE, HOST and DISK."""

import os
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from tensorstow.base.allocator import give_back_large_blocks
from tensorstow.base.budget import Budget
from tensorstow.base.directories import choose_directory, make_directories
from tensorstow.base.errors import BudgetError, OptionError
from tensorstow.base.plan import Plan
from tensorstow.base.sizes import format_bytes, format_count
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import reaches_device
from tensorstow.fsdp.agreement import check_agreement, told_of
from tensorstow.fsdp.auto import LEAST_SHELVED, Sizes, auto_plan
from tensorstow.fsdp.gradient_hooks import Landing, move_buffers
from tensorstow.fsdp.gradients import sum_wide, widen
from tensorstow.fsdp.loading import Sources
from tensorstow.fsdp.mesh import device_here, host_group, mesh_of, world_here
from tensorstow.fsdp.micro_batches import MicroBatches
from tensorstow.fsdp.optimizers import Make, asked_of, check, make, placement_of
from tensorstow.fsdp.parts import watch_parts
from tensorstow.fsdp.prefetch import Prefetcher
from tensorstow.fsdp.shard_storage import Cell
from tensorstow.fsdp.shardable import check_shardable
from tensorstow.fsdp.sharding import Sharding, Storeroom, shard, shelf_bytes
from tensorstow.fsdp.state_dicts import keep_plain
from tensorstow.fsdp.units import Unit, aliases_of, units_of
from tensorstow.fsdp.unshard import Gathered
from tensorstow.fsdp.uploads import Uploads
from tensorstow.fsdp.validation import (
    check_asked,
    check_budget,
    check_device,
    check_init,
    check_mesh,
)
from tensorstow.io.buffer_pool import Shelves
from tensorstow.io.device_link import is_away, open_link
from tensorstow.io.files import ALIGN
from tensorstow.optim.stowed_adam import StowedAdam

Path = str | os.PathLike[str] | None
_TIERS_OF_STATES = ("host", "ram", "disk")


def stow(  # noqa: PLR0913  # the one door to everything
    model: nn.Module,
    optimizer: Make,
    *,
    plan: Plan | Literal["auto"] = "auto",
    budget: Budget | None = None,
    compute_dtype: torch.dtype | None = None,
    dir: Path = None,  # noqa: A002
    mesh: DeviceMesh | None = None,
    units: Sequence[nn.Module] | None = None,
    weights: Path = None,
    init: Callable[[nn.Module], None] | None = None,
) -> tuple[nn.Module, StowedAdam]:
    """Place ``model`` and the states of its optimizer as ``plan`` says; return both.

    ``optimizer`` is called with the named parameters and keywords that say where states live
    (``states``, ``overlap``, ``module``, ``dir`` ...), which it is to pass on to an optimizer of
    tensorstow: ``partial(tensorstow.AdamW, lr=1e-5)``, or a function that makes groups.

    ``plan``: a ``Plan``, or "auto": the first of ``engine.auto``'s placements that fits ``budget``.
    ``compute_dtype``: what forward and backward compute in; masters keep the parameters' dtype.
    ``dir``: where states on disk and commits go. ``mesh``: the ranks, (shard,) or (replicate,
    shard); None: all there are, and nothing is sharded where this process is alone and nothing is
    to be cast or fetched. ``units``: modules that move as one; None: the model's repeated blocks.
    ``weights``: safetensors to load, a file or a directory; ``init`` gives one module of a model on
    the meta device its first values (None: its ``reset_parameters``).

    The model is changed in place; every rank begins with the first one's values. Raises OptionError
    or BudgetError before anything is placed.
    """
    check_asked(model, optimizer, plan, compute_dtype, mesh)
    check_budget(budget)
    check_init(init)
    device = device_here()
    chosen = units_of(model, units)
    if plan == "auto":
        plan = _automatic(chosen, budget or Budget(), device, mesh, optimizer, dir)
    elif budget is not None:
        message = "budget= was given beside a plan, which says itself what lives where."
        raise OptionError(message)
    _check_units(plan, chosen)
    check_device(plan, device)
    check(optimizer, placement_of(plan, model, dir))
    if mesh is None and _stays_whole(plan, chosen, device, compute_dtype):
        _place_whole(model, chosen, device, Sources(weights, init, None, model), plan)
        return model, make(optimizer, model, placement_of(plan, model, dir))
    check_shardable(chosen)
    mesh = mesh or mesh_of(device, stage=plan.stage, replicas=plan.replicas)
    check_mesh(mesh, plan, device)
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype)
    sharding = Sharding(mesh, device, precision, plan.stage == 3, uploads=_uploads(plan, device))
    group = host_group()
    told = {"plan": plan.to_json(), "compute_dtype": str(compute_dtype), **told_of(chosen)}
    check_agreement(told, group)
    sources = Sources(weights, init, group, model)
    return model, _place_sharded(model, chosen, plan, sharding, sources, optimizer, dir)


def _place_whole(
    model: nn.Module, units: Sequence[Unit], device: torch.device, sources: Sources, plan: Plan
) -> None:
    """Give a model that is not sharded its first values, where it is computed with.

    Its gradients leave there, unless they are used there or as soon as they are made.
    """
    sources.check(units, aliases_of(model))
    sources.fill(units, aliases_of(model))
    sources.buffers(model)
    if device.type != "cpu":
        model.to(device)
    if is_away(device) and _gradients_leave(plan):
        Landing(model.parameters(), open_link(device)).watch(model)
    else:
        sum_wide(model.parameters())


def _gradients_leave(plan: Plan) -> bool:
    """Return whether gradients leave the device beside backward, and wait on the host."""
    return plan.overlap != "backward" and not reaches_device(plan.update_on)


def _place_sharded(
    model: nn.Module,
    units: Sequence[Unit],
    plan: Plan,
    sharding: Sharding,
    sources: Sources,
    optimizer: Make,
    directory: Path,
) -> StowedAdam:
    """Give a model to FSDP2, make its optimizer, and put every hook in place."""
    sources.check(units, aliases_of(model))
    gathered = Gathered(model, units, sharding.reduction.forget)
    held = _shard_all(model, units, plan, sharding, sources, directory)
    leaving: list[torch.Tensor] = [p for p, _ in held]
    # Beside backward the optimizer itself fetches those of parameters on the device.
    waits = _gradients_leave(plan)
    if is_away(sharding.device) and waits:
        leaving = [p for p in model.parameters() if isinstance(p, DTensor)]
    link = open_link(sharding.device) if is_away(sharding.device) and leaving else None
    landing = Landing(leaving, link, pass_on=not waits)
    landing.watch(model)
    if plan.accumulation_steps > 1:
        _sum_wide_on_device(model, {id(p) for p in leaving})
    made = make(optimizer, model, placement_of(plan, model, directory))
    _read_new_weights(held, made)
    if sharding.uploads is not None:
        sharding.uploads.watch(model, made)
    gathered.watch(made, stage=plan.stage)
    keep_plain(model)
    watch_parts(model)
    if plan.stage == 1 and isinstance(model, FSDPModule):
        MicroBatches(model, plan.accumulation_steps).watch(model, made)
    return made


def _shard_all(
    model: nn.Module,
    units: Sequence[Unit],
    plan: Plan,
    sharding: Sharding,
    sources: Sources,
    directory: Path,
) -> list[tuple[DTensor, Cell]]:
    aliases = aliases_of(model)
    storeroom = _storeroom(units, plan, sharding, directory)
    held: list[tuple[DTensor, Cell]] = []
    for unit in units:
        rows = sources.rows(unit, aliases)
        held += shard(unit, plan.tier_of(unit.name), sharding, rows, storeroom)
        unit.parameters.clear()  # the whole tensors go, unit by unit
    sources.buffers(model)
    move_buffers(model, sharding.device)
    return held


def _uploads(plan: Plan, device: torch.device) -> Uploads | None:
    """Return what takes shards to a device that has memory of its own."""
    if not is_away(device):
        return None
    beside_forward = plan.overlap == "forward"
    return Uploads(open_link(device), ahead=plan.prefetch, beside_forward=beside_forward)


def _storeroom(
    units: Sequence[Unit], plan: Plan, sharding: Sharding, directory: Path
) -> Storeroom | None:
    """Make room on disk for the units that are to live there, and say how much of it is lent."""
    sizes = [shelf_bytes(u, sharding) for u in units if plan.tier_of(u.name) == Tier.DISK]
    if not sizes:
        return None
    total = sum(sizes) + ALIGN * len(sizes)
    least = sum(sorted(sizes)[-LEAST_SHELVED:]) + LEAST_SHELVED * ALIGN
    capacity = int(plan.shelf_bytes or 0) or least + plan.prefetch * max(sizes)
    if capacity < least:
        message = (
            f"shelf_bytes={format_bytes(capacity)} was given for parameters on disk, and"
            f" {LEAST_SHELVED} units, of which one is computed with and others are updated, have"
            f" {format_bytes(least)}: give at least that, or smaller units."
        )
        raise BudgetError(message)
    if sharding.device.type == "cpu":
        give_back_large_blocks()
    place = (
        choose_directory(total) if directory is None else make_directories([directory])[0]
    ).path
    return Storeroom(Shelves(place, total, capacity), Prefetcher(plan.prefetch))


def _automatic(
    units: Sequence[Unit],
    budget: Budget,
    device: torch.device,
    mesh: DeviceMesh | None,
    optimizer: Make,
    directory: Path,
) -> Plan:
    """Return the first placement that fits, with what the user has told the optimizer."""
    ranks = world_here() if mesh is None else mesh.size(mesh.ndim - 1)
    asked = asked_of(optimizer)
    states = Tier(asked["states"]) if asked.get("states") in _TIERS_OF_STATES else None
    sizes = Sizes.of(units, ranks)
    here = device.type == "cpu"
    commits = (directory or asked.get("dir")) is not None and asked.get("durability") != "none"
    plan = auto_plan(sizes, budget, device_is_host=here, states=states, commits=commits)
    given = {name: asked[name] for name in ("overlap", "accumulation_steps") if name in asked}
    return plan.but(**given)


def _stays_whole(
    plan: Plan, units: Iterable[Unit], device: torch.device, compute_dtype: torch.dtype | None
) -> bool:
    """Return whether parameters are where they are computed with, on one rank, as they are."""
    if plan.replicas > world_here():
        ranks = format_count(world_here(), "rank")
        message = f"replicas={plan.replicas} was given for {ranks}: each replica has at least one."
        raise OptionError(message)
    here = {Tier.DEVICE, Tier.HOST} if device.type == "cpu" else {Tier.DEVICE}
    return (
        world_here() == 1
        and compute_dtype is None  # FSDP2 also casts what goes into forward
        and {plan.tier_of(unit.name) for unit in units} <= here
    )


def _sum_wide_on_device(model: nn.Module, held: Collection[int]) -> None:
    """Let FSDP2 sum in fp32 the gradients of parameters that are not ``held`` on the host."""
    for parameter in model.parameters():
        if parameter.requires_grad and id(parameter) not in held:
            hook: Any = parameter.register_post_accumulate_grad_hook
            hook(widen)


def _read_new_weights(held: Iterable[tuple[DTensor, Cell]], optimizer: StowedAdam) -> None:
    """Let whoever reads a parameter wait for its update."""
    known = weakref.ref(optimizer)

    def waiting_for(parameter: torch.Tensor) -> Callable[[], None]:
        def wait() -> None:
            alive = known()
            if alive is not None:
                alive.wait([parameter])

        return wait

    for parameter, cell in held:
        cell.before_read = waiting_for(parameter)


def _check_units(plan: Plan, units: Iterable[Unit]) -> None:
    names = [unit.name for unit in units]
    unknown = sorted(set(plan.units) - set(names))
    if unknown:
        message = f"The plan places units that the model has not ({unknown}): it has {names}."
        raise OptionError(message)
