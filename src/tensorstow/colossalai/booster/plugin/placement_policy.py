"""Gemini's placement policies, as plans: what of a model is on the device, and what is not."""

from collections.abc import Sequence
from dataclasses import dataclass

from tensorstow.base.errors import OptionError
from tensorstow.base.plan import Plan
from tensorstow.base.tiers import Tier
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
        name: "static", whose fractions are those given; "cuda", all on the device; "cpu", "const"
            and "auto", all in host memory.
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
) -> Plan:
    """Return the plan that a policy means.

    Args:
        policy: The policy.
        sizes: The model, as one rank's share.
        device_is_host: Whether the CPU computes: then the device's memory is the host's.
        states_on_disk: Whether the optimizer keeps states on disk.
        replicas: Groups of ranks that each hold a full copy (``extra_dp_size``).
        prefetch: Units that are copied to the device ahead (``max_prefetch``).

    Returns:
        The plan; units are in host memory such that their bytes are nearest to the fraction asked.

    Raises:
        OptionError: A part of the parameters is to be sharded and another is not.
    """
    shard, _, offload = policy.fractions
    if shard not in {0.0, 1.0}:
        message = (
            f"shard_param_frac={shard} was given: all parameters are sharded (1.0, ZeRO stage 3) or"
            " none (0.0, stage 2). Use one of these."
        )
        raise OptionError(message)
    below = {u.name for u in sizes.units} if device_is_host else offloaded(sizes.units, offload)
    most = Tier.HOST if len(below) == len(sizes.units) else Tier.DEVICE
    return Plan(
        parameters=most,
        states=Tier.DISK if states_on_disk else Tier.HOST,
        units={} if most == Tier.HOST else dict.fromkeys(sorted(below), Tier.HOST),
        stage=3 if shard else 2,
        replicas=replicas,
        prefetch=_const_prefetch(sizes.units) if policy.name == "const" else prefetch,
    )


def offloaded(units: Sequence[UnitSizes], fraction: float) -> set[str]:
    """Return the names of the units whose bytes are nearest to a fraction of all.

    Args:
        units: The units.
        fraction: 0 to 1.

    Returns:
        Names: the largest units that fit, and one more where that is nearer.
    """
    wanted = fraction * sum(unit.share_bytes for unit in units)
    chosen: set[str] = set()
    by_size = sorted(units, key=lambda unit: unit.share_bytes, reverse=True)
    for unit in by_size:
        if unit.share_bytes <= wanted:
            chosen.add(unit.name)
            wanted -= unit.share_bytes
    left = [unit for unit in by_size if unit.name not in chosen and unit.share_bytes]
    if left and left[-1].share_bytes - wanted < wanted:
        chosen.add(left[-1].name)
    return chosen


def _const_prefetch(units: Sequence[UnitSizes]) -> int:
    """Return how many units are copied ahead where all buffers together have ``CONST_BYTES``."""
    largest = max((unit.share_bytes for unit in units), default=0)
    return min(max(CONST_BYTES // max(largest, 1) - 1, 0), len(units))
