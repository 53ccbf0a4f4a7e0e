"""``plan="auto"``: the simplest placement that a budget allows, by arithmetic over sizes."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from tensorstow.base.budget import Budget
from tensorstow.base.errors import BudgetError
from tensorstow.base.plan import Plan
from tensorstow.base.sizes import format_bytes, round_up
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import reaches_device
from tensorstow.fsdp.d2h_queue import MAX_IN_FLIGHT_BYTES
from tensorstow.fsdp.sharding import SHARD_ALIGN
from tensorstow.fsdp.units import Unit
from tensorstow.fsdp.uploads import buffers_of
from tensorstow.io.files import ALIGN
from tensorstow.step.backpressure import WINDOW_BYTES
from tensorstow.tensors.dtensor import rows_per_rank

RING_BYTES = 48 << 20
"""What states on disk pass through, whatever the model's size."""
MIN_UNITS_IN_MEMORY = 3
"""Units on disk that are in memory at once, at least: one is computed with, others are updated."""
_UNITS_AT_ONCE = 2
_STATE_BYTES = {torch.float32: 8, torch.bfloat16: 10}
_WIDEST_STATES = 12


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one rank's share of a model."""

    parameters: int
    gradients: int
    states: int
    largest_unit: int
    """Of all ranks together: what is unsharded at once."""
    largest_share: int
    """Of the unit that has most of it on this rank, padding included."""

    @classmethod
    def of(cls, units: Iterable[Unit], ranks: int) -> "Sizes":
        """Return the sizes of a model.

        Args:
            units: All units, with trained and frozen parameters.
            ranks: Over how many ranks it is sharded.

        Returns:
            Bytes per rank; states are Adam's in the format that loses nothing.
        """
        units = list(units)
        all_of = [p for unit in units for p in unit.parameters.values()]
        trained = [p for p in all_of if p.requires_grad]
        return cls(
            sum(p.numel() * p.element_size() for p in all_of) // ranks,
            sum(p.numel() * p.element_size() for p in trained) // ranks,
            sum(p.numel() * _STATE_BYTES.get(p.dtype, _WIDEST_STATES) for p in trained) // ranks,
            max((unit.nbytes for unit in units), default=0),
            max((_share_of(unit, ranks) for unit in units), default=0),
        )

    @property
    def least_in_memory(self) -> int:
        """Return the host memory, in bytes, that parameters on disk need at least."""
        return MIN_UNITS_IN_MEMORY * (self.largest_share + ALIGN)


def auto_plan(
    sizes: Sizes,
    budget: Budget,
    *,
    device_is_host: bool,
    states: Tier | None = None,
    commits: bool = False,
) -> Plan:
    """Return the first placement that fits a budget.

    Placements are tried in this order:

    1. parameters on DEVICE (HOST where the CPU is the device), states on HOST;
    2. the same, states on DISK behind a ring of 48 MiB;
    3. parameters on HOST, states on HOST; 4. the same, states on DISK;
    5. parameters and states on DISK, three units at a time in memory, and as many more as are
       fetched ahead where there is room (``buffer_pool_bytes``);
    6. the same with overlap="backward", where no more than a window of 64 MiB and one unit of
       gradients wait for their update.

    Gradients are on HOST, wherever they were made.

    Args:
        sizes: Bytes of one rank's share of the model.
        budget: Bytes that each rank may use of each tier.
        device_is_host: Whether the CPU computes.
        states: The tier that the user chose for states; None: any.
        commits: Whether the run commits: it has weights and states on DISK twice, the last commit
            and the next.

    Raises:
        BudgetError: None fits; it says what is short.
    """
    short: dict[Tier, int] = {}
    for plan in _candidates(device_is_host=device_is_host):
        if states not in {None, plan.states}:
            continue  # the user has said where they go
        needed = bytes_of(plan, sizes, device_is_host=device_is_host, commits=commits)
        missing = {t: n for t, n in _missing(needed, budget).items() if n > 0}
        if not missing:
            return _with_disk_buffers(plan, sizes, budget, needed)
        short = missing
    told = " and ".join(f"{format_bytes(n)} of {tier.upper()}" for tier, n in short.items())
    message = (
        f"The model does not fit: placed as low as may be, {told} more than the budget are"
        " needed. Raise the budget, or train on more ranks."
    )
    raise BudgetError(message)


def _candidates(*, device_is_host: bool) -> list[Plan]:
    tiers = [Tier.HOST] if device_is_host else [Tier.DEVICE, Tier.HOST]
    plans = [Plan(parameters=t, states=s) for t in tiers for s in (Tier.HOST, Tier.DISK)]
    on_disk = Plan(parameters=Tier.DISK, states=Tier.DISK)
    return [*plans, on_disk, on_disk.but(overlap="backward")]


def bytes_of(
    plan: Plan, sizes: Sizes, *, device_is_host: bool, commits: bool = False
) -> Mapping[Tier, int]:
    """Return what a plan holds on each tier of one rank, in bytes.

    Args:
        plan: The plan.
        sizes: Bytes of one rank's share of the model.
        device_is_host: Whether the CPU computes; then nothing is on DEVICE.
        commits: Whether the run commits to DISK.
    """
    at_once = _UNITS_AT_ONCE * sizes.largest_unit
    gradients = sizes.gradients
    if plan.overlap == "backward":
        gradients = min(gradients, WINDOW_BYTES + sizes.largest_share)
    held = {Tier.DEVICE: at_once, Tier.HOST: 0, Tier.DISK: 0}
    on_device = plan.parameters == Tier.DEVICE
    if on_device and (plan.overlap == "backward" or reaches_device(plan.update_on)):
        held[Tier.DEVICE] += gradients
    else:
        held[Tier.HOST] += gradients
        if plan.overlap != "backward":
            held[Tier.DEVICE] += min(gradients, MAX_IN_FLIGHT_BYTES)
    if on_device:
        held[Tier.HOST] += sizes.parameters  # the mirrors that updates write
    else:
        _add_staging(held, plan, sizes, device_is_host=device_is_host)
    held[plan.parameters] += sizes.parameters
    if commits:
        held[Tier.DISK] += 2 * (sizes.parameters + sizes.states)
    if not (commits and plan.states == Tier.DISK):
        held[plan.states] += sizes.states
    if plan.states == Tier.DISK:
        held[Tier.HOST] += RING_BYTES
    if device_is_host:
        held[Tier.DEVICE] = 0
    return held


def _add_staging(held: dict[Tier, int], plan: Plan, sizes: Sizes, *, device_is_host: bool) -> None:
    """Add what weights that are not on the device pass through on their way there."""
    on_disk = plan.parameters == Tier.DISK
    buffers = 0 if device_is_host else buffers_of(plan.prefetch) * sizes.largest_share
    held[Tier.DEVICE] += buffers
    held[Tier.HOST] += sizes.least_in_memory + buffers if on_disk else 0


def _with_disk_buffers(
    plan: Plan, sizes: Sizes, budget: Budget, needed: Mapping[Tier, int]
) -> Plan:
    """Let parameters on disk have of HOST what is left of it, and no more than they ask for."""
    limit = budget.bytes_of(Tier.HOST)
    if plan.parameters != Tier.DISK or limit is None:
        return plan
    ahead = min(limit - needed[Tier.HOST], plan.prefetch * (sizes.largest_share + ALIGN))
    return plan.but(buffer_pool_bytes=sizes.least_in_memory + ahead)


def _share_of(unit: Unit, ranks: int) -> int:
    shapes = [(p.shape or (1,), p.element_size()) for p in unit.parameters.values()]
    rows = [(rows_per_rank(s[0], ranks), math.prod(s[1:]), size) for s, size in shapes]
    return sum(round_up(length * width * size, SHARD_ALIGN) for length, width, size in rows)


def _missing(needed: Mapping[Tier, int], budget: Budget) -> dict[Tier, int]:
    limits = {tier: budget.bytes_of(tier) for tier in Tier}
    return {t: needed[t] - limit for t, limit in limits.items() if limit is not None}
