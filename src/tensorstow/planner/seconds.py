"""How long a step takes: what a plan computes and moves, over the rates of a machine.

[Note: Phases] A step is forward, backward and update, one after the other. ``overlap`` runs the
update beside forward, beside backward, or beside both (updates by the CPU that begin in backward,
with weights in memory), except that of the first parameter: forward needs it at once, and backward
produces its gradient last. In each phase all resources work at once, and the one with the most work
determines how long the phase takes. Updates run on the cores, and so do forward and backward if the
CPU computes: their times add up. If updates run on the accelerator, the times of its computing and
its updates add up, and states go over the link both ways. Collectives of several machines work
beside all of these, on the network ([Note: Network]).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch

from tensorstow.base.activation_placement import ActivationPlacement
from tensorstow.base.errors import OptionError
from tensorstow.base.plan import Plan
from tensorstow.base.profile import DirectoryRates, Profile, dtype_key, update_key
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import UpdateOn, reaches_device, reaches_host
from tensorstow.planner.network import Network, traffic_of
from tensorstow.planner.placement import (
    Conditions,
    MovedActivations,
    in_memory_bytes,
    moved_activations,
    pooled_bytes,
    state_format_of,
    states_of,
    stored_bytes,
    units_on,
)
from tensorstow.planner.sizes import Sizes

_FORWARD = 1 / 3
"""Forward's share of the time of forward and backward."""
_FORWARD_BEFORE_TWO = 1 / 4
"""The same if backward computes blocks again."""
_FLOPS_PER_TOKEN = 6
"""Operations of forward and backward for each parameter and token, without attention."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The work of forward and backward of one micro-batch on one rank."""

    tokens: int
    flops: int
    """Floating-point operations of matrix products and attention."""
    tensor_bytes: int = 0
    """Bytes that all other operations read and write."""
    calls: int = 0
    """Number of operations."""
    random_elements: int = 0
    """Random numbers drawn, for dropout."""
    is_estimate: bool = False
    """Whether nothing was traced, so that only ratios of the seconds are meaningful."""

    @classmethod
    def estimate(cls, parameters: int, tokens: int) -> "MicroBatch":
        """Return six operations for each parameter and token, for a model that was not traced."""
        return cls(tokens, _FLOPS_PER_TOKEN * parameters * tokens, is_estimate=True)


@dataclass(frozen=True, slots=True)
class MachineRates:
    """The rates that one rank of a run has."""

    profile: Profile
    device: str
    """The type of device that computes, "cpu" or an accelerator's."""
    disk: DirectoryRates | None
    """Rates of the directory of states and parameters on disk."""
    network: Network | None = None
    """The machines of the run; None: one, or nobody said what connects them."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one rank moves and updates in one step."""

    updates: Mapping[str, int]
    """Parameters by "dtype/format"."""
    states: int
    """Bytes of all states, on any tier."""
    state_read: int
    state_written: int
    parameters_read: int
    """Bytes read from disk in forward and backward."""
    parameters_written: int
    up: int
    """Bytes copied from host memory to the accelerator in forward and backward."""
    updated_up: int
    """Bytes of new weights of parameters on the accelerator, if the host updates all of them."""
    down: int
    """Bytes of gradients, if the host updates all parameters."""
    weights_down: int
    """Bytes of 16-bit weights, if the accelerator updates all of them."""
    activations: MovedActivations
    """Bytes of activations over all micro-batches."""

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
    """Seconds by resource: "cores", "accelerator", "disk", "link up", "link down", "network"."""

    @property
    def seconds(self) -> float:
        """Return how long the phase takes."""
        return max(self.loads.values(), default=0.0)

    @property
    def binding(self) -> str:
        """Return the resource that determines how long the phase takes."""
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
        return _sum(phase.loads for phase in self.phases)

    @property
    def binding(self) -> str:
        """Return the resource that most of the step waits for."""
        waited: dict[str, float] = {}
        for phase in self.phases:
            waited[phase.binding] = waited.get(phase.binding, 0.0) + phase.seconds
        return max(waited, key=lambda name: waited[name])


def work_of(plan: Plan, sizes: Sizes, conditions: Conditions) -> StepWork:
    """Return the bytes that one rank moves, and its updates, in one step of a plan."""
    units = units_on(Tier.DISK, plan, sizes)
    on_disk = stored_bytes(plan, units)
    below = sum(u.share_bytes for u in (*units, *units_on(Tier.HOST, plan, sizes)))
    passes = 2 * plan.accumulation_steps
    # Passes alternate direction: each begins with the units that the one before it ended with.
    pool, buffers = in_memory_bytes(plan, sizes), pooled_bytes(plan, sizes)
    still_in_memory = on_disk * min(pool, buffers) // max(buffers, 1)
    updates: dict[str, int] = {}
    for dtype, elements in sizes.trained:
        key = update_key(dtype, state_format_of(dtype, plan, conditions))
        updates[key] = updates.get(key, 0) + elements
    written = read = 0
    memory = states_of(plan, sizes, conditions)
    if plan.states == Tier.DISK:
        written = memory.disk_bytes
        # Steps alternate direction over the chunks: those still in the ring are not read.
        read = max(0, written - memory.ring_bytes)
    away = not conditions.device_is_host
    # In vertical order (``micro_batches``) fp32 sums come down in place of gradients.
    sums = 4 * sum(elements for _, elements in sizes.trained)
    down = plan.accumulation_steps * (sums if plan.micro_batches > 1 else sizes.gradient_bytes)
    if reaches_device(plan.update_on):  # gradients are summed on the device
        down = sums if plan.accumulation_steps > 1 else sizes.gradient_bytes
    updated_up = sum(u.gradient_bytes for u in units_on(Tier.DEVICE, plan, sizes))
    halves = sum(d.itemsize * n for d, n in sizes.trained if d != torch.float32)
    return StepWork(
        updates,
        memory.logical_bytes,
        read,
        written,
        passes * (on_disk - still_in_memory),
        sum(unit.gradient_bytes for unit in units_on(Tier.DISK, plan, sizes)),
        passes * below if away else 0,
        updated_up if away else 0,
        down if away else 0,
        halves if away else 0,
        _activations(plan, conditions),
    )


def _activations(plan: Plan, conditions: Conditions) -> MovedActivations:
    """Return the bytes of activations that all micro-batches of a step move."""
    moved, times = moved_activations(plan, conditions.activations), plan.accumulation_steps
    over_link = 0 if conditions.device_is_host else moved.over_link
    return MovedActivations(times * moved.written, times * moved.read, times * over_link)


def compute_seconds(batch: MicroBatch, dtype: torch.dtype, machine: MachineRates) -> float:
    """Return how long forward and backward of one micro-batch take.

    Raises:
        OptionError: The profile lacks the rate.
    """
    rates = machine.profile.compute.get(machine.device)
    flops = None if rates is None else rates.flops.get(dtype_key(dtype))
    if rates is None or flops is None:
        _refuse_unmeasured(f"rate of computing in {dtype_key(dtype)} on {machine.device}")
    elementwise = batch.tensor_bytes / rates.tensor_bytes + batch.calls * rates.call_seconds
    return batch.flops / flops + elementwise + batch.random_elements / rates.random_elements


def time_of(
    plan: Plan, sizes: Sizes, conditions: Conditions, batch: MicroBatch, machine: MachineRates
) -> StepTime:
    """Return how long a step of a plan takes.

    Raises:
        OptionError: The profile lacks a rate that the plan needs.
    """
    work = work_of(plan, sizes, conditions)
    compute = compute_seconds(batch, sizes.compute_dtype, machine)
    on = "cores" if conditions.device_is_host else "accelerator"
    profile = machine.profile
    compute *= plan.accumulation_steps
    reads, writes, states = _disk_seconds(work, machine)
    up = _over_link("up", work.up, machine)
    update = _update_loads(plan, work, machine)
    first = _FORWARD_BEFORE_TWO if plan.activations is ActivationPlacement.RECOMPUTE else _FORWARD
    forward = {on: first * compute, "disk": reads / 2, "link up": up / 2}
    backward = {on: (1 - first) * compute, "disk": reads / 2, "link up": up / 2}
    if not reaches_device(plan.update_on):  # else gradients are summed on the device
        backward["link down"] = _over_link("down", work.down, machine)
    # All bytes that are read or written go through a checksum.
    states_and_weights = work.state_read + work.state_written + work.parameters_written
    on_cores = {"cores": states_and_weights / profile.checksums}
    step = _sum([update.loads, on_cores, {"disk": states + writes}])
    # So do parameters, half of them in either direction.
    for loads in (forward, backward):
        seconds = work.parameters_read / profile.checksums
        loads["cores"] = loads.get("cores", 0.0) + seconds / 2
    saved, brought = _activation_loads(work.activations, machine)
    forward, backward = _sum([forward, saved]), _sum([backward, brought])
    if machine.network is not None:
        traffic, rate = traffic_of(plan, sizes, machine.network), machine.network.bytes_per_second
        for loads, sent in (
            (forward, traffic.forward),
            (backward, traffic.backward),
            (step, traffic.update),
        ):
            loads["network"] = sum(sent.values()) / rate
    share = _first_share(sizes)
    first_update, rest = _scaled(step, share), _scaled(step, 1 - share)
    goes_on = Tier.DISK not in plan.parameter_tiers and not reaches_device(plan.update_on)
    if plan.timing.begins_early and goes_on:
        phases = {"forward, backward and update": _sum([forward, backward, rest])}
        phases["update after backward"] = _sum([first_update])
    elif plan.timing.begins_early:
        phases = {"forward": forward, "backward and update": _sum([backward, rest])}
        phases["update after backward"] = _sum([first_update])
    elif plan.timing.waits_by_module:
        phases = {"update before forward": _sum([first_update])}
        phases |= {"update and forward": _sum([rest, forward]), "backward": backward}
    else:
        phases = {"forward": forward, "backward": backward, "update": step}
    return StepTime(tuple(map(StepPhase, phases, phases.values())), compute, update.kernels)


def _activation_loads(
    moved: MovedActivations, machine: MachineRates
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of each resource in forward and in backward, disk and checksums first."""
    disk, checksums = machine.disk, machine.profile.checksums
    saved: dict[str, float] = {"link down": _over_link("down", moved.over_link, machine)}
    brought: dict[str, float] = {"link up": _over_link("up", moved.over_link, machine)}
    if disk is not None:  # else no activations are on disk
        saved |= {"disk": moved.written / disk.write, "cores": moved.written / checksums}
        brought |= {"disk": moved.read / disk.read, "cores": moved.read / checksums}
    return saved, brought


def _first_share(sizes: Sizes) -> float:
    """Return the share of all elements that the first trained parameter has.

    It is the root's first, an embedding in most models: forward needs it first, and backward
    produces its gradient last.
    """
    trained = [unit for unit in sizes.units if unit.trained]
    if not trained:
        return 0.0
    first = next((unit for unit in trained if not unit.name), trained[0])
    return first.trained[0][1] / sum(unit.trained_elements for unit in trained)


def break_even_tokens(step: StepTime, tokens: int) -> int | None:
    """Return the least tokens per step with which computing takes longer than any transfer.

    ``tokens``: those of ``step`` on one rank. None: nothing is moved.
    """
    moved = max((s for name, s in step.busy.items() if name in _TRANSFERS), default=0.0)
    if not moved or not step.compute:
        return None
    return -int(-tokens * moved // step.compute)


_TRANSFERS = ("disk", "link up", "link down", "network")


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
            "The plan has bytes on disk, and the profile has no directory with measured rates: run"
            " `tensorstow calibrate DIR`."
        )
        raise OptionError(message)
    both = min(work.state_read, work.state_written)
    # Bytes that are read and written pass at the mixed rate, which counts both ways.
    states = 2 * both / disk.mixed + (work.state_written - both) / disk.write
    return work.parameters_read / disk.read, work.parameters_written / disk.write, states


def _over_link(way: str, nbytes: int, machine: MachineRates) -> float:
    """Return the seconds of bytes that go over the link, "up" or "down"."""
    if not nbytes:
        return 0.0
    link = machine.profile.link
    if link is None:
        _refuse_unmeasured("link to an accelerator")
    return nbytes / (link.up if way == "up" else link.down)


@dataclass(frozen=True, slots=True)
class _Update:
    """The update of a step."""

    kernels: float
    """Seconds of the slower side."""
    loads: Mapping[str, float]


def _update_loads(plan: Plan, work: StepWork, machine: MachineRates) -> _Update:
    """Return how long each resource works in the update, without the disk."""
    on_device = device_share(plan.update_on, work, machine)
    on_host = 1 - on_device
    host = _host_loads(work, machine) if on_host else {}
    device = _device_loads(work, machine) if on_device else {}
    if not reaches_device(plan.update_on):
        host.pop("link down", None)  # gradients came down during backward
    loads = _sum([_scaled(host, on_host), _scaled(device, on_device)])
    return _Update(max(loads.get("cores", 0.0), loads.get("accelerator", 0.0)), loads)


def device_share(update_on: UpdateOn | None, work: StepWork, machine: MachineRates) -> float:
    """Return the share of the states that the accelerator updates.

    This predicts what a run measures in its first steps: with "hybrid" both sides end together,
    with "auto" the faster side updates all. Raises OptionError if the profile lacks a rate.
    """
    if isinstance(update_on, float):
        return update_on
    if not reaches_host(update_on):
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
    """Return the seconds of each resource if the host updates all parameters."""
    return {
        "cores": sum(n / _rate(key, machine) for key, n in work.updates.items()),
        "link up": _over_link("up", work.updated_up, machine),
        "link down": _over_link("down", work.down, machine),
    }


def _device_loads(work: StepWork, machine: MachineRates) -> dict[str, float]:
    """Return the seconds of each resource if the accelerator updates all parameters."""
    rates = machine.profile.device_update
    lacking = [key for key in work.updates if key not in rates]
    if lacking:
        _refuse_unmeasured(f"rate of updates of {', '.join(lacking)} on an accelerator")
    return {
        "accelerator": sum(n / rates[key] for key, n in work.updates.items()),
        "link up": _over_link("up", work.states, machine),
        "link down": _over_link("down", work.states + work.weights_down, machine),
    }


def _refuse_unmeasured(rate: str) -> NoReturn:
    message = (
        f"The profile has no {rate}: run `tensorstow calibrate` on a machine that has one, and"
        " name its profile."
    )
    raise OptionError(message)


def _scaled(loads: Mapping[str, float], share: float) -> dict[str, float]:
    return {name: share * seconds for name, seconds in loads.items()}


def _sum(loads: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the total seconds by resource, without resources that have no work."""
    totals: dict[str, float] = {}
    for load in loads:
        for name, seconds in load.items():
            if seconds:
                totals[name] = totals.get(name, 0.0) + seconds
    return totals
