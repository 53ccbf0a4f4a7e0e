"""How much goes over the network between machines in a step.

[Note: Network] Collectives are rings: of N ranks in the order of their machines, each sends
(N - 1) / N of all bytes in an all-gather or a reduce-scatter, and twice that in an all-reduce. A
machine sends over the network what those of its ranks send whose next rank is on another machine.
gloo computes a reduce-scatter as an all-reduce. With replicas, each group of ranks that shard the
model is a ring, and the ranks that have the same shard average their gradients in rings of their
own. With ``ordered_reduce`` each rank sends rows to every rank of every other machine. Figures are
those of the machine that sends most.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from tensorstow.base.plan import Plan
from tensorstow.planner.sizes import Sizes

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
ALL_TO_ALL = "all-to-all"


@dataclass(frozen=True, slots=True)
class Network:
    """The machines of a run, and what connects them."""

    machines: int
    bytes_per_second: float
    """What each machine can send, and at the same time receive."""
    is_gloo: bool = False
    """Whether collectives are gloo's, as on the CPU."""


@dataclass(frozen=True, slots=True)
class NetworkTraffic:
    """The bytes that each machine sends, and receives, in one step, by collective."""

    forward: Mapping[str, int]
    backward: Mapping[str, int]
    update: Mapping[str, int]

    @property
    def by_collective(self) -> dict[str, int]:
        """Return the bytes of the whole step."""
        total: Counter[str] = Counter()
        for phase in (self.forward, self.backward, self.update):
            total.update(phase)
        return dict(total)

    @property
    def bytes(self) -> int:
        """Return the bytes of all collectives."""
        return sum(self.by_collective.values())


def traffic_of(plan: Plan, sizes: Sizes, network: Network) -> NetworkTraffic:
    """Return what each machine sends in a step of ``plan``.

    Args:
        plan: Its stage, accumulation and replicas count.
        sizes: The model, with the number of all ranks.
        network: The machines; ranks are spread over them evenly.
    """
    ranks, groups = sizes.ranks, plan.replicas
    group = ranks // groups
    ring_of_groups, rings_of_replicas = _busiest(ranks, groups, network.machines)
    sharded = ring_of_groups * (group - 1) / group
    # Of replicas, each rank sends parts of its own shard alone.
    replicated = rings_of_replicas * 2 * (groups - 1) / groups / group
    scatter = 2 if network.is_gloo else 1
    units, wide = sizes.units, _is_reduced_wide(plan)
    weights = ranks * sum(unit.share_bytes for unit in units)
    held_bytes = ranks * sum(unit.share_bytes for unit in units if unit.name in plan.unsharded)
    trained = ranks * sum(unit.trained_share_bytes for unit in units)
    widening = _bytes_of(sizes, wide=wide) / max(1, _bytes_of(sizes, wide=False))
    reduced = {REDUCE_SCATTER: int(scatter * sharded * trained * widening)}
    if plan.ordered_reduce is not None:
        on_machine = ranks // network.machines
        reduced = {ALL_TO_ALL: int(on_machine * (ranks - on_machine) / ranks * trained)}
    if groups > 1:
        reduced[ALL_REDUCE] = int(replicated * trained * widening)
    times = plan.accumulation_steps
    if plan.stage == 0:
        ring = _busiest(ranks, 1, network.machines)[0] * 2 * (ranks - 1) / ranks
        whole = times * ring * ranks * _bytes_of(sizes, wide=wide)
        return NetworkTraffic({}, {ALL_REDUCE: int(whole)}, {})
    if plan.stage < 3:
        often = 1 if plan.reduces_with_last else times
        backward = {name: often * nbytes for name, nbytes in reduced.items()}
        return NetworkTraffic({}, backward, {ALL_GATHER: int(sharded * trained)})
    backward = {name: times * nbytes for name, nbytes in reduced.items()}
    # Units in ``unsharded`` are still whole when backward needs them.
    backward[ALL_GATHER] = times * int(sharded * (weights - held_bytes))
    return NetworkTraffic({ALL_GATHER: times * int(sharded * weights)}, backward, {})


def _busiest(ranks: int, groups: int, machines: int) -> tuple[int, int]:
    """Return how many rings of groups, and of replicas, the machine sends for that has most."""
    group, on_machine = ranks // groups, ranks // machines
    rings, averages = [0] * machines, [0] * machines
    for rank in range(ranks):
        machine, first = rank // on_machine, rank // group * group
        following = first + (rank + 1 - first) % group
        rings[machine] += following // on_machine != machine
        averages[machine] += (rank + group) % ranks // on_machine != machine
    most = max(range(machines), key=lambda machine: (rings[machine], averages[machine]))
    return rings[most], averages[most]


def _is_reduced_wide(plan: Plan) -> bool:
    """Return whether gradients wait for later micro-batches in fp32, and are reduced so."""
    return plan.stage <= 1 and plan.accumulation_steps > 1


def _bytes_of(sizes: Sizes, *, wide: bool) -> int:
    """Return the bytes of one rank's gradients, in fp32 if they are reduced ``wide``."""
    return sum((4 if wide else dtype.itemsize) * elements for dtype, elements in sizes.trained)
