"""Translates Gemini's placement policies to plans."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from tensorstow.base.errors import OptionError
from tensorstow.base.plan import Plan
from tensorstow.base.tiers import Tier
from tensorstow.fsdp.units import Unit
from tensorstow.planner.sizes import Sizes, UnitSizes

_FRACTIONS = {"cuda": (1.0, 0.0, 0.0), "cpu": (1.0, 1.0, 1.0), "const": (1.0, 1.0, 1.0)}
_FRACTIONS["auto"] = _FRACTIONS["cpu"]
POLICIES = ("static", *_FRACTIONS)
CONST_BYTES = 512 << 20
"""Under "const": what parameters on their way to the device may take there, as upstream's."""


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """Which fractions of a model are sharded, and which are not on the device.

    Args:
        name: "static", whose fractions are those given; "cuda", all on the device; "cpu" and
            "const", all in host memory; "auto", all in host memory, and copies of parameters stay
            on the device where there is room, as measured.
        shard_param: The fraction of the parameters' bytes that is sharded: 1 is ZeRO stage 3, 0 is
            stage 2.
        offload_optim: The fraction of the states' bytes that is in host memory.
        offload_param: The fraction of the parameters' bytes that is in host memory.

    Raises:
        OptionError: A name or a fraction that is none, or fractions beside a name that has its own.
    """

    name: str = "static"
    shard_param: float = 1.0
    offload_optim: float = 0.0
    offload_param: float = 0.0

    def __post_init__(self) -> None:
        """Check the values; raises OptionError."""
        if self.name not in POLICIES:
            known = ", ".join(f'"{name}"' for name in POLICIES)
            message = f"placement_policy={self.name!r} was given: it is one of {known}."
            raise OptionError(message)
        for name in ("shard_param", "offload_optim", "offload_param"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                message = f"{name}_frac={value!r} was given: it is a number between 0 and 1."
                raise OptionError(message)
        given = (self.shard_param, self.offload_optim, self.offload_param)
        if self.name != "static" and given != (1.0, 0.0, 0.0):
            message = (
                f"Fractions {given} were given with placement_policy={self.name!r}, which has its"
                ' own: leave them out, or use placement_policy="static".'
            )
            raise OptionError(message)
        if self.offload_param > self.offload_optim:
            message = (
                f"offload_param_frac={self.offload_param} was given with offload_optim_frac="
                f"{self.offload_optim}: parameters in host memory have their states there. Give"
                " offload_optim_frac at least the same."
            )
            raise OptionError(message)

    @property
    def fractions(self) -> tuple[float, float, float]:
        """What is sharded, and what of states and of parameters is in host memory."""
        own = (self.shard_param, self.offload_optim, self.offload_param)
        return _FRACTIONS.get(self.name, own)


def plan_of(
    policy: PlacementPolicy,
    sizes: Sizes,
    *,
    device_is_host: bool,
    states_on_disk: bool,
    replicas: int,
    prefetch: int,
    device_limit: int = 0,
) -> Plan:
    """Return the plan of a policy.

    Args:
        policy: The policy.
        sizes: The model, as one rank's share.
        device_is_host: Whether the CPU computes: then the device's memory is the host's.
        states_on_disk: Whether the optimizer keeps states on disk.
        replicas: Groups of ranks that each hold a full copy (``extra_dp_size``).
        prefetch: Units that are copied to the device ahead (``max_prefetch``); 0: none, and under
            "const" as many as ``CONST_BYTES`` hold.
        device_limit: Under "auto" the bytes of the device within which copies of parameters stay.

    Returns:
        The plan; units are in host memory, and unsharded, such that their bytes are nearest to the
        fractions asked.
    """
    shard, _, offload = policy.fractions
    whole = {unit.name: unit.whole_bytes for unit in sizes.units}
    shares = {unit.name: unit.share_bytes for unit in sizes.units}
    below = set(shares) if device_is_host else nearest(shares, offload * sum(shares.values()))
    if offload == 1.0:
        below = set(shares)  # units of no bytes too
    most = Tier.HOST if len(below) == len(sizes.units) else Tier.DEVICE
    return Plan(
        parameters=most,
        states=Tier.DISK if states_on_disk else Tier.HOST,
        units={} if most == Tier.HOST else dict.fromkeys(sorted(below), Tier.HOST),
        stage=3 if shard else 2,
        unsharded=sorted(nearest(whole, (1 - shard) * sum(whole.values()))) if shard else (),
        replicas=replicas,
        prefetch=prefetch or (_const_prefetch(sizes.units) if policy.name == "const" else 0),
        device_limit=device_limit if policy.name == "auto" and not device_is_host else None,
    )


def fitting(sizes: Mapping[str, int], room: int) -> set[str]:
    """Return the names whose sizes fit into a room together, the largest that fit first.

    Args:
        sizes: Sizes by name.
        room: The largest sum; 0: nothing fits.

    Returns:
        The names.
    """
    chosen: set[str] = set()
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        if 0 < sizes[name] <= room:
            chosen.add(name)
            room -= sizes[name]
    return chosen


_SUMS = 100_000
"""Sums that are told apart."""


def nearest(sizes: Mapping[str, int], wanted: float) -> set[str]:
    """Return the names whose sizes are together nearest to what is wanted.

    Args:
        sizes: Sizes by name.
        wanted: A sum of some of them, about.

    Returns:
        The names; of equally near sums the lower one's, with the largest that may be in it. Sizes
        are rounded to a part in 100,000 of all where they have no common divisor that is larger.
    """
    names = sorted((name for name in sizes if sizes[name]), reverse=True)
    names.sort(key=lambda name: sizes[name])  # what comes last is taken first
    total = sum(sizes.values())
    step = max(gcd(*sizes.values()), -(-total // _SUMS), 1)
    steps = [round(sizes[name] / step) for name in names]
    sums = [1]  # bit n: n steps are the sum of some of the names before
    for each in steps:
        sums.append(sums[-1] | sums[-1] << each)
    aim = min(max(wanted / step, 0), sum(steps))
    at = min(_bits_beside(sums[-1], int(aim)), key=lambda n: (abs(n - aim), n))
    chosen = set()
    for number in reversed(range(len(names))):
        if at >= steps[number] and sums[number] >> (at - steps[number]) & 1:
            chosen.add(names[number])
            at -= steps[number]
    return chosen


def _bits_beside(bits: int, place: int) -> list[int]:
    """Return the place of the last bit that is set up to ``place``, and of the first behind it."""
    found = [(bits & ((2 << place) - 1)).bit_length() - 1]
    behind = bits >> (place + 1)
    if behind:
        found.append(place + (behind & -behind).bit_length())
    return found


def states_off_device(policy: PlacementPolicy, units: Sequence[Unit], plan: Plan) -> set[str]:
    """Return the parameters whose states are in host memory, by name.

    Args:
        policy: The policy.
        units: The model's units.
        plan: Where their parameters are; states of those in host memory are there too.

    Returns:
        Names of trained parameters whose bytes are nearest to ``offload_optim`` of all.
    """
    trained = {
        name: parameter.numel()
        for unit in units
        for name, parameter in unit.parameters.items()
        if parameter.requires_grad
    }
    below = {
        name
        for unit in units
        if plan.tier_of(unit.name) != Tier.DEVICE
        for name in unit.parameters
        if name in trained
    }
    _, offload, _ = policy.fractions
    rest = {name: size for name, size in trained.items() if name not in below}
    wanted = offload * sum(trained.values()) - sum(trained[name] for name in below)
    return below | nearest(rest, wanted)


def _const_prefetch(units: Sequence[UnitSizes]) -> int:
    """Return how many units are copied ahead where all buffers together have ``CONST_BYTES``."""
    largest = max((unit.share_bytes for unit in units), default=0)
    return min(max(CONST_BYTES // max(largest, 1) - 1, 0), len(units))
