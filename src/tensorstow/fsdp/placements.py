"""The placements of a model that is trained: whole, shared or sharded.

    whole    on one rank, on the device that computes, in the dtype that the parameters have
    shared   whole on every rank in host memory; a rank updates its rows ([Note: Shares])
    sharded  by FSDP2, which casts weights and gathers those in host memory or on disk

A model that is only read has a placement of its own: see read_only.
"""

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from tensorstow.base.activation_placement import ActivationPlacement
from tensorstow.base.directories import (
    Paths,
    choose_directory,
    make_directories,
    read_paths,
)
from tensorstow.base.errors import BudgetError, OptionError
from tensorstow.base.plan import Plan
from tensorstow.base.sizes import format_bytes, format_count, round_up
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import Overlap, is_auto, meant, reaches_device
from tensorstow.fsdp.experts import forget_experts_before_forward, take_experts
from tensorstow.fsdp.fp32_sums import accumulate_in_fp32, keep_averages, widen_gradient
from tensorstow.fsdp.frozen_files import FrozenFiles, codes_in_memory, watch_mapped_files
from tensorstow.fsdp.gradient_offload import GradientOffload
from tensorstow.fsdp.gradient_reduction import Reduction
from tensorstow.fsdp.h2d_prefetch import H2DPrefetcher
from tensorstow.fsdp.initialization import InitialValues
from tensorstow.fsdp.module_hooks import guard_modules, watch_backwards
from tensorstow.fsdp.ordered_reduce import OrderedReductions
from tensorstow.fsdp.placed_activations import validate_activations
from tensorstow.fsdp.shard_storage import FrozenLayout, Prefetcher, ShardStorage
from tensorstow.fsdp.sharding import (
    DiskPool,
    Sharding,
    host_group,
    make_mesh,
    move_buffers,
    on_every_rank,
    shard_unit,
    world_size,
)
from tensorstow.fsdp.shared_weights import SharedWeights
from tensorstow.fsdp.state_dicts import register_state_dict_hooks
from tensorstow.fsdp.units import ROOT, Unit
from tensorstow.fsdp.unshard import MicroBatches, UnshardHooks, reduce_with_last
from tensorstow.fsdp.validation import (
    DEFAULTS,
    OptimizerFactory,
    accepts,
    describe_units,
    given_keywords,
    is_of_class,
    stays_on_device,
    validate_class,
    validate_device,
    validate_factory,
    validate_mesh,
    validate_no_hooks,
    validate_optimizer,
    validate_parameters,
    validate_same_on_ranks,
    validate_units,
)
from tensorstow.io.device_link import DeviceLink, is_away, open_link
from tensorstow.io.files import ALIGN
from tensorstow.memory.buffer_pool import BufferPool
from tensorstow.optim.generic.stowed_optimizer import StowedOptimizer
from tensorstow.optim.one_optimizer import note_placed
from tensorstow.optim.options import without_auto_overlap
from tensorstow.optim.placed import PlacedOptimizer
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.planner.bounds import MIN_UNITS_IN_MEMORY
from tensorstow.planner.sizes import UnitSizes, bytes_around, least_in_memory, most_in_memory


@dataclass(frozen=True, eq=False, slots=True)
class StowRequest:
    """The checked arguments of ``stow`` for a model that is trained."""

    model: nn.Module
    units: list[Unit]
    plan: Plan
    compute_dtype: torch.dtype | None
    device: torch.device
    values: InitialValues
    optimizer: OptimizerFactory
    directory: Paths | None
    links: list[DeviceLink] = field(default_factory=list)
    """Every link that weights and gradients go over."""

    @property
    def tiers(self) -> set[Tier]:
        """The tiers of the parameters."""
        return {self.plan.tier_of(unit.name) for unit in self.units}

    @property
    def gradients_wait_on_host(self) -> bool:
        """Whether gradients leave the device during backward, and wait in host memory.

        A class of torch's steps parameters where they are.
        """
        on_host = self.plan.timing.allows_clipping and not reaches_device(self.plan.update_on)
        return on_host and not is_of_class(self.optimizer)

    @property
    def is_plain(self) -> bool:
        """Whether weights need no casts, updates in backward or sums of micro-batches by FSDP2."""
        within_step = not self.plan.timing.begins_early and self.plan.micro_batches == 1
        return self.compute_dtype is None and within_step

    def leaves_uncast(self, unit: Unit) -> bool:
        """Return whether a unit is computed with in the dtypes that its parameters have."""
        dtypes = {parameter.dtype for parameter in unit.parameters.values()}
        return self.compute_dtype is None or dtypes <= {self.compute_dtype}

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype of gradients that are reduced; None: their own."""
        if self.plan.ordered_reduce:  # FSDP2 divides an fp16 sum before and after it
            dtypes = {p.dtype for unit in self.units for p in unit.parameters.values()}
            return torch.float32 if torch.float16 in dtypes | {self.compute_dtype} else None
        return torch.float32 if self.reduces_wide else None

    @property
    def reduces_wide(self) -> bool:
        """Whether gradients of several backwards are reduced: at stage 1, by no_sync() at 0."""
        plan = self.plan
        return plan.stage <= 1 and plan.accumulation_steps > 1 and not plan.ordered_reduce

    @property
    def reduction(self) -> Reduction:
        """How the gradients of whole parameters are reduced."""
        plan = self.plan
        is_ordered = plan.ordered_reduce is not None and world_size() > 1
        return Reduction(self.reduce_dtype, is_ordered, not is_ordered or plan.averages_in_order)

    @property
    def keywords(self) -> dict[str, Any]:
        """The optimizer's keywords by the plan, without those at their defaults."""
        plan = self.plan
        decided = {
            "states": "disk" if plan.states == Tier.DISK else "host",
            "overlap": plan.overlap,
            "update_on": plan.update_on,
            "accumulation_steps": plan.accumulation_steps if plan.timing.begins_early else 1,
            "ram_budget": plan.ram_budget,
            "dir": None if self._is_for_scratch_alone() else self.directory,
        }
        if not plan.timing.is_overlapped and not accepts(self.optimizer, "overlap", by_name=True):
            del decided["overlap"]  # only our optimizers of Adam's rule have it
        placed = {name: value for name, value in decided.items() if value != DEFAULTS[name]}
        return placed if is_of_class(self.optimizer) else {"module": self.model, **placed}

    def _is_for_scratch_alone(self) -> bool:
        """Return whether the directory is for parameters or activations alone.

        The optimizer then has its states in memory, and does not commit.
        """
        plan, keywords = self.plan, given_keywords(self.optimizer)
        in_memory = plan.states != Tier.DISK and (
            keywords.get("states") is None or Tier.named(keywords["states"]) is Tier.HOST
        )
        needs_directory = Tier.DISK in plan.parameter_tiers or (
            ActivationPlacement.DISK in plan.activation_placements
        )
        return keywords.get("durability") == "none" and in_memory and needs_directory

    def open_link(self) -> DeviceLink:
        """Return a new link to the device, and remember it."""
        self.links.append(open_link(self.device))
        return self.links[-1]

    def fill(self, group: dist.ProcessGroup | None) -> None:
        """Set the first values of parameters that stay whole; collective over ``group``."""
        values = self.values
        values.check(self.units, group)
        values.fill(self.units)
        if self.device.type == "cpu":  # else they are copied to the device
            watch_mapped_files(self.model, self.model.parameters())
        # After the files are watched: buffers() validates them for the last time.
        values.buffers(self.model)

    def make_optimizer(self) -> PlacedOptimizer:
        """Return the optimizer of the parameters as they are now; collective."""
        placed = self.keywords
        named = list(self.model.named_parameters())

        def make() -> PlacedOptimizer:
            # Not every function takes the keyword.
            said = nullcontext() if is_auto(self.plan.overlap) else without_auto_overlap()
            with said:
                optimizer = self.optimizer(named, **placed)
            if isinstance(optimizer, StowedOptimizer):
                validate_class(self.plan, self.device, optimizer)
            note_placed(validate_optimizer(optimizer, placed))
            if isinstance(optimizer, StowedAdam) and self.plan.timing.begins_early:
                optimizer._let_steps_go_on()  # noqa: SLF001  # a hook of the engine
            optimizer._has_exact_norm = self.plan.ordered_reduce is not None  # noqa: SLF001
            return optimizer

        return on_every_rank(make, "make the optimizer")


def with_overlap(plan: Plan, optimizer: OptimizerFactory) -> Plan:
    """Return the user's plan with what "auto" means in it: the optimizer's own overlap first."""
    overlap: Any = given_keywords(optimizer).get("overlap")
    if isinstance(overlap, str) and overlap in get_args(Overlap):
        return plan.but(overlap=meant(plan.overlap, cast("Overlap", overlap)))
    if is_of_class(optimizer) or not accepts(optimizer, "overlap"):
        return plan
    return plan.settled()


def choose_placement(
    request: StowRequest, mesh: DeviceMesh | None
) -> tuple[Callable[[], PlacedOptimizer], int]:
    """Return the function that places a model, and the ranks that share its states; collective.

    Raises OptionError if the model cannot be placed so, or ranks called ``stow`` differently.
    """
    plan, device = request.plan, request.device
    validate_units(plan, [unit.name for unit in request.units])
    if not plan.keeps_activations or plan.activation_units:
        validate_activations(plan, request.units)
    validate_device(plan, device)
    validate_factory(request.optimizer, request.keywords, plan, device)
    if plan.replicas > world_size():
        ranks = format_count(world_size(), "rank")
        message = f"replicas={plan.replicas} was given for {ranks}: each replica has at least one."
        raise OptionError(message)
    if mesh is None and _stays_whole(request):
        return partial(_place_whole, request), 1
    place = _place_sharded
    if (world_size() if mesh is None else mesh.size()) > 1 and _is_shared(request):
        place = _place_shared
        for unit in request.units:
            for name, parameter in unit.parameters.items():
                validate_no_hooks(parameter, name)
    else:
        scalars = device.type == "cpu" and request.is_plain  # see [Note: Scalars]
        validate_parameters(request.units, scalars=scalars)
    row = _mesh_of(request, mesh)
    return partial(place, request, row), row.size(row.ndim - 1)


def _stays_whole(request: StowRequest) -> bool:
    """Return whether parameters are where they are computed with, on one rank, as they are."""
    away = is_away(request.device)
    return (
        world_size() == 1
        and request.compute_dtype is None  # FSDP2 also casts what goes into forward
        and request.plan.micro_batches == 1  # which FSDP2 sums
        and request.tiers <= ({Tier.DEVICE} if away else {Tier.DEVICE, Tier.HOST})
        and not _holds_codes(request)
    )


def _holds_codes(request: StowRequest) -> bool:
    """Return whether frozen weights in host memory stay codes, as their files have them.

    They are decoded whenever their unit is unsharded, which is for good below stage 3.
    """
    files = request.values.files
    if files is None or Tier.HOST not in request.tiers or request.plan.stage < 3:
        return False
    is_frozen = any(not p.requires_grad for u in request.units for p in u.parameters.values())
    return is_frozen and bool(files.coded)


def _is_shared(request: StowRequest) -> bool:
    """Return whether every rank keeps the whole weights as plain parameters ([Note: Shares])."""
    plan = request.plan
    return (
        plan.stage < 3
        and not is_away(request.device)
        and request.is_plain
        and Tier.DISK not in request.tiers
    )


def _mesh_of(request: StowRequest, mesh: DeviceMesh | None) -> DeviceMesh:
    """Return the mesh of the ranks, which have called ``stow`` alike; collective."""
    plan = request.plan
    row = mesh or make_mesh(request.device, stage=plan.stage, replicas=plan.replicas)
    validate_mesh(row, plan, request.device)
    arguments = {"plan": plan.to_json(), "compute_dtype": str(request.compute_dtype)}
    validate_same_on_ranks(arguments | describe_units(request.units))
    return row


def _place_whole(request: StowRequest) -> PlacedOptimizer:
    """Place an unsharded model on the device that computes, with its first values.

    Its gradients are offloaded, unless they are used on the device or as soon as they are made.
    """
    model = request.model
    request.fill(None)
    if request.device.type != "cpu":
        model.to(request.device)
    if is_away(request.device) and request.gradients_wait_on_host:
        stays = stays_on_device(request.optimizer)
        leaving = [p for name, p in model.named_parameters() if not stays(name)]
        GradientOffload(leaving, request.open_link()).register(model)
    else:
        accumulate_in_fp32(model.parameters())
    return request.make_optimizer()


def _place_shared(request: StowRequest, mesh: DeviceMesh) -> PlacedOptimizer:
    """Give every rank the whole weights, and its optimizer this rank's rows of them."""
    model, plan = request.model, request.plan
    request.fill(host_group())
    shared = SharedWeights(model, request.units, mesh, request.reduction)
    optimizer = request.make_optimizer()
    shared.register(optimizer)
    if plan.reduces_with_last:
        MicroBatches(shared.set_reduces, plan.accumulation_steps).register(model, optimizer)
    return optimizer


def _place_sharded(request: StowRequest, mesh: DeviceMesh) -> PlacedOptimizer:
    """Give a model to FSDP2, make its optimizer, and put every hook in place."""
    sharding = _sharding(request, mesh)
    if sharding.is_in_place:
        request = _with_experts_apart(request)
    model, plan = request.model, request.plan
    # Sharding takes the parameters out of the units, so they are counted first.
    sizes = [UnitSizes.of(unit, sharding.ranks) for unit in request.units]
    values = request.values
    values.check(request.units, host_group())
    scalars = _take_scalars(request, values)
    if scalars is not None:
        sharding = replace(sharding, scalars=scalars.parameters.values())
    ordered = None
    if plan.ordered_reduce and sharding.ranks > 1:
        ordered = OrderedReductions(averages=plan.averages_in_order)
    reset = sharding.reduction.reset if ordered is None else ordered.reset
    # The hooks take the names of parameters, which the units lose in _shard_all().
    unshard = UnshardHooks(model, request.units, reset)
    stored = _shard_all(request, sharding, values)
    if ordered is not None:
        # The first of the hooks on gradients: the others see the sum over all ranks.
        ordered.register(model)
    whole = None
    if scalars is not None:
        whole = SharedWeights(model, [scalars], mesh, request.reduction)
    # Before the hooks of the optimizer, which take gradients from host memory.
    _offload_gradients(request, [parameter for parameter, _ in stored])
    optimizer = request.make_optimizer()
    _wait_for_updates_before_reads(stored, optimizer)
    # Only StowedAdam updates a model on a device with memory of its own.
    if sharding.h2d_prefetcher is not None and isinstance(optimizer, StowedAdam):
        sharding.h2d_prefetcher.register(model, optimizer)
        request.links.append(sharding.h2d_prefetcher.link)
        if plan.timing.begins_early:
            # Sums over micro-batches, or over ranks in order, and averages of sums are fp32.
            wide = plan.micro_batches > 1 or ordered is not None or request.reduces_wide
            nbytes = (4 * u.trained_elements if wide else u.gradient_bytes for u in sizes)
            optimizer._expect_units_of(max(nbytes, default=0))  # noqa: SLF001  # a hook of the engine
    if whole is not None:
        whole.register(optimizer)
    unshard.register(optimizer, stage=2 if plan.unsharded else plan.stage)
    watch_backwards(model)
    register_state_dict_hooks(model)
    guard_modules(model)
    if plan.reduces_with_last and isinstance(model, FSDPModule):
        MicroBatches(reduce_with_last(model), plan.accumulation_steps).register(model, optimizer)
    return optimizer


def _with_experts_apart(request: StowRequest) -> StowRequest:
    """Let frozen experts on disk be units of their own, inside of their blocks.

    Then those alone are read that tokens are routed to ([Note: Routed experts] in experts).
    """
    units, tiers = list[Unit](), dict(request.plan.parameter_units)
    for unit in request.units:
        frozen = {n for n, p in unit.parameters.items() if not p.requires_grad}
        is_read = request.plan.tier_of(unit.name) == Tier.DISK and request.leaves_uncast(unit)
        if frozen and is_read:
            taken = take_experts(unit, frozen)
            # FSDP2 shards inner modules before those around them.
            units += taken
            tiers |= {part.name: Tier.DISK for part in taken}
        # The model itself has to be FSDP2's root, even if it has no parameters left.
        if unit.parameters or unit.name == ROOT:
            units.append(unit)
    return replace(request, units=units, plan=request.plan.but(parameter_units=tiers))


def _sharding(request: StowRequest, mesh: DeviceMesh) -> Sharding:
    plan, prefetcher = request.plan, None
    if is_away(request.device):
        limit = None if plan.device_budget is None else int(plan.device_budget)
        link = open_link(request.device)
        prefetcher = H2DPrefetcher(link, ahead=plan.prefetch, timing=plan.timing, limit_bytes=limit)
    return Sharding(
        mesh,
        request.device,
        MixedPrecisionPolicy(request.compute_dtype, request.reduce_dtype),
        plan.stage == 3,
        unsharded=frozenset(plan.unsharded),
        h2d_prefetcher=prefetcher,
    )


def _offload_gradients(request: StowRequest, stored: list[torch.Tensor]) -> None:
    """Let gradients go to host memory: those of ``stored``, and those that wait for a step.

    Those that stay on the device are summed in fp32 by FSDP2.
    """
    plan, model, offloaded = request.plan, request.model, stored
    # In backward the optimizer itself fetches gradients of parameters on the device.
    waits, away = request.gradients_wait_on_host, is_away(request.device)
    if away and waits:
        stays, home = stays_on_device(request.optimizer), {id(p) for p in stored}
        offloaded = [
            p
            for name, p in model.named_parameters()
            if isinstance(p, DTensor) and (id(p) in home or not stays(name))
        ]
    link = request.open_link() if away and offloaded else None
    wide = plan.micro_batches > 1
    if request.reduces_wide:
        keep_averages(model)
        wide = True
    GradientOffload(offloaded, link, share_buffers=not waits, are_wide=wide).register(model)
    if plan.accumulation_steps > 1:
        leaving = {id(p) for p in offloaded}
        for parameter in model.parameters():
            is_sharded = parameter.requires_grad and isinstance(parameter, DTensor)
            if is_sharded and id(parameter) not in leaving:
                hook: Any = parameter.register_post_accumulate_grad_hook
                hook(widen_gradient)


def _take_scalars(request: StowRequest, values: InitialValues) -> Unit | None:
    """Take scalars out of their units, and return them with values; None: there are none."""
    parameters = {n: p for unit in request.units for n, p in unit.parameters.items() if not p.ndim}
    if not parameters:
        return None
    scalars = Unit(ROOT, request.model, parameters)
    values.fill([scalars])
    watch_mapped_files(request.model, parameters.values())
    for unit in request.units:
        for name in parameters:
            unit.parameters.pop(name, None)
    return scalars


def _shard_all(
    request: StowRequest, sharding: Sharding, values: InitialValues
) -> list[tuple[DTensor, ShardStorage]]:
    pool = _make_disk_pool(request, sharding, values)
    stored: list[tuple[DTensor, ShardStorage]] = []
    for unit in request.units:
        readers = values.readers(unit)
        stored += shard_unit(unit, request.plan.tier_of(unit.name), sharding, readers, pool)
        unit.parameters.clear()  # the whole tensors go, unit by unit
    pagers = dict.fromkeys(storage.pager for _, storage in stored)
    if of_experts := [buffer for buffer in pagers if buffer is not None and buffer.pieces]:
        forget_experts_before_forward(request.model, of_experts)
    values.buffers(request.model)
    move_buffers(request.model, sharding.device)
    return stored


def _make_disk_pool(
    request: StowRequest, sharding: Sharding, values: InitialValues
) -> DiskPool | None:
    """Allocate disk space for units on DISK, and bound their buffers in host memory.

    Codes of weights on HOST are decoded to such buffers, too.
    """
    plan, rank, ranks = request.plan, sharding.rank, sharding.ranks
    on_disk = [unit for unit in request.units if plan.tier_of(unit.name) == Tier.DISK]
    on_host = [unit for unit in request.units if plan.tier_of(unit.name) == Tier.HOST]
    frozen = {unit.name: FrozenLayout({}) for unit in on_disk}
    if any(not p.requires_grad for unit in on_disk for p in unit.parameters.values()):
        files = FrozenFiles(on_disk, values)
        apart = {u.name for u in on_disk if sharding.is_in_place and request.leaves_uncast(u)}
        frozen = {u.name: files.layout(u, rank, ranks, by_experts=u.name in apart) for u in on_disk}
    coded = [unit for unit in on_host if values.coded([unit])]
    frozen |= {unit.name: codes_in_memory(unit, values, rank, ranks) for unit in coded}
    if not frozen:
        return None
    # Count the room that each unit takes in memory, and that all of them take on disk.
    units, total = [], 0
    for unit in (*on_disk, *coded):
        read = frozen[unit.name]
        is_kept = unit in on_disk
        # Of a unit on HOST only decoded weights pass through a buffer.
        unread = {n: p for n, p in unit.parameters.items() if is_kept and n not in read.at}
        stored = UnitSizes.of(replace(unit, parameters=unread), ranks).share_bytes
        whole = stored + round_up(read.nbytes, ALIGN)
        units.append(replace(UnitSizes.of(unit, ranks), share_bytes=whole))
        # What is read from the user's files, or decoded, takes no room in the pool's own.
        in_files = bool(read.runs) or read.decoder is not None
        total += round_up(stored, ALIGN) + (0 if in_files else round_up(read.nbytes, ALIGN))
        # Updates that may be undone write to a second place.
        total += round_up(stored, ALIGN) if plan.timing.can_undo and is_kept else 0
    sizes, around = [unit.share_bytes for unit in units], bytes_around(units)
    least = least_in_memory(sizes, around)
    capacity = int(plan.weight_ram_budget or 0) or most_in_memory(sizes, plan.prefetch, around)
    if capacity < least:
        message = (
            f"weight_ram_budget={format_bytes(capacity)} was given for parameters on disk, and"
            f" {MIN_UNITS_IN_MEMORY} units, of which one is computed with and others are updated,"
            f" have {format_bytes(least)}: give at least that, or smaller units."
        )
        raise BudgetError(message)
    named = make_directories(read_paths(request.directory, "dir")) or [choose_directory(total)]
    places = [facts.path for facts in named]
    return DiskPool(BufferPool(places, total, capacity, least), Prefetcher(plan.prefetch), frozen)


def _wait_for_updates_before_reads(
    stored: Iterable[tuple[DTensor, ShardStorage]], optimizer: PlacedOptimizer
) -> None:
    """Block reads of a parameter until its pending update finishes."""
    # Weak: the optimizer has the parameters, whose storages have these functions.
    reference = weakref.ref(optimizer)

    def wait(parameter: torch.Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive.wait([parameter])

    def is_updated(parameter: torch.Tensor) -> bool:
        alive = reference()
        if not isinstance(alive, StowedAdam):
            return True
        return alive._params().is_updated(parameter)  # noqa: SLF001

    for parameter, storage in stored:
        storage.before_read = partial(wait, parameter)
        storage.is_updated = partial(is_updated, parameter)
