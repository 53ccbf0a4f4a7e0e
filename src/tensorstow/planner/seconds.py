"""How long a step takes: what a plan computes and moves, over the rates of a machine.

[Note: Phases] A step is forward, backward and update, one after the other; ``overlap`` puts the
update beside one of them, but for the first parameter's: forward needs it at once, and backward has
its gradient last. In each phase every resource has its work, all resources work at once,
and the one with most of it says how long the phase takes. Updates run on the cores, and so do
forward and backward where the CPU computes: their times add up there. Where updates run on the
accelerator, its computing and its updates add up, and states go over the link both ways.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tensorstow.base.errors import OptionError
from tensorstow.base.plan import Plan
from tensorstow.base.profile import DirectoryRates, Profile, dtype_key, update_key
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import UpdateOn, reaches_device
from tensorstow.planner.placement import (
    Conditions,
    MovedActivations,
    in_memory_bytes,
    moved_activations,
    states_of,
    units_on,
)
from tensorstow.planner.sizes import Sizes
from tensorstow.states.offload_policy import format_of

_FORWARD = 1 / 3
"""Of the time that forward and backward take together."""
_FORWARD_BEFORE_TWO = 1 / 4
"""The same where backward computes blocks again."""
_FLOPS_PER_TOKEN = 6
"""Of forward and backward for each parameter, attention left out."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What forward and backward of one micro-batch do on one rank."""

    tokens: int
    flops: int
    """Of matrix products and attention."""
    tensor_bytes: int = 0
    """Read and written by all other operations."""
    calls: int = 0
    """Operations."""
    random_elements: int = 0
    """Random numbers drawn, for dropout."""
    large_bytes: int = 0
    """Of all large tensors that operations make; ``base.allocator`` says what is large."""
    is_estimate: bool = False
    """Whether nothing was traced, so that only ratios of the seconds count."""

    @classmethod
    def estimate(cls, parameters: int, tokens: int) -> "MicroBatch":
        """Return six operations for each parameter and token, for what was not traced.

        Args:
            parameters: Of the whole model.
            tokens: Of the micro-batch.
        """
        return cls(tokens, _FLOPS_PER_TOKEN * parameters * tokens, is_estimate=True)


@dataclass(frozen=True, slots=True)
class MachineRates:
    """The rates that one rank of a run has."""

    profile: Profile
    device: str
    """The type of device that computes, "cpu" or an accelerator's."""
    disk: DirectoryRates | None
    """Of the directory that states and parameters on disk are in."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one rank moves and updates in one step."""

    updates: Mapping[str, int]
    """Parameters by "dtype/format"."""
    states: int
    """Bytes of all states, wherever they are."""
    state_read: int
    state_written: int
    parameters_read: int
    """From disk, in forward and backward."""
    parameters_written: int
    up: int
    """From host memory to the accelerator, in forward and backward."""
    updated_up: int
    """New weights of parameters that are on the accelerator, where the host updates all of them."""
    down: int
    """Gradients, where the host updates all of them."""
    weights_down: int
    """16-bit weights, where the accelerator updates all of them."""
    activations: MovedActivations
    """Of all micro-batches."""

    @property
    def read(self) -> int:
        """Return the bytes read from disk."""
        return self.state_read + self.parameters_read + self.activations.read

    @property
    def written(self) -> int:
        """Return the bytes written to disk."""
        return self.state_written + self.parameters_written + self.activations.written


@dataclass(frozen=True, slots=True)
class StepPhase:
    """A part of a step, and how long each resource works in it."""

    name: str
    loads: Mapping[str, float]
    """Seconds by resource: "cores", "accelerator", "disk", "link up", "link down"."""

    @property
    def seconds(self) -> float:
        """Return how long the phase takes."""
        return max(self.loads.values(), default=0.0)

    @property
    def binding(self) -> str:
        """Return the resource that says so."""
        return max(self.loads, key=lambda name: self.loads[name])


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a step takes, and why."""

    phases: tuple[StepPhase, ...]
    compute: float
    """Seconds of forward and backward alone."""
    update: float
    """Seconds of the update alone, without what it waits for."""

    @property
    def seconds(self) -> float:
        """Return how long a step takes."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def busy(self) -> dict[str, float]:
        """Return how long each resource works in a step."""
        found: dict[str, float] = {}
        for phase in self.phases:
            for name, seconds in phase.loads.items():
                found[name] = found.get(name, 0.0) + seconds
        return found

    @property
    def binding(self) -> str:
        """Return the resource that most of the step waits for."""
        waited: dict[str, float] = {}
        for phase in self.phases:
            waited[phase.binding] = waited.get(phase.binding, 0.0) + phase.seconds
        return max(waited, key=lambda name: waited[name])


def work_of(plan: Plan, sizes: Sizes, conditions: Conditions) -> StepWork:
    """Return what a plan makes one rank move and update in one step.

    Args:
        plan: The plan.
        sizes: The model, as one rank's share.
        conditions: What else decides.
    """
    units = units_on(Tier.DISK, plan, sizes)
    on_disk = [unit.share_bytes for unit in units]
    below = sum(on_disk) + sum(unit.share_bytes for unit in units_on(Tier.HOST, plan, sizes))
    passes = 2 * plan.accumulation_steps
    # A pass begins with the units that the one before it, in the other direction, ended with.
    kept = min(in_memory_bytes(plan, units), sum(on_disk)) if on_disk else 0
    updates: dict[str, int] = {}
    moving = plan.states == Tier.DISK or conditions.commits
    for dtype, elements in sizes.trained:
        key = update_key(dtype, format_of(dtype, conditions.state_format, moving=moving))
        updates[key] = updates.get(key, 0) + elements
    written = read = 0
    memory = states_of(plan, sizes, conditions)
    if plan.states == Tier.DISK:
        written = memory.disk_bytes
        # Chunks alternate direction from step to step: what the ring still holds is not read.
        read = max(0, written - memory.ring_bytes)
    away = not conditions.device_is_host
    sums = 4 * sum(elements for _, elements in sizes.trained)
    down = plan.accumulation_steps * (sums if plan.micro_batches > 1 else sizes.gradient_bytes)
    if reaches_device(plan.update_on):  # they are summed on the device
        down = sums if plan.accumulation_steps > 1 else sizes.gradient_bytes
    updated_up = sum(u.gradient_bytes for u in units_on(Tier.DEVICE, plan, sizes))
    halves = sum(d.itemsize * n for d, n in sizes.trained if d != torch.float32)
    return StepWork(
        updates,
        memory.logical_bytes,
        read,
        written,
        passes * (sum(on_disk) - kept),
        sum(unit.gradient_bytes for unit in units_on(Tier.DISK, plan, sizes)),
        passes * below if away else 0,
        updated_up if away else 0,
        down if away else 0,
        halves if away else 0,
        _activations(plan, conditions),
    )


def _activations(plan: Plan, conditions: Conditions) -> MovedActivations:
    """Return what all micro-batches of a step move."""
    each, times = moved_activations(plan, conditions.activations), plan.accumulation_steps
    over_link = 0 if conditions.device_is_host else each.over_link
    return MovedActivations(times * each.written, times * each.read, times * over_link)


def compute_seconds(batch: MicroBatch, dtype: torch.dtype, machine: MachineRates) -> float:
    """Return how long forward and backward of one micro-batch take.

    Args:
        batch: What they do.
        dtype: That they compute in.
        machine: The rates.

    Raises:
        OptionError: The profile lacks the rate.
    """
    rates = machine.profile.compute.get(machine.device)
    flops = None if rates is None else rates.flops.get(dtype_key(dtype))
    if rates is None or flops is None:
        message = (
            f"The profile has no rate of computing in {dtype_key(dtype)} on {machine.device}: run"
            " `tensorstow calibrate` on such a machine, and name its profile."
        )
        raise OptionError(message)
    elementwise = batch.tensor_bytes / rates.tensor_bytes + batch.calls * rates.call_seconds
    return batch.flops / flops + elementwise + batch.random_elements / rates.random_elements


def time_of(
    plan: Plan, sizes: Sizes, conditions: Conditions, batch: MicroBatch, machine: MachineRates
) -> StepTime:
    """Return how long a step of a plan takes.

    Args:
        plan: The plan.
        sizes: The model, as one rank's share.
        conditions: What else decides.
        batch: What one micro-batch does on one rank.
        machine: The rates.

    Raises:
        OptionError: The profile lacks a rate that the plan needs.
    """
    work = work_of(plan, sizes, conditions)
    dtype = sizes.trained[0][0] if sizes.trained else torch.float32
    compute = compute_seconds(batch, dtype, machine)
    on = "cores" if conditions.device_is_host else "accelerator"
    profile = machine.profile
    if conditions.device_is_host and units_on(Tier.DISK, plan, sizes):
        # Freed memory goes back to the system there (base.allocator), and comes new each time.
        compute += batch.large_bytes / profile.memory_fresh
    compute *= plan.accumulation_steps
    reads, writes, states = _disk_seconds(work, machine)
    up = _over_link("up", work.up, machine)
    update = _update_loads(plan, work, machine)
    first = _FORWARD_BEFORE_TWO if plan.activations == "recompute" else _FORWARD
    forward = {on: first * compute, "disk": reads / 2, "link up": up / 2}
    backward = {on: (1 - first) * compute, "disk": reads / 2, "link up": up / 2}
    if not reaches_device(plan.update_on):  # else gradients are summed on the device
        backward["link down"] = _over_link("down", work.down, machine)
    # What is read and written is compared with its checksum.
    states_and_weights = work.state_read + work.state_written + work.parameters_written
    on_cores = {"cores": states_and_weights / profile.checksums}
    step = _sum([update.loads, on_cores, {"disk": states + writes}])
    # So are parameters, whose memory comes new each time.
    for each in (forward, backward):
        seconds = work.parameters_read * (1 / profile.checksums + 1 / profile.memory_fresh)
        each["cores"] = each.get("cores", 0.0) + seconds / 2
    saved, brought = _activation_loads(work.activations, machine)
    forward, backward = _sum([forward, saved]), _sum([backward, brought])
    first_update, rest = _parts(step, _first_share(sizes))
    parts: list[tuple[str, Sequence[Mapping[str, float]]]]
    if plan.overlap == "backward":
        parts = [("forward", [forward]), ("backward and update", [backward, rest])]
        parts += [("update of the first parameter", [first_update])]
    elif plan.overlap == "forward":
        parts = [("update of the first parameter", [first_update])]
        parts += [("update and forward", [rest, forward]), ("backward", [backward])]
    else:
        parts = [("forward", [forward]), ("backward", [backward]), ("update", [step])]
    phases = tuple(StepPhase(name, _sum(each)) for name, each in parts)
    return StepTime(phases, compute, update.kernels)


def _activation_loads(
    moved: MovedActivations, machine: MachineRates
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of each resource in forward and in backward, disk and checksums first."""
    disk, checksums = machine.disk, machine.profile.checksums
    saved: dict[str, float] = {"link down": _over_link("down", moved.over_link, machine)}
    brought: dict[str, float] = {"link up": _over_link("up", moved.over_link, machine)}
    if disk is not None:  # else there is none of it
        saved |= {"disk": moved.written / disk.write, "cores": moved.written / checksums}
        brought |= {"disk": moved.read / disk.read, "cores": moved.read / checksums}
    return saved, brought


def _first_share(sizes: Sizes) -> float:
    """Return the share of all elements that the first trained parameter has.

    It is the root's first, an embedding in most models: forward needs it first, and backward has
    its gradient last.
    """
    trained = [unit for unit in sizes.units if unit.trained]
    if not trained:
        return 0.0
    first = next((unit for unit in trained if not unit.name), trained[0])
    return first.trained[0][1] / sum(unit.trained_elements for unit in trained)


def _parts(
    loads: Mapping[str, float], first: float
) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Return a share of loads, and the rest of them."""
    return (
        {name: first * seconds for name, seconds in loads.items()},
        {name: (1 - first) * seconds for name, seconds in loads.items()},
    )


def device_share(plan: Plan, sizes: Sizes, conditions: Conditions, machine: MachineRates) -> float:
    """Return the share of the states that the accelerator updates.

    What runs find out in their first steps is predicted: with "hybrid" both sides end together,
    with "auto" the faster one has all.

    Args:
        plan: The plan; its ``update_on`` counts.
        sizes: The model, as one rank's share.
        conditions: What else decides.
        machine: The rates.

    Raises:
        OptionError: The profile lacks a rate.
    """
    return _share_there(plan.update_on, work_of(plan, sizes, conditions), machine)


def break_even_tokens(step: StepTime, tokens: int) -> int | None:
    """Return the tokens per step from which on computing takes longer than any transfer.

    Args:
        step: The time of one step.
        tokens: Of that step, of one rank.

    Returns:
        The tokens; None where nothing is moved.
    """
    moved = max((s for name, s in step.busy.items() if name in _TRANSFERS), default=0.0)
    if not moved or not step.compute:
        return None
    return -int(-tokens * moved // step.compute)


_TRANSFERS = ("disk", "link up", "link down")


def _rate(key: str, machine: MachineRates) -> float:
    rate = machine.profile.update.get(key)
    if rate is None:
        message = f"The profile has no rate of updates of {key}: run `tensorstow calibrate`."
        raise OptionError(message)
    return rate


def _disk_seconds(work: StepWork, machine: MachineRates) -> tuple[float, float, float]:
    """Return the seconds of reading parameters, of writing them, and of moving states."""
    if not work.read and not work.written:
        return 0.0, 0.0, 0.0
    disk = machine.disk
    if disk is None:
        message = (
            "The profile has no directory that was measured, and the plan has bytes on disk: run"
            " `tensorstow calibrate DIR`."
        )
        raise OptionError(message)
    both = min(work.state_read, work.state_written)
    states = 2 * both / disk.mixed + (work.state_written - both) / disk.write
    return work.parameters_read / disk.read, work.parameters_written / disk.write, states


def _over_link(way: str, nbytes: int, machine: MachineRates) -> float:
    """Return the seconds of bytes that go over the link, "up" or "down"."""
    if not nbytes:
        return 0.0
    link = machine.profile.link
    if link is None:
        message = "The profile has no link to an accelerator: run `tensorstow calibrate` there."
        raise OptionError(message)
    return nbytes / (link.up if way == "up" else link.down)


@dataclass(frozen=True, slots=True)
class _Update:
    """The update of a step."""

    kernels: float
    """Seconds of whatever side takes longer."""
    loads: Mapping[str, float]


def _update_loads(plan: Plan, work: StepWork, machine: MachineRates) -> _Update:
    """Return how long each resource works in the update, the disk left out."""
    there = _share_there(plan.update_on, work, machine)
    here = 1 - there
    host = _host_loads(work, machine) if here else {}
    device = _device_loads(work, machine) if there else {}
    if not reaches_device(plan.update_on):
        host.pop("link down", None)  # gradients came down beside backward
    loads = _sum(
        [
            {name: here * seconds for name, seconds in host.items()},
            {name: there * seconds for name, seconds in device.items()},
        ]
    )
    return _Update(max(loads.get("cores", 0.0), loads.get("accelerator", 0.0)), loads)


def _share_there(update_on: UpdateOn | None, work: StepWork, machine: MachineRates) -> float:
    if isinstance(update_on, float):
        return update_on
    if update_on == "device":
        return 1.0
    if not reaches_device(update_on) or not work.updates:
        return 0.0
    host, device = (
        max(side(work, machine).values(), default=0.0) for side in (_host_loads, _device_loads)
    )
    if update_on == "auto":
        return float(device < host)
    return host / (host + device)


def _host_loads(work: StepWork, machine: MachineRates) -> dict[str, float]:
    """Return the seconds of each resource where the host updates all parameters."""
    return {
        "cores": sum(n / _rate(key, machine) for key, n in work.updates.items()),
        "link up": _over_link("up", work.updated_up, machine),
        "link down": _over_link("down", work.down, machine),
    }


def _device_loads(work: StepWork, machine: MachineRates) -> dict[str, float]:
    """Return the same where the accelerator does."""
    rates = machine.profile.device_update
    lacking = [key for key in work.updates if key not in rates]
    if lacking:
        message = (
            f"The profile has no rate of updates of {', '.join(lacking)} on an accelerator: run"
            " `tensorstow calibrate` on such a machine, and name its profile."
        )
        raise OptionError(message)
    return {
        "accelerator": sum(n / rates[key] for key, n in work.updates.items()),
        "link up": _over_link("up", work.states, machine),
        "link down": _over_link("down", work.states + work.weights_down, machine),
    }


def _sum(loads: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the seconds by resource, those without work left out."""
    found: dict[str, float] = {}
    for each in loads:
        for name, seconds in each.items():
            if seconds:
                found[name] = found.get(name, 0.0) + seconds
    return found
