"""What lives where and moves when: everything the engine is told about a run."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, Literal, Self, get_args

from tensorstow.base.errors import OptionError
from tensorstow.base.sizes import parse_size
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import CHOICES, UpdateOn, is_update_on, reaches_device, told

Overlap = Literal["none", "forward", "backward"]
_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class Plan:
    """Where parameters and states of a model live, and how ranks share them.

    ``parameters`` and ``states``: a tier ("device", "host" or "ram", "disk"); ``units``: another
    tier for the parameters of single units, by name. ``stage``: ZeRO's, 0 (all is whole) to 3.
    ``replicas``: groups of ranks that each have a whole copy (HSDP). ``overlap``: when updates run,
    and ``update_on``: where ("host", "device", "hybrid" or the device's share, "auto"), as in
    ``AdamW``. ``accumulation_steps``: backward passes per step. ``prefetch``: how many units ahead
    weights are fetched from disk, and taken to an accelerator. ``ram_budget``: the optimizer's host
    memory for states, in bytes. ``shelf_bytes``: host memory for parameters on disk while they are
    used, in bytes, of each rank: never more is held, in steps, commits and resuming. It is at least
    the three largest units; None: these and what is fetched ahead. Two cases need more. A run that
    was begun with parameters elsewhere and resumed keeps its chunks of states, and one that has
    parts of several units needs all of these beside the one that is computed with and the one
    around it. Over one rank on the CPU, which computes with a unit's own memory, units whose inputs
    need no gradient stay until backward ends.
    """

    parameters: Tier = Tier.HOST
    states: Tier = Tier.HOST
    units: Mapping[str, Tier] = field(default_factory=dict)
    stage: int = 3
    replicas: int = 1
    overlap: Overlap = "none"
    update_on: UpdateOn | None = None
    accumulation_steps: int = 1
    prefetch: int = 2
    ram_budget: int | str | None = None
    shelf_bytes: int | str | None = None

    def __post_init__(self) -> None:
        """Check every value; raises OptionError."""
        object.__setattr__(self, "parameters", _tier(self.parameters, "parameters"))
        object.__setattr__(self, "states", _tier(self.states, "states"))
        units = {name: _tier(tier, f"units[{name!r}]") for name, tier in self.units.items()}
        object.__setattr__(self, "units", units)
        for name in ("ram_budget", "shelf_bytes"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, parse_size(getattr(self, name), name))
        if self.stage not in _STAGES:
            message = f"stage={self.stage!r} was given: ZeRO's stages are 0, 1, 2 and 3."
            raise OptionError(message)
        if self.overlap not in get_args(Overlap):
            message = f'overlap={self.overlap!r} was given: it is "none", "forward" or "backward".'
            raise OptionError(message)
        self._check_update_on()
        for name, least in (("replicas", 1), ("accumulation_steps", 1), ("prefetch", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                message = f"{name}={value!r} was given: it is a number, at least {least}."
                raise OptionError(message)
        self._refuse_idle()
        if self.overlap == "forward" and Tier.DISK in self._tiers:
            message = (
                'overlap="forward" was given with parameters on disk: updates beside the next'
                ' forward would need weights that it has let go of. Use "backward" or "none".'
            )
            raise OptionError(message)
        if self.stage < 3 and Tier.DISK in self._tiers:
            message = (
                f"stage={self.stage} was given with parameters on disk: they are fetched for a unit"
                " and let go behind it, which is stage 3."
            )
            raise OptionError(message)

    @property
    def _tiers(self) -> set[Tier]:
        return {self.parameters, *self.units.values()}

    def _check_update_on(self) -> None:
        if self.update_on is not None and not is_update_on(self.update_on):
            message = f"update_on={self.update_on!r} was given: it is {CHOICES}."
            raise OptionError(message)
        if not reaches_device(self.update_on):
            return
        elsewhere = sorted(self._tiers - {Tier.DEVICE})
        if elsewhere:
            message = (
                f"{told(self.update_on)} was given with parameters on {' and '.join(elsewhere)},"
                " whose weights and gradients are in host memory, and are updated there. Use"
                ' parameters="device" for all of them, or update_on="host".'
            )
            raise OptionError(message)
        if self.overlap != "none":
            message = (
                f'{told(self.update_on)} was given with overlap="{self.overlap}": updates on the'
                " device run inside step(), on the stream that computes. Leave overlap out, or use"
                ' update_on="host".'
            )
            raise OptionError(message)

    def _refuse_idle(self) -> None:
        """Raise OptionError for what would be accepted and change nothing."""
        if self.states == Tier.DEVICE:
            message = (
                'states="device" was given: states live on the host or on disk, wherever updates'
                ' run. Use states="host"; where all states fit the device, use torch.optim.'
            )
            raise OptionError(message)
        if self.ram_budget is not None and self.states != Tier.DISK:
            message = (
                f"ram_budget={self.ram_budget} was given with states in host memory, all of which"
                ' stay there. Leave it out, or say states="disk".'
            )
            raise OptionError(message)
        if self.shelf_bytes is not None and Tier.DISK not in self._tiers:
            message = (
                f"shelf_bytes={self.shelf_bytes} was given, and no unit's parameters are on disk."
                ' Leave it out, or say parameters="disk".'
            )
            raise OptionError(message)

    def tier_of(self, unit: str) -> Tier:
        """Return where the parameters of a unit live."""
        return self.units.get(unit, self.parameters)

    def but(self, **changes: Any) -> Self:  # noqa: ANN401  # the fields' types
        """Return a plan that differs in some fields."""
        return replace(self, **changes)

    def to_json(self) -> str:
        """Return the plan as JSON that ``from_json`` reads."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a plan; raises OptionError for what is no JSON object or has other names."""
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            message = f"A plan is a JSON object, as to_json() writes it: {error}."
            raise OptionError(message) from error
        if not isinstance(given, dict):
            message = f"A plan is a JSON object, as to_json() writes it: this is {text.strip()!r}."
            raise OptionError(message)
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                near = get_close_matches(name, known, 1)
                message = f"A plan has no {name!r}" + (f": {near[0]!r}?" if near else ".")
                raise OptionError(message)
        return cls(**given)


def _tier(value: object, name: str) -> Tier:
    try:
        return Tier(value)  # type: ignore[arg-type]  # it checks that
    except ValueError:
        known = ", ".join(f'"{t.value}"' for t in Tier)
        message = f'{name}={value!r} was given: a tier is one of {known} ("ram" is the host\'s).'
        raise OptionError(message) from None
