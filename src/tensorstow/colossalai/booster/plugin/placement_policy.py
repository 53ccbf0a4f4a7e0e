"""Translates Gemini's placement policies to plans."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from tensorstow.base.errors import OptionError
from tensorstow.base.fields import Share, read_value
from tensorstow.base.plan import Plan
from tensorstow.base.tiers import Tier
from tensorstow.colossalai.booster.plugin.place_model import PlacementRequest
from tensorstow.fsdp.units import Unit
from tensorstow.planner.sizes import UnitSizes

_FRACTIONS = {"cuda": (1.0, 0.0, 0.0), "cpu": (1.0, 1.0, 1.0), "const": (1.0, 1.0, 1.0)}
_FRACTIONS["auto"] = _FRACTIONS["cpu"]
POLICIES = ("static", *_FRACTIONS)
CONST_BYTES = 512 << 20
"""Bytes of the device for parameters in transfer to it under "const", as upstream's."""


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """The fractions of a model that are sharded, and that are not on the device.

    Args:
        name: "static", with the fractions below; "cuda", all on the device; "cpu" and "const", all
            in host memory; "auto", all in host memory, and copies of parameters stay on the device
            as far as measured memory allows.
        shard_param: The fraction of the parameters' bytes that is sharded: 1 is ZeRO stage 3, 0 is
            stage 2.
        offload_optim: The fraction of the states' bytes that is in host memory.
        offload_param: The fraction of the parameters' bytes that is in host memory.

    Raises:
        OptionError: An unknown name, a fraction out of range, or fractions with another name than
            "static".
    """

    name: str = "static"
    shard_param: float = 1.0
    offload_optim: float = 0.0
    offload_param: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in POLICIES:
            names = ", ".join(f'"{name}"' for name in POLICIES)
            message = f"placement_policy={self.name!r} was given: it must be one of {names}."
            raise OptionError(message)
        for name in ("shard_param", "offload_optim", "offload_param"):
            read_value(Share, getattr(self, name), f"{name}_frac")
        fractions = (self.shard_param, self.offload_optim, self.offload_param)
        if self.name != "static" and fractions != (1.0, 0.0, 0.0):
            message = (
                f"Fractions {fractions} were given with placement_policy={self.name!r}, which has"
                ' its own: leave them out, or use placement_policy="static".'
            )
            raise OptionError(message)
        if self.offload_param > self.offload_optim:
            message = (
                f"offload_param_frac={self.offload_param} was given with offload_optim_frac="
                f"{self.offload_optim}: states of parameters in host memory are in host memory too."
                " Set offload_optim_frac at least as high."
            )
            raise OptionError(message)

    @property
    def fractions(self) -> tuple[float, float, float]:
        """The sharded fraction, and the fractions of states and parameters in host memory."""
        fields = (self.shard_param, self.offload_optim, self.offload_param)
        return _FRACTIONS.get(self.name, fields)


def plan_of(
    policy: PlacementPolicy,
    asked: PlacementRequest,
    *,
    replicas: int = 1,
    prefetch: int = 0,
    device_budget: int = 0,
) -> Plan:
    """Return the plan of a policy for a model.

    The bytes of units in host memory, and of unsharded units, are nearest to the policy's
    fractions. Where the CPU computes the device's memory is the host's.
    ``prefetch`` 0 is none, and under "const" as many units as ``CONST_BYTES`` hold.
    ``device_budget`` is the bytes of the device that copies of parameters may fill under "auto".
    """
    shard, _, offload = policy.fractions
    sizes, device_is_host = asked.sizes, asked.device_is_host
    whole = {unit.name: unit.whole_bytes for unit in sizes.units}
    shares = {unit.name: unit.share_bytes for unit in sizes.units}
    below = set(shares) if device_is_host else nearest(shares, offload * sum(shares.values()))
    if offload == 1.0:
        below = set(shares)  # units without bytes too
    most = Tier.HOST if len(below) == len(sizes.units) else Tier.DEVICE
    return Plan(
        parameters=most,
        states=asked.states,
        parameter_units={} if most == Tier.HOST else dict.fromkeys(sorted(below), Tier.HOST),
        stage=3 if shard else 2,
        unsharded=sorted(nearest(whole, (1 - shard) * sum(whole.values()))) if shard else (),
        replicas=replicas,
        prefetch=prefetch or (_const_prefetch(sizes.units) if policy.name == "const" else 0),
        device_budget=device_budget if policy.name == "auto" and not device_is_host else None,
    )


_SUMS = 100_000
"""Number of sums that ``nearest`` distinguishes."""


def nearest(sizes: Mapping[str, int], wanted: float) -> set[str]:
    """Return the names whose sizes have the sum nearest to ``wanted``.

    Of equally near sums it is the lower one, with its largest sizes. Sizes are rounded to a part in
    100,000 of the total unless they have a larger common divisor.
    """
    names = sorted((name for name in sizes if sizes[name]), reverse=True)
    names.sort(key=lambda name: sizes[name])  # the last is taken first
    total = sum(sizes.values())
    step = max(gcd(*sizes.values()), -(-total // _SUMS), 1)
    steps = [round(sizes[name] / step) for name in names]
    sums = [1]  # bit n: some of the names so far have a sum of n steps
    for count in steps:
        sums.append(sums[-1] | sums[-1] << count)
    aim = min(max(wanted / step, 0), sum(steps))
    at = min(_bits_beside(sums[-1], int(aim)), key=lambda n: (abs(n - aim), n))
    # From the largest down: a name is taken if those before it reach the rest of the sum.
    chosen = set()
    for number in reversed(range(len(names))):
        if at >= steps[number] and sums[number] >> (at - steps[number]) & 1:
            chosen.add(names[number])
            at -= steps[number]
    return chosen


def _bits_beside(bits: int, place: int) -> list[int]:
    """Return the place of the last set bit up to ``place``, and of the first one after it."""
    places = [(bits & ((2 << place) - 1)).bit_length() - 1]
    higher = bits >> (place + 1)
    if higher:
        places.append(place + (higher & -higher).bit_length())
    return places


def states_off_device(policy: PlacementPolicy, units: Sequence[Unit], plan: Plan) -> set[str]:
    """Return the names of trained parameters whose states are in host memory.

    Their bytes are nearest to ``offload_optim`` of all. States of parameters that the plan has in
    host memory are among them.
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
    """Return how many units are copied ahead if all buffers together have ``CONST_BYTES``."""
    largest = max((unit.share_bytes for unit in units), default=0)
    return min(max(CONST_BYTES // max(largest, 1) - 1, 0), len(units))
