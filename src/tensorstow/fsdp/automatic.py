"""``plan="auto"`` in ``stow``: measures the budget, calls the search, logs what it chose."""

import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from tensorstow.base.activation_placement import ActivationPlacement
from tensorstow.base.budget import Budget
from tensorstow.base.directories import check_directory, choose_directory
from tensorstow.base.errors import DirectoryError, OptionError
from tensorstow.base.plan import Plan
from tensorstow.base.profile import Profile, read_profile
from tensorstow.base.sizes import format_bytes, format_count
from tensorstow.base.tiers import Tier
from tensorstow.fsdp.sharding import host_group, join_ranks, world_size
from tensorstow.fsdp.traced_activations import Activations
from tensorstow.fsdp.traced_model import ExampleBatch
from tensorstow.fsdp.units import Unit
from tensorstow.io.device_link import is_remote
from tensorstow.io.local_ranks import local_ranks
from tensorstow.planner.placement import bytes_of
from tensorstow.planner.search import (
    MicroBatching,
    PlanRequest,
    SearchResult,
    fits_with_activations_kept,
    search,
)
from tensorstow.planner.seconds import MachineRates, MicroBatch
from tensorstow.report.run_record import PredictedStep

logger = logging.getLogger("tensorstow")

_TOKENS = 2048
"""Of a micro-batch whose size is not known: enough for an accelerator to be busy."""
_COMPUTE_PART = 0.5
"""Of the free memory of the tier that computes: activations, whose size is not known, take some."""
_OTHER_PART = 0.8
_LIMIT_PART = 0.75
"""Of the device's memory, for what is measured. Fragments take the rest, and steps that need more
than any before."""
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class _Known:
    """What one rank knows of its machine."""

    budget: Budget
    profile: Profile | None
    device_limit: int | None
    """The bytes of an accelerator within which copies of units may stay there."""
    traced: Activations | None
    """Of a micro-batch; None: there is no example of one."""
    tokens: int | None
    """Of a micro-batch; None: they are not known."""


def choose_plan(
    request: PlanRequest,
    units: Sequence[Unit],
    budget: Budget | None,
    device: torch.device,
    directory: str | os.PathLike[str] | None,
    example: ExampleBatch,
) -> tuple[Plan, PredictedStep | None]:
    """Return the plan that ``plan="auto"`` stands for, and log what was chosen, and why.

    Beside it: what is predicted of a step, where rates and the batch are known.

    Ranks agree: each tier has what the rank with least of it has, activations are those of the rank
    with most, and rates are rank 0's.

    Args:
        request: The model and what the user said, without budget and rates.
        units: The model's.
        budget: What the user gave; None: the machine is the budget.
        device: What computes.
        directory: Of states on disk; None: one is chosen.
        example: A micro-batch of one rank.

    Raises:
        BudgetError: No placement fits; it says what is short.
    """
    traced, own = example.trace("keep", device), budget
    if own is None:
        own = machine_budget(units, device, directory, with_activations=traced is not None)
    limit = _device_limit(device) if budget is None else own.bytes_of(Tier.DEVICE)
    known = _agree(_Known(own, read_profile(), limit, traced, example.tokens), device)
    parameters = sum(n for _, n in request.sizes.trained) * request.sizes.ranks
    tokens = known.tokens
    batch = MicroBatch.estimate(parameters, tokens or _TOKENS)
    request = replace(request, budget=known.budget, batch=batch)
    if known.traced is not None:
        request = _with_activations(request, known, example, device)
    found = _search(request, known.profile, device, directory)
    _log(found, request, told="given" if budget is not None else "of this machine")
    plan, timed = found.chosen.plan, found.chosen.step
    step = None
    if timed is not None and tokens is not None:
        step = PredictedStep(timed.seconds, timed.binding)
    if device.type == "cpu" or Tier.HOST not in {plan.parameters, *plan.units.values()}:
        return plan, step
    return plan.but(device_limit=known.device_limit), step


def _with_activations(
    request: PlanRequest, known: _Known, example: ExampleBatch, device: torch.device
) -> PlanRequest:
    """Return a request that counts activations; where they do not fit, with other places for them.

    Collective: the largest of what ranks have traced counts.
    """
    if known.traced is None:
        return request
    tokens = known.tokens or _TOKENS
    conditions = replace(request.conditions, activations=known.traced.held())
    request = replace(request, conditions=conditions, batch=known.traced.micro_batch(tokens))
    if fits_with_activations_kept(request) or not example.has_blocks:
        return request
    placements: tuple[ActivationPlacement, ...] = ("recompute", "disk")
    if device.type != "cpu":
        placements = ("recompute", "host", "disk")
    tried: list[MicroBatching] = []
    found: Activations | None = None
    for placement in placements:
        if device.type == "cpu" or placement != "disk":  # a device has neither: as for "host"
            found = _largest_of_ranks(example.trace(placement, device))
        if found is not None:
            done = found.micro_batch(tokens)
            tried.append(MicroBatching(1, done, found.held(), placement))
    return replace(request, micro_batchings=tuple(tried))


def _largest_of_ranks(traced: Activations | None) -> Activations | None:
    if world_size() == 1:
        return traced
    group = host_group()
    everybody: list[Activations | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, traced, group=group)
    return _largest(everybody)


def _largest(traced: Iterable[Activations | None]) -> Activations | None:
    """Return what takes most memory; None: there is nothing."""
    found = (each for each in traced if each is not None)
    return max(found, key=lambda each: each.peak_bytes, default=None)


def _device_limit(device: torch.device) -> int | None:
    """Return what torch may allocate of an accelerator that is not used by others."""
    if device.type == "cpu":
        return None
    free, _ = torch.accelerator.get_memory_info(device)
    return int(_LIMIT_PART * (free + torch.accelerator.memory_reserved(device)))


def machine_budget(
    units: Iterable[Unit],
    device: torch.device,
    directory: str | os.PathLike[str] | None,
    *,
    with_activations: bool = False,
) -> Budget:
    """Return what one rank may use of this machine: parts of what is free now.

    Args:
        units: The model's, whose parameters' memory is free for them.
        device: What computes.
        directory: Of states on disk; None: one is chosen.
        with_activations: Whether activations are counted, and need no room beside the budget.
    """
    part = _OTHER_PART if with_activations else _COMPUTE_PART
    ranks = local_ranks().count
    here = device.type == "cpu"
    parameters = [p for unit in units for p in unit.parameters.values()]
    own = sum(p.nbytes for p in parameters if p.device.type == "cpu")
    host = (part if here else _OTHER_PART) * (free_host_bytes() / ranks + own)
    there = None
    if not here:
        free, _ = torch.accelerator.get_memory_info(device)
        there = int(part * (free + sum(p.nbytes for p in parameters if is_remote(p))))
    try:
        facts = choose_directory() if directory is None else check_directory(Path(directory))
    except DirectoryError:  # it is not made yet, or none will do: whoever opens it says why
        return Budget(there, int(host), None if directory is not None else 0)
    return Budget(there, int(host), int(_OTHER_PART * facts.free_bytes / ranks))


def free_host_bytes() -> int:
    """Return the host memory that this process may still take, by the system and its cgroup."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _read(_MEMINFO), re.MULTILINE)
    free = (
        int(found[1]) << 10 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    )
    limit, used = _read(_CGROUP / "memory.max").strip(), _read(_CGROUP / "memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        free = min(free, max(int(limit) - int(used), 0))
    return free


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""


def _agree(own: _Known, device: torch.device) -> _Known:
    """Return what all ranks can use. Collective."""
    if world_size() == 1:
        return own
    join_ranks(device)
    group = host_group()
    everybody: list[_Known] = [own for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everybody, own, group=group)
    least = {}
    for tier in Tier:
        sizes = [n for each in everybody if (n := each.budget.bytes_of(tier)) is not None]
        least[str(tier)] = min(sizes, default=None)
    limits = [each.device_limit for each in everybody if each.device_limit is not None]
    first, limit = everybody[0], min(limits, default=None)
    traced = _largest(each.traced for each in everybody)
    return _Known(Budget(**least), first.profile, limit, traced, first.tokens)


def _search(
    request: PlanRequest,
    profile: Profile | None,
    device: torch.device,
    directory: str | os.PathLike[str] | None,
) -> SearchResult:
    if profile is None:
        logger.info("no rates of this machine are known: `tensorstow calibrate` measures them")
        return search(request)
    disk = profile.rates_of(None if directory is None else Path(directory))
    machine = MachineRates(profile, device.type, disk)
    try:
        return search(replace(request, machine=machine))
    except OptionError as error:
        logger.info('plan="auto" looks at bytes only: %s', error)
        return search(request)


def _log(found: SearchResult, request: PlanRequest, *, told: str) -> None:
    """Log one table: what was chosen, what it holds, and why the others were not."""
    plan = found.chosen.plan
    lines = [f'plan="auto" chose {_name(plan)}, within the memory {told}:']
    for tier, nbytes in bytes_of(plan, request.sizes, found.chosen.conditions).items():
        limit = request.budget.bytes_of(tier)
        most = "no limit" if limit is None else format_bytes(limit)
        lines.append(f"  {tier:<8}{format_bytes(nbytes):>12} of {most}")
    if not request.conditions.activations.peak:
        room = "let budget= leave room for them" if told == "given" else "they have the other half"
        where = request.conditions.compute_tier
        lines.append(f"  activations on {where} are not counted without batch=: {room}")
    lines += [
        f"  not {_name(each.plan)}: {found.reason(each)}"
        for each in found.distinct()
        if each is not found.chosen
    ]
    left_out = len(found.tried) - len(found.distinct())
    if left_out:
        lines.append(f"  nor {left_out:,} variants of these that gain less than 2%")
    logger.info("\n".join(lines))


def _name(plan: Plan) -> str:
    """Return what tells a plan from the others that were tried."""
    told = f"parameters={plan.parameters}"
    for tier in dict.fromkeys(plan.units.values()):
        there = list(plan.units.values()).count(tier)
        told += f" ({format_count(there, 'unit')} on {tier})"
    told += f", states={plan.states}, overlap={plan.overlap}"
    for name in ("update_on", "ram_budget"):
        if (value := getattr(plan, name)) is not None:
            told += f", {name}={value}"
    if plan.activations != "keep":
        told += f", activations={plan.activations}"
    return told
