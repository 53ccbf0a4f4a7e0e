"""``plan="auto"`` in ``stow``: measures the budget, calls the search, logs the chosen plan."""

import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from tensorstow.base import notices
from tensorstow.base.activation_placement import ActivationPlacement
from tensorstow.base.budget import Budget
from tensorstow.base.cores import read_or_empty
from tensorstow.base.directories import check_directory, choose_directory
from tensorstow.base.errors import DirectoryError
from tensorstow.base.launch import launched
from tensorstow.base.plan import Plan
from tensorstow.base.profile import Profile, drive_shares, read_profile
from tensorstow.base.regular_file import memory_bytes
from tensorstow.base.sizes import Bytes, format_bytes, format_count
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import is_auto, is_update_on
from tensorstow.formats.state_format import StateFormat
from tensorstow.fsdp.initialization import InitialValues
from tensorstow.fsdp.placed_activations import blocks_with_activations
from tensorstow.fsdp.sharding import backend_of, from_every_rank, join_ranks, rank_here, world_size
from tensorstow.fsdp.traced_activations import Activations
from tensorstow.fsdp.traced_model import ExampleBatch
from tensorstow.fsdp.traced_placement import KEPT, TracedPlacement, placed_elsewhere
from tensorstow.fsdp.units import Unit
from tensorstow.fsdp.validation import OptimizerFactory, accepts, given_keywords
from tensorstow.io.allocator import memory_limit, room_below_limit
from tensorstow.io.device_link import is_remote
from tensorstow.io.local_ranks import local_ranks
from tensorstow.planner.headroom import usual_headroom
from tensorstow.planner.placement import Conditions, bytes_of
from tensorstow.planner.search import (
    MicroBatching,
    PlanRequest,
    SearchResult,
    search_by_rates,
    with_placed_activations,
)
from tensorstow.planner.seconds import MachineRates, MicroBatch
from tensorstow.planner.sizes import Sizes
from tensorstow.report.run_record import PredictedStep

logger = logging.getLogger("tensorstow")

_TOKENS = 2048
"""Tokens of a micro-batch whose size is not known: enough to keep an accelerator busy."""
_COMPUTE_PART = 0.5
"""Share of the free memory of the tier that computes: activations of unknown size take the rest."""
_DISK_PART = 0.8
"""Share of the free disk space: other files grow too."""
_LIMIT_PART = 0.75
"""Share of the device's memory that measured bytes may take. The rest is for fragmentation, and for
steps that need more than any before."""
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class _RankFacts:
    """The memory, the rates and the batch of one rank."""

    budget: Budget
    profile: Profile | None
    device_budget: int | None
    """The bytes of an accelerator within which copies of units may stay on it."""
    traced: Activations | None
    """Activations of a micro-batch; None: no example batch was passed."""
    tokens: int | None
    """Tokens of a micro-batch; None: their number is not known."""


def plan_request(
    units: Sequence[Unit],
    device: torch.device,
    mesh: DeviceMesh | None,
    optimizer: OptimizerFactory,
    directories: Sequence[Path],
    values: InitialValues,
) -> PlanRequest:
    """Return the input of ``plan="auto"``, with the optimizer's keywords.

    ``values``: the first values, whose files may have weights as codes.
    """
    ranks = world_size() if mesh is None else mesh.size(mesh.ndim - 1)
    keywords = given_keywords(optimizer)
    states = Tier.named(keywords.get("states"))
    if states is Tier.DEVICE:
        Plan(states=states)  # raises OptionError: no plan has states there
    name = keywords.get("state_format")
    state_format = StateFormat(name) if name in set(StateFormat) else None  # else AdamW refuses it
    is_cpu, update_on = device.type == "cpu", keywords.get("update_on")
    is_durable = keywords.get("durability") != "none"
    # None lets the search choose, for an optimizer that has the keyword.
    overlap = keywords.get("overlap", None if accepts(optimizer, "overlap") else "none")
    overlap = None if is_auto(overlap) else overlap
    commits = is_durable and (bool(directories) or keywords.get("dir") is not None)
    return PlanRequest(
        Sizes.of(units, ranks, values.coded_bytes(units, ranks)),
        Budget(),
        Conditions(
            is_cpu,
            commits=commits,
            state_format=state_format,
            averages=keywords.get("ema") is not None,
            states=states,
        ),
        Plan(accumulation_steps=keywords.get("accumulation_steps", 1)),
        overlap,
        spend="ram_budget" not in keywords and accepts(optimizer, "ram_budget"),
        on_device=accepts(optimizer, "update_on"),
        update_on=None if is_cpu or not is_update_on(update_on) else update_on,
    )


def choose_plan(
    request: PlanRequest,
    example: ExampleBatch,
    budget: Budget | None,
    device: torch.device,
    directories: Sequence[Path],
) -> tuple[Plan, PredictedStep | None]:
    """Return the plan that ``plan="auto"`` stands for, and log what was chosen, and why.

    Also return the prediction for a step, if rates and the batch are known. ``request`` has the
    user's options, without budget and rates; without a budget the machine is the budget.

    Ranks agree: each tier has the memory of the rank with least of it, activations are those of the
    rank with most, and rates are rank 0's.
    """
    traced, memory = example.trace(KEPT), budget
    if memory is None:
        counted = traced is not None
        memory = machine_budget(example.units, device, directories, with_activations=counted)
    limit = _device_limit(device) if budget is None else memory.bytes_of(Tier.DEVICE)
    facts = _agree(_RankFacts(memory, read_profile(), limit, traced, example.tokens), device)
    parameters = sum(n for _, n in request.sizes.trained) * request.sizes.ranks
    tokens = facts.tokens
    batch = MicroBatch.estimate(parameters, tokens or _TOKENS)
    request = replace(request, budget=facts.budget, batch=batch)
    request = _with_activations(request, facts, example, device)
    machine = _machine(facts.profile, device, directories)
    result, why_unknown = search_by_rates(request, machine)
    if why_unknown is not None:
        logger.info('plan="auto" looks at bytes only: %s', why_unknown)
    _log(result, request, source="given" if budget is not None else "of this machine")
    plan, timed = result.chosen.plan, result.chosen.step
    step = None
    if timed is not None and tokens is not None:
        step = PredictedStep(timed.seconds, timed.binding)
    # Only units in host memory have copies that may stay on an accelerator.
    if device.type == "cpu" or Tier.HOST not in plan.parameter_tiers:
        return plan, step
    return plan.but(device_budget=facts.device_budget), step


def _with_activations(
    request: PlanRequest, facts: _RankFacts, example: ExampleBatch, device: torch.device
) -> PlanRequest:
    """Return a request that counts activations, with other placements if they do not fit.

    Collective: the largest activations of all ranks count.
    """
    # All ranks agree on ``facts``: all of them trace below, which is collective, or none does.
    if facts.traced is None:
        return request
    tokens = facts.tokens or _TOKENS
    conditions = replace(request.conditions, activations=facts.traced.held())
    request = replace(request, conditions=conditions, batch=facts.traced.micro_batch(tokens))
    if not blocks_with_activations(example.units):
        return request

    def trace(placed: TracedPlacement) -> Iterator[MicroBatching]:
        traced = _largest(from_every_rank(example.trace(placed)))
        if traced is not None:
            yield MicroBatching(1, traced.micro_batch(tokens), traced.held())

    elsewhere = placed_elsewhere(trace, device_is_host=device.type == "cpu")
    return with_placed_activations(request, elsewhere)


def _largest(traced: Iterable[Activations | None]) -> Activations | None:
    """Return the activations with the highest peak; None if no rank has traced any."""
    present = (activations for activations in traced if activations is not None)
    return max(present, key=lambda activations: activations.peak_bytes, default=None)


def _device_limit(device: torch.device) -> Bytes | None:
    """Return the bytes of an accelerator, without those of other processes, that torch may use."""
    if device.type == "cpu":
        return None
    free, _ = torch.accelerator.get_memory_info(device)
    # The driver does not count as free what torch has reserved, and torch uses that again.
    return Bytes(_LIMIT_PART * (free + torch.accelerator.memory_reserved(device)))


def machine_budget(
    units: Iterable[Unit],
    device: torch.device,
    directories: Sequence[Path],
    *,
    with_activations: bool = False,
) -> Budget:
    """Return the memory of this machine that one rank may use: what is free now, less headroom.

    The memory of the units' parameters counts as free. ``with_activations``: activations are
    counted, and need no memory outside the budget.
    """
    part = 1.0 if with_activations else _COMPUTE_PART
    ranks = local_ranks().count
    on_cpu = device.type == "cpu"
    headroom = usual_headroom(device_is_host=on_cpu)
    parameters = [p for unit in units for p in unit.parameters.values()]
    parameter_bytes = sum(p.nbytes for p in parameters if p.device.type == "cpu")
    available = free_host_bytes() / ranks + parameter_bytes
    limit = memory_limit()  # of all that the process has, as a budget with its headroom is
    host = headroom[Tier.HOST].within(available if limit is None else min(available, limit))
    host = int(part * host) if on_cpu else host
    device_bytes = None
    if not on_cpu:
        free, _ = torch.accelerator.get_memory_info(device)
        free += sum(p.nbytes for p in parameters if is_remote(p))
        device_bytes = Bytes(part * headroom[Tier.DEVICE].within(free))
    try:
        facts = [check_directory(path) for path in directories] or [choose_directory()]
    except DirectoryError:  # opening it raises the error with the reason
        return Budget(device_bytes, Bytes(host), None if directories else 0)
    # Directories on one device share its free space, so their parts of the bytes add up.
    shares = dict.fromkeys((of_one.mount.device for of_one in facts), 0.0)
    for of_one, share in zip(facts, drive_shares(directories) or [1.0], strict=True):
        shares[of_one.mount.device] += share
    # Each device takes its part of all bytes: the device that is full first bounds them.
    room = min(of_one.free_bytes / shares[of_one.mount.device] for of_one in facts)
    return Budget(device_bytes, Bytes(host), Bytes(_DISK_PART * room / ranks))


def total_host_bytes() -> int:
    """Return the memory of this machine, or what the cgroup allows of it."""
    limit = read_or_empty(_CGROUP / "memory.max").strip()
    return min(memory_bytes(), int(limit)) if limit.isdecimal() else memory_bytes()


def own_host_bytes(ranks: int) -> int:
    """Return the host memory that one of a machine's ``ranks`` may still take."""
    share, room = free_host_bytes() // ranks, room_below_limit()
    return share if room is None else min(share, room)


def free_host_bytes() -> int:
    """Return the host memory that the system and the cgroup still allow this process."""
    line = re.search(r"^MemAvailable:\s+(\d+) kB$", read_or_empty(_MEMINFO), re.MULTILINE)
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    # MemAvailable has what the kernel can reclaim, which the number of free pages lacks.
    free = int(line[1]) << 10 if line else pages
    limit = read_or_empty(_CGROUP / "memory.max").strip()
    used = read_or_empty(_CGROUP / "memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        free = min(free, max(int(limit) - int(used), 0))
    return free


def _agree(local: _RankFacts, device: torch.device) -> _RankFacts:
    """Return the facts that hold on every rank. Collective."""
    if world_size() == 1:
        return local
    # Without a process group from_every_rank() would return this rank's facts alone.
    join_ranks(launched(), backend_of(device))
    by_rank = from_every_rank(local)
    least = {}
    for tier in Tier:
        sizes = [n for facts in by_rank if (n := facts.budget.bytes_of(tier)) is not None]
        least[str(tier)] = min(sizes, default=None)
    limits = [facts.device_budget for facts in by_rank if facts.device_budget is not None]
    first, limit = by_rank[0], min(limits, default=None)
    traced = _largest(facts.traced for facts in by_rank)
    return _RankFacts(Budget(**least), first.profile, limit, traced, first.tokens)


def _machine(
    profile: Profile | None, device: torch.device, directories: Sequence[Path]
) -> MachineRates | None:
    if profile is None:
        logger.info("no rates of this machine are known: `tensorstow calibrate` measures them")
        return None
    return MachineRates(profile, device.type, profile.rates_over(directories))


def _log(result: SearchResult, request: PlanRequest, *, source: str) -> None:
    """Log one table: the chosen plan, its bytes by tier, and why each other plan was not chosen.

    Rank 0 also shows the chosen plan if the program has not set up logging.
    """
    plan = result.chosen.plan
    chose = f'plan="auto" chose {_name(plan)}, within the memory {source}:'
    held = []
    for tier, nbytes in bytes_of(plan, request.sizes, result.chosen.conditions).items():
        limit = request.budget.bytes_of(tier)
        held.append(
            (tier, format_bytes(nbytes), "no limit" if limit is None else format_bytes(limit))
        )
    if rank_here() == 0:
        notices.show(f"{chose} {', '.join(f'{tier} {has} of {most}' for tier, has, most in held)}")
    lines = [chose, *(f"  {tier:<8}{has:>12} of {most}" for tier, has, most in held)]
    if not request.conditions.activations.peak:
        advice = "let budget= leave room for them"
        room = advice if source == "given" else "they have the other half"
        tier = request.conditions.compute_tier
        lines.append(f"  activations on {tier} are not counted without batch=: {room}")
    lines += [
        f"  not {_name(candidate.plan)}: {result.reason(candidate)}"
        for candidate in result.distinct()
        if candidate is not result.chosen
    ]
    left_out = len(result.tried) - len(result.distinct())
    if left_out:
        lines.append(f"  nor {left_out:,} variants of these that gain less than 2%")
    logger.info("\n".join(lines))


def _name(plan: Plan) -> str:
    """Return the fields that distinguish a plan from the others that were tried."""
    fields = f"parameters={plan.parameters}"
    for tier in dict.fromkeys(plan.parameter_units.values()):
        count = list(plan.parameter_units.values()).count(tier)
        fields += f" ({format_count(count, 'unit')} on {tier})"
    fields += f", states={plan.states}, overlap={plan.overlap}"
    for name in ("update_on", "ram_budget"):
        if (value := getattr(plan, name)) is not None:
            fields += f", {name}={value}"
    if plan.activations is not ActivationPlacement.KEEP:
        fields += f", activations={plan.activations}"
    return fields
