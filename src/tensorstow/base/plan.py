"""``Plan``: where parameters, states and activations are, unit by unit, and when updates run.

A name of units may be a range: ``{"model.layers.0-33": "device"}`` is for ``model.layers.0`` to
``model.layers.33``, both included.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, Self, TypeVar

from tensorstow.base.activation_placement import ActivationPlacement
from tensorstow.base.errors import OptionError, abbreviated
from tensorstow.base.fields import (
    PositiveInt,
    check_fields,
    from_fields,
    json_object,
    read_value,
    whole_number,
)
from tensorstow.base.keywords import RENAMED, names_keywords, warn_renamed, with_new_names
from tensorstow.base.sizes import Size
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import (
    Overlap,
    OverlapOption,
    UpdateOn,
    UpdateTiming,
    keyword_of,
    meant,
    reaches_device,
    read_update_on,
    refuse_delayed,
    refuse_undo,
    timing_of,
)

V = TypeVar("V")
_RANGE = re.compile(r"(?P<prefix>(?:.*\.)?)(?P<first>0|[1-9]\d*)-(?P<last>0|[1-9]\d*)", re.DOTALL)
_NUMBERED = re.compile(r"(?P<prefix>(?:.*\.)?)(?P<number>0|[1-9]\d*)", re.DOTALL)
_MOST = 100_000
"""More units than any model has: a slip would take the memory of their names."""


class ByUnit(dict[str, V]):
    """A mapping by the name of each unit, which prints runs of units with one value as ranges."""

    def __repr__(self) -> str:
        """Return the mapping with ranges, as ``Plan`` takes it."""
        return repr({name: str(value) for name, value in with_ranges(self).items()})


def by_unit(kind: Any) -> Callable[[object, str], ByUnit[Any]]:  # noqa: ANN401  # a field's type
    """Return the reader of mappings from units or ranges to ``kind``, for ``Annotated``."""

    def read(value: object, name: str) -> ByUnit[Any]:
        items = read_value(Mapping[str, kind], value, name)
        expanded: ByUnit[Any] = ByUnit()
        for key, item in items.items():
            for unit in _units_of(key, name):
                if unit in expanded:
                    message = f"{name} was given with unit {unit!r} twice, once in a range."
                    raise OptionError(message)
                expanded[unit] = item
        return expanded

    return read


@names_keywords
@dataclass(frozen=True, slots=True)
class Plan:
    """Where the parameters, states and activations of a model live, and how ranks share them.

    Use a weight on disk only inside the forward of its unit. Its memory is a buffer that other
    units use next, so a variable that still refers to it may read other values without an error.

    Args:
        parameters: The tier of the parameters: "device" (or "cuda", "gpu"), "host" (or "cpu",
            "ram"), "disk" (or "nvme"). Default: "host".
        states: The tier of the optimizer states: "host" or "disk". Default: "host".
        parameter_units: Another tier for the parameters of single units, by the unit's name, as
            ``{"model.layers.3": "disk"}``, or by a range that includes both ends, as
            ``{"model.layers.0-33": "device"}``.
        stage: The ZeRO stage, 0 (everything is replicated) to 3 (parameters are sharded too).
            Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
            Parameter Models", 2020.
        unsharded: Under stage 3 the units whose parameters stay unsharded from forward to
            backward, as under stage 2: less communication, more memory.
        replicas: The number of groups of ranks that each hold a full copy (HSDP).
        overlap: When updates run: "none", "forward", "backward", "speculative", as in ``AdamW``;
            what the last two leave, if weights are not on disk, goes on in the next forward.
            Default: "auto", "forward" if weights are on disk, else the optimizer's default.
        update_on: Where updates run: "host", "device", "hybrid" or the device's share, "auto", as
            in ``AdamW``.
        accumulation_steps: Backward passes per step.
        ordered_reduce: "mean" or "sum": each rank adds the gradients of all ranks' micro-batches
            one by one, in their order, so that weights do not depend on the number of ranks. Rank
            ``r`` of ``n`` is to take the micro-batches ``r``, ``n + r``, ``2 n + r`` and so on of a
            step, as accelerate deals out batches. The mean over ranks, as without it, has the same
            bits on numbers of ranks that are powers of two, unless fp16 gradients underflow. For
            the sum divide the loss by the micro-batches of all ranks. Clip by the optimizer's
            ``clip_grad_norm_``, whose norm does not depend on the number of ranks either. Every
            micro-batch is reduced, also under stage 1, and the gradients of a unit take their
            memory once more while they are. Default: None, the order is the backend's.
        micro_batches: Into how many parts a batch is cut inside each unit, in training. All of them
            go through one unit before the next, so that weights on HOST and DISK are read as often
            as for one. The results are those of as many backward passes of ``loss / micro_batches``
            within rounding; bit for bit if the number is a power of two, one rank computes, and no
            tensor or weight is used both in a unit and outside of it. Dropout draws in another
            order, and batch norms see one micro-batch at a time. A unit that takes or returns
            objects, or tokens of all samples in one dimension, raises an error in forward. With
            weights on disk use an ``overlap``: ``step()`` reads them once more otherwise. Default:
            1, the whole batch goes through at once.
        prefetch: How many units ahead weights are read from disk and copied to an accelerator.
        ram_budget: Bytes of host memory for states on disk; see ``AdamW``.
        weight_ram_budget: Bytes of host memory per rank for buffers of parameters on disk, in
            steps, commits and resuming; at least the three largest units. Default: None, these and
            ``prefetch`` more. A run that began with parameters in memory needs more when it is
            resumed with parameters on disk: all units whose states share a chunk.
        device_budget: Bytes of an accelerator's memory up to which copies of units in host memory
            stay there from forward to backward, so that each is copied once. Everything else that
            torch has allocated is measured, step by step, and subtracted. The first two steps keep
            no copy. A step that needs more memory than earlier ones passes the limit once, and
            fewer copies stay: leave room if batches differ in size. Default: None, no copy stays.
        activations: What a block saves for its backward: "keep" where it was computed, "recompute"
            in backward from the block's inputs, or move to "host" memory from an accelerator, or to
            "disk". What is outside of blocks (the logits, say) is kept. Default: "keep".
        activation_units: Another choice for single blocks, by the unit's name or a range.
        activation_ram_budget: Bytes of host memory per rank for activations on disk, those that
            were saved last among them. Default: None, 256 MiB, as in ``offload_activations``.

    Raises:
        OptionError: A value that cannot be used, or values that contradict each other.
    """

    parameters: Tier = Tier.HOST
    states: Tier = Tier.HOST
    parameter_units: Annotated[Mapping[str, Tier], by_unit(Tier)] = field(default_factory=dict)
    stage: Annotated[int, whole_number(0, 3)] = 3
    unsharded: Sequence[str] = ()
    replicas: PositiveInt = 1
    overlap: OverlapOption = "auto"
    update_on: Annotated[UpdateOn, read_update_on] | None = None
    accumulation_steps: PositiveInt = 1
    ordered_reduce: Literal["mean", "sum"] | None = None
    micro_batches: PositiveInt = 1
    prefetch: Annotated[int, whole_number(0)] = 2
    ram_budget: Size | None = None
    weight_ram_budget: Size | None = None
    device_budget: Size | None = None
    activations: ActivationPlacement = ActivationPlacement.KEEP
    activation_units: Annotated[Mapping[str, ActivationPlacement], by_unit(ActivationPlacement)] = (
        field(default_factory=dict)
    )
    activation_ram_budget: Size | None = None

    def __post_init__(self) -> None:
        exact = '"forward", or "backward" if parameters are updated on the device'
        # Before the check of fields, whose error would not say why.
        refuse_delayed(self.overlap, "in a plan", f"Use {exact}, which are exact.")
        check_fields(self)
        self._check_update_on()
        self._check_undo()
        self._refuse_idle()
        self._check_order()
        on_disk = [name for name in self.unsharded if self.tier_of(name) == Tier.DISK]
        if self.unsharded and (self.stage < 3 or on_disk):
            message = (
                f"unsharded={self.unsharded} was given with stage={self.stage} and {on_disk} of"
                " them on disk: it is for units of stage 3 that are in memory."
            )
            raise OptionError(message)
        if self.stage < 3 and Tier.DISK in self.parameter_tiers:
            message = (
                f"stage={self.stage} was given with parameters on disk: they are fetched for a unit"
                " and freed after it, which is stage 3."
            )
            raise OptionError(message)

    @property
    def timing(self) -> UpdateTiming:
        """What ``overlap`` means, once it is ``settled``."""
        return timing_of(self.optimizer_overlap)

    @property
    def optimizer_overlap(self) -> Overlap:
        """The keyword of the optimizer that ``overlap`` means, once it is ``settled``."""
        return meant(self.overlap, "none")

    def settled(self) -> Self:
        """Return the plan with "forward" in place of "auto" where that means it."""
        on_disk = Tier.DISK in self.parameter_tiers
        return self.but(overlap=meant(self.overlap, "forward")) if on_disk else self

    @property
    def reduces_with_last(self) -> bool:
        """Whether gradients stay unreduced until the last micro-batch of a step."""
        return self.stage == 1 and self.ordered_reduce is None

    @property
    def averages_in_order(self) -> bool:
        """Whether ordered sums are divided by the number of ranks."""
        return self.ordered_reduce == "mean"

    @property
    def parameter_tiers(self) -> set[Tier]:
        """The tiers of the parameters of any unit."""
        return {self.parameters, *self.parameter_units.values()}

    @property
    def activation_placements(self) -> set[ActivationPlacement]:
        """What is done with the activations of any unit."""
        return {self.activations, *self.activation_units.values()}

    @property
    def keeps_activations(self) -> bool:
        """Whether the activations of every unit stay where they are computed."""
        return self.activation_placements == {ActivationPlacement.KEEP}

    def _check_update_on(self) -> None:
        if not reaches_device(self.update_on):
            return
        elsewhere = sorted(self.parameter_tiers - {Tier.DEVICE})
        if elsewhere:
            message = (
                f"{keyword_of(self.update_on)} was given with parameters on"
                f" {' and '.join(elsewhere)}, whose weights and gradients are in host memory, and"
                ' are updated there. Use update_on="host", or place all parameters on the device.'
            )
            raise OptionError(message)
        if self.timing.waits_by_module:
            message = (
                f'{keyword_of(self.update_on)} was given with overlap="forward": updates on the'
                ' device are not waited for module by module. Use overlap="backward" or "none", or'
                ' update_on="host".'
            )
            raise OptionError(message)

    def _check_undo(self) -> None:
        if not self.timing.can_undo:
            return
        obstacles = {
            "states in host memory": self.states != Tier.DISK,
            keyword_of(self.update_on): reaches_device(self.update_on),
        }
        refuse_undo(obstacles)

    def _check_order(self) -> None:
        if self.ordered_reduce is None:
            return
        obstacles = {
            "stage=0": self.stage == 0,
            f"replicas={self.replicas}": self.replicas > 1,
            f"micro_batches={self.micro_batches}": self.micro_batches > 1,
            'overlap="speculative"': self.timing.can_undo,
        }
        for keyword, is_set in obstacles.items():
            if is_set:
                message = (
                    f"ordered_reduce={self.ordered_reduce!r} was given with {keyword}: it adds"
                    " gradients that are sharded over all ranks, after each backward. Use stage 1"
                    " to 3, one replica, a backward for each micro-batch, and another overlap than"
                    ' "speculative".'
                )
                raise OptionError(message)

    def _refuse_idle(self) -> None:
        """Raise OptionError for options that would have no effect."""
        if self.states == Tier.DEVICE:
            message = (
                'states="device" was given: states live on the host or on disk, wherever updates'
                ' run. Use states="host"; where all states fit the device, use torch.optim.'
            )
            raise OptionError(message)
        tiers = " and ".join(sorted(tier.value for tier in self.parameter_tiers))
        if self.ram_budget is not None and self.states != Tier.DISK:
            reason = " with states in host memory, where all stay"
            self._refuse("ram_budget", reason, states="disk")
        if self.micro_batches > 1 and (self.parameter_tiers == {Tier.DEVICE} or self.stage < 3):
            needed: dict[str, Any] = {"stage": 3} if self.stage < 3 else {}
            needed |= {"parameters": "host"} if self.parameter_tiers == {Tier.DEVICE} else {}
            reason = (
                f" with stage={self.stage} and parameters on {tiers}: it lets each weight on HOST"
                " or DISK be read once for all micro-batches, in stage 3"
            )
            self._refuse("micro_batches", reason, **needed)
        if self.weight_ram_budget is not None and Tier.DISK not in self.parameter_tiers:
            reason = ", and no unit's parameters are on disk"
            self._refuse("weight_ram_budget", reason, parameters="disk")
        on_disk = ActivationPlacement.DISK in self.activation_placements
        if self.activation_ram_budget is not None and not on_disk:
            reason = ", and no unit's activations are on disk"
            self._refuse("activation_ram_budget", reason, activations="disk")
        if self.device_budget is not None and Tier.HOST not in self.parameter_tiers:
            reason = " with no parameters in host memory: it is for copies of these"
            self._refuse("device_budget", reason, parameters="host")
        if self.device_budget is not None and self.stage < 3:
            reason = (
                f" with stage={self.stage}, which gathers parameters once for forward and backward:"
                " no copy would be used again"
            )
            self._refuse("device_budget", reason, stage=3)

    def _refuse(self, option: str, reason: str, **needed: Any) -> NoReturn:  # noqa: ANN401
        """Raise OptionError for an option that has no effect without the fields ``needed``."""
        advice = f"Leave it out{self._or_say(**needed)}."
        message = f"{option}={getattr(self, option)} was given{reason}. {advice}"
        raise OptionError(message)

    def _or_say(self, **changes: Any) -> str:  # noqa: ANN401  # the fields' types
        """Return the advice to change fields, if the plan can be used then; else nothing."""
        try:
            self.but(**changes)
        except OptionError:
            return ""
        said = " and ".join(f"{name}={json.dumps(value)}" for name, value in changes.items())
        return f", or say {said}"

    def tier_of(self, unit: str) -> Tier:
        """Return the tier of a unit's parameters.

        Args:
            unit: The name of the unit.

        Returns:
            The tier in ``parameter_units``, else ``parameters``.
        """
        return self.parameter_units.get(unit, self.parameters)

    def activations_of(self, unit: str) -> ActivationPlacement:
        """Return what is done with a unit's activations.

        Args:
            unit: The name of the unit.

        Returns:
            What ``activation_units`` has, else ``activations``.
        """
        return self.activation_units.get(unit, self.activations)

    def but(self, **changes: Any) -> Self:  # noqa: ANN401  # the fields' types
        """Return a copy of the plan with other values of some fields.

        Args:
            changes: The fields and their new values.

        Returns:
            The new plan, checked.
        """
        return replace(self, **with_new_names("Plan", changes))

    def to_json(self) -> str:
        """Return the plan as JSON that ``from_json`` reads.

        Returns:
            The text of a JSON object, one field a line.
        """
        fields = asdict(self)
        for name in ("parameter_units", "activation_units"):
            fields[name] = with_ranges(fields[name])
        return json.dumps(fields, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a plan that ``to_json`` wrote.

        Args:
            text: A JSON object.

        Returns:
            The plan.

        Raises:
            OptionError: The text is no JSON object, has a field that a plan lacks, or a value
                that cannot be used.
        """
        meant = "A plan is a JSON object, as to_json() writes it"
        return from_fields(cls, with_new_names("Plan", json_object(text, meant)), meant)

    if not TYPE_CHECKING:  # for which an old name is an error

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # the fields' types
            """Return a field by its old name, with a warning."""
            if name not in RENAMED["Plan"]:
                message = f"{type(self).__name__!r} object has no attribute {name!r}"
                raise AttributeError(message, name=name, obj=self)
            new = RENAMED["Plan"][name]
            warn_renamed(f"Plan.{name}", f"Plan.{new}")
            return getattr(self, new)


def with_ranges(values: Mapping[str, V]) -> dict[str, V]:
    """Return a mapping by unit in the order of names, with ranges for equal values."""
    runs: list[tuple[str, int, int, V]] = []
    for name, value in sorted(values.items(), key=lambda item: _numbered(item[0])):
        prefix, number = _numbered(name)
        before = runs[-1] if runs and number > 0 else None
        if before is not None and (before[0], before[2], before[3]) == (prefix, number - 1, value):
            runs[-1] = (prefix, before[1], number, value)
        else:
            runs.append((prefix, number, number, value))
    return {_name_of(prefix, first, last): value for prefix, first, last, value in runs}


def _units_of(key: str, name: str) -> list[str]:
    """Return the units that a name or a range stands for."""
    match = _RANGE.fullmatch(key) if "-" in key else None
    if match is None:
        return [key]
    first, last = int(match["first"]), int(match["last"])
    if not first <= last < first + _MOST:
        message = (
            f"{name} was given with the range {abbreviated(key)}: its first number must not be the"
            f" larger one, and it has at most {_MOST:,} units."
        )
        raise OptionError(message)
    return [f"{match['prefix']}{number}" for number in range(first, last + 1)]


def _numbered(name: str) -> tuple[str, int]:
    """Return a name without the number at its end, and the number; -1: it has none."""
    match = _NUMBERED.fullmatch(name)
    return (name, -1) if match is None else (match["prefix"], int(match["number"]))


def _name_of(prefix: str, first: int, last: int) -> str:
    if first < 0:
        return prefix
    return f"{prefix}{first}" if first == last else f"{prefix}{first}-{last}"
