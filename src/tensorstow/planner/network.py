"""How much goes over the network between machines in a step.

[Note: Network] Collectives are rings: of N ranks in the order of their machines, each sends
(N - 1) / N of all bytes in an all-gather or a reduce-scatter, and twice that in an all-reduce. A
machine sends over the network what the last of its ranks sends to the next machine. gloo computes
a reduce-scatter as an all-reduce. With replicas, each group of ranks that shard the model is a
ring, and the groups average their gradients by all-reduce.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tensorstow.base.plan import Plan
from tensorstow.planner.sizes import Sizes

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"


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
        total: dict[str, int] = {}
        for phase in (self.forward, self.backward, self.update):
            for name, nbytes in phase.items():
                total[name] = total.get(name, 0) + nbytes
        return total

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
    if network.machines == 1:
        return NetworkTraffic({}, {}, {})
    groups, on_machine = plan.replicas, sizes.ranks // network.machines
    group = sizes.ranks // groups  # ranks that shard the model
    ring = (group - 1) / group if group > on_machine else 0.0  # else it is within a machine
    # Each rank averages its share with the other groups, beside the other ranks of its machine.
    averaged = 2 * (groups - 1) / groups * min(group, on_machine) / group
    scatter = 2 if network.is_gloo else 1
    weights = sum(unit.share_bytes for unit in sizes.units) * sizes.ranks
    kept = sum(u.share_bytes for u in sizes.units if u.name in plan.unsharded) * sizes.ranks
    gradients = sizes.gradient_bytes * sizes.ranks
    times = plan.accumulation_steps
    gather = {ALL_GATHER: int(ring * weights)}
    reduce = {REDUCE_SCATTER: int(scatter * ring * gradients)}
    average = {ALL_REDUCE: int(averaged * gradients)} if groups > 1 else {}
    if plan.stage == 0:
        reduced = int(2 * (sizes.ranks - 1) / sizes.ranks * gradients)
        return NetworkTraffic({}, {ALL_REDUCE: times * reduced}, {})
    if plan.stage == 1:
        return NetworkTraffic({}, reduce | average, gather)
    reduce_all = {name: times * nbytes for name, nbytes in (reduce | average).items()}
    if plan.stage == 2:
        return NetworkTraffic({}, reduce_all, gather)
    again = {ALL_GATHER: times * int(ring * (weights - kept))}
    return NetworkTraffic({ALL_GATHER: times * gather[ALL_GATHER]}, again | reduce_all, {})
