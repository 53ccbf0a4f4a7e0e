"""Reads the weights of units from their files ahead of use, and attaches them to the modules.

[Note: Read ahead] A module that is about to run is a *call*. Which call follows which is remembered
from the last pass (at first it is the order of definition), and the last call of a pass is followed
by the first of the next one. So reading goes on from token to token of a generation. A prediction
that does not come true costs time and no more.

[Note: Lent weights] Between calls a parameter is an ``AbsentWeight``. For a call each place that
has it in a module gets a parameter over a buffer, and its ``AbsentWeight`` back afterwards. Buffers
hold a unit until another one needs the room; of those that are not in use the one whose next call
is farthest goes first.

[Note: On an accelerator] Units in host memory and on disk have buffers on the device too. A unit is
copied there as soon as it is read and there is room, at the latest before its call; the caller's
stream waits for the copy, and the next copy to the same buffer for the work of the call.

[Note: Experts] Of a unit of experts a call reads those that it uses and that are not in the buffer
yet. They are not read ahead: which are used is known when the call begins. The rest of the buffer
has no values.

No thread holds the lock while it waits for a read or a copy.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.checkpoint.coded_weights import PlacedCodes
from tensorstow.io.arena import Arena
from tensorstow.io.device_link import DeviceEvent, DeviceLink, DeviceMemory
from tensorstow.io.file_runs import Run, cut_runs
from tensorstow.io.pinned import HostMemory, PinnedBlock
from tensorstow.io.safetensors import Entry
from tensorstow.memory.moving_bytes import ByteState, MovingBytes
from tensorstow.memory.unit_buffers import UnitBuffers


@dataclass(frozen=True, eq=False, slots=True)
class FileTensor:
    """One parameter of a unit, with its places in the unit's buffer and in modules."""

    name: str
    """Its name in the model."""
    entry: Entry
    """Its bytes in a file."""
    absent: nn.Parameter
    """The placeholder that modules have while the unit is not in use."""
    places: Sequence[tuple[nn.Module, str]]
    """Modules, and the parameter's name in each."""
    at: int
    """Where its bytes begin in the buffer."""
    cast_at: int | None
    """Where its values in the dtype of ``absent`` begin; None: it is stored in that dtype."""
    codes: PlacedCodes | None = None
    """The codes of a weight that is stored so."""

    def cast(self, memory: HostMemory, experts: Iterable[int] | None = None) -> None:
        """Compute the values in the parameter's dtype, if they are stored in another one.

        ``experts``: of these alone; None: all values.
        """
        if self.codes is not None and experts is not None:
            for expert in experts:
                row = self.expert(self.values(memory), expert).view(1, *self.absent.shape[1:])
                self.codes.expert(expert).decode(memory.tensor, row)
        elif self.codes is not None:
            self.codes.decode(memory.tensor, self.values(memory).view(self.absent.shape))
        elif self.cast_at is not None:
            stored = memory.tensor(self.at, self.absent.numel(), self.entry.dtype)
            values = self.values(memory)
            if experts is None:
                values.copy_(stored)
                return
            rows = stored.view(len(self.absent), -1)
            for expert in experts:
                self.expert(values, expert).copy_(rows[expert])

    def attach(self, memory: HostMemory | DeviceMemory) -> nn.Parameter:
        """Put a parameter over the memory in place; return it."""
        values = self.values(memory).view(self.absent.shape)
        # ``data``: each has a version counter of its own.
        return self._put(nn.Parameter(values.data, requires_grad=False))

    def take_back(self) -> None:
        """Put the parameter without memory in place again."""
        self._put(self.absent)

    def values(self, memory: HostMemory | DeviceMemory) -> torch.Tensor:
        """Return the values that are computed with, in one dimension."""
        begin = self.at if self.cast_at is None else self.cast_at
        return memory.tensor(begin, self.absent.numel(), self.absent.dtype)

    def expert(self, values: torch.Tensor, expert: int) -> torch.Tensor:
        """Return those of ``values`` that one expert has."""
        return values.view(len(self.absent), -1)[expert]

    def bytes_of_expert(self, expert: int) -> list[tuple[int, int]]:
        """Return where an expert's stored bytes begin and end in the buffer."""
        if self.codes is not None:
            places = self.codes.expert(expert).places
            return [(at, at + entry.nbytes) for at, entry in places]
        nbytes = self.absent.numel() // len(self.absent) * self.entry.dtype.itemsize
        return [(self.at + expert * nbytes, self.at + (expert + 1) * nbytes)]

    def _put(self, parameter: nn.Parameter) -> nn.Parameter:
        for module, name in self.places:
            module._parameters[name] = parameter  # noqa: SLF001  # setattr would check each
        return parameter


@dataclass(eq=False, slots=True)
class StreamedUnit(MovingBytes):
    """Parameters that are read and used together; the state is of its buffer in host memory."""

    name: str
    tensors: Sequence[FileTensor]
    nbytes: int
    """Bytes of its buffer."""
    runs: Sequence[Run] = ()
    """The reads from files; none for a unit that stays in host memory."""
    resident: HostMemory | None = None
    """The memory that its values stay in, for an accelerator to copy; None: they are in files."""
    copied: DeviceEvent | None = None
    """The end of the copy to the device; None: it is not on the device."""
    last_copy: DeviceEvent | None = None
    """The end of the last copy from its host memory."""
    users: int = 0
    """Calls under way that use it."""
    experts: int = 0
    """How many experts each tensor stacks, which are read one by one; 0: they are read as one."""
    present: set[int] = field(default_factory=set)
    """Experts that are in the buffer in host memory, or are being read."""
    copied_experts: set[int] = field(default_factory=set)
    """Experts that are in the buffer on the device, or are being copied."""
    fresh: set[int] = field(default_factory=set)
    """Experts that are being read."""
    attached: list[nn.Parameter] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Versions of the attached parameters, when they were attached."""

    def is_busy(self) -> bool:
        """Return whether a read or a copy uses its buffer in host memory."""
        return not (self.is_over() and (self.last_copy is None or self.last_copy.query()))

    def reads_of(self, experts: Iterable[int]) -> Sequence[Run]:
        """Return what is read of the unit: all, or of a unit of experts these."""
        if not self.experts:
            return self.runs
        places = [t.bytes_of_expert(expert) for expert in sorted(experts) for t in self.tensors]
        return [
            r for place in places for begin, end in place for r in cut_runs(self.runs, begin, end)
        ]

    def is_cast(self) -> bool:
        """Return whether a tensor of it is stored in another dtype."""
        return any(tensor.cast_at is not None for tensor in self.tensors)


@dataclass(eq=False, slots=True)
class Call:
    """A module that uses a unit's parameters while it runs."""

    module: nn.Module
    unit: StreamedUnit
    depth: int = 0
    """How often it is running now: modules may call themselves."""
    following: "Call | None" = None
    """The call that came after it, last time."""


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """The bounds of a stream."""

    prefetch: int
    """How many units are read ahead."""
    host_bytes: int
    """Bytes of all buffers in host memory."""
    device_bytes: int = 0
    """Bytes of all buffers on an accelerator."""


class WeightStream:
    """The units of one model that are read or copied in each pass, and their memory."""

    def __init__(
        self, calls: Sequence[Call], limits: StreamLimits, link: DeviceLink | None = None
    ) -> None:
        """Begin with nothing in memory.

        ``calls``: all that use units, in the expected order. Without a link the CPU computes.
        """
        for call, following in zip(calls, [*calls[1:], *calls[:1]], strict=True):
            call.following = following
        self.calls = calls
        self.bytes_read = 0
        self.link = link
        self._prefetch = limits.prefetch
        self._last: Call | None = None
        self.host: UnitBuffers[StreamedUnit, HostMemory] = UnitBuffers(
            limits.host_bytes, self._allocate, self._settle, self._upcoming
        )
        self.device: UnitBuffers[StreamedUnit, DeviceMemory] = UnitBuffers(
            limits.device_bytes, self._allocate_on_device, self._forget_copy, self._upcoming
        )
        self._lock = threading.RLock()

    @property
    def units(self) -> list[StreamedUnit]:
        """Return the units, each once."""
        return list(dict.fromkeys(call.unit for call in self.calls))

    @property
    def pinned_bytes(self) -> int:
        """Return the host memory that is pinned for copies to the device."""
        memory = [*self.host.buffers, *(unit.resident for unit in self.units)]
        return sum(block.pinned_bytes for block in memory if isinstance(block, PinnedBlock))

    def enter(self, call: Call, experts: frozenset[int] = frozenset()) -> None:
        """Attach the weights that a call uses; raises errors of reading them.

        ``experts``: those that a call of experts uses.
        """
        with self._lock:
            if self._last is not None:
                self._last.following = call
            self._last = call
            # A unit with users keeps its buffers, also while it is read.
            call.unit.users += 1
        try:
            while (busy := self._try_to_attach(call.unit, experts)) is not None:
                _wait_for(busy)
        except BaseException:
            self._end_use(call.unit)
            raise
        with self._lock:
            call.depth += 1

    def leave(self, call: Call, *_: object) -> None:
        """Take the weights back; a call that could not begin has none.

        Raises OptionError if they were written to.
        """
        with self._lock:
            if call.depth == 0:
                return
            call.depth -= 1
        self._end_use(call.unit)
        while (busy := self._try_to_read_ahead()) is not None:
            _wait_for(busy)

    # --- attaching ---

    def _try_to_read_ahead(self) -> StreamedUnit | None:
        with self._lock, torch.inference_mode(mode=False), torch.no_grad():
            return self._read_ahead()

    def _try_to_attach(self, unit: StreamedUnit, experts: frozenset[int]) -> StreamedUnit | None:
        """Attach a unit, and read ahead; return what to wait for, without the lock, or None."""
        with self._lock, torch.inference_mode(mode=False), torch.no_grad():
            if not self._begin_read(unit, None, experts):
                # Either what has to leave is busy, or the unit itself is being read.
                return self._busy_for(unit, ()) or unit
            busy = self._read_ahead()
            if busy is None and (unit.experts or not unit.attached):
                if not unit.is_over():
                    return unit
                self._attach(unit, experts)
            return busy

    def _attach(self, unit: StreamedUnit, experts: frozenset[int]) -> None:
        memory: HostMemory | DeviceMemory | None = self._finish_read(unit)
        if self.link is not None:
            memory = self._begin_copy(unit, None, experts)
            if unit.copied is not None:
                self.link.join(unit.copied)
        if memory is None:
            message = f"Unit {unit.name!r} is to be attached and is not in memory."
            raise AssertionError(message)
        if not unit.attached:
            unit.attached = [tensor.attach(memory) for tensor in unit.tensors]
            unit.versions = [p._version for p in unit.attached]  # noqa: SLF001  # no public way

    def _end_use(self, unit: StreamedUnit) -> None:
        with self._lock, torch.inference_mode(mode=False), torch.no_grad():
            unit.users -= 1
            if unit.users == 0 and unit.attached:
                self._take_back(unit)

    def _take_back(self, unit: StreamedUnit) -> None:
        buffer = self.device.get(unit)
        if self.link is not None and buffer is not None:
            buffer.last_use = self.link.record_event()
        written = [
            tensor.name
            for tensor, attached, version in zip(
                unit.tensors, unit.attached, unit.versions, strict=True
            )
            if attached._version != version  # noqa: SLF001
        ]
        for tensor, attached in zip(unit.tensors, unit.attached, strict=True):
            tensor.take_back()
            # A graph that saved it then raises an error instead of using other weights.
            torch.autograd.graph.increment_version(attached)
        unit.attached, unit.versions = [], []
        if written:
            # The buffer has the change: the next call has to read or copy the weights again.
            (self.host if self.link is None else self.device).drop(unit)
            message = (
                f"{', '.join(written)} of unit {unit.name!r} was written to in forward, and the"
                " model is only read: the change is dropped. Change weights before stow(); models"
                " that write to weights as they compute need an optimizer in place of None."
            )
            raise OptionError(message)

    # --- reading ahead ---

    def _read_ahead(self) -> StreamedUnit | None:
        """Begin reading and copying the next units, as far as nearer ones leave room.

        Return what to wait for, without the lock, before more can be read; None: nothing.
        """
        nearer: list[StreamedUnit] = []
        for unit in self._upcoming():
            if len(nearer) == self._prefetch:
                break
            # Units in use are in memory, and which experts a call uses is not known yet.
            if unit.users or unit in nearer or unit.experts:
                continue
            if not self._begin_read(unit, keep=nearer):
                return self._busy_for(unit, nearer)
            nearer.append(unit)
            if self.link is not None and unit.is_over():
                self._finish_read(unit)
                self._begin_copy(unit, keep=nearer)
        return None

    def _upcoming(self) -> Iterator[StreamedUnit]:
        """Yield the units of the next calls, of one pass."""
        call = self._last
        for _ in self.calls:
            call = None if call is None else call.following
            if call is None:
                return
            yield call.unit

    def _begin_read(
        self,
        unit: StreamedUnit,
        keep: Iterable[StreamedUnit] | None,
        experts: frozenset[int] = frozenset(),
    ) -> bool:
        """Begin reading what of a unit is not in memory; return whether there was room.

        ``keep``: as in ``UnitBuffers.take``. There is no room while what must leave is busy.
        """
        if unit.resident is not None:
            return True
        missing = experts - unit.present - unit.copied_experts
        is_on_device = self.device.get(unit) is not None
        memory = self.host.get(unit)
        if not missing and (is_on_device or memory is not None):
            return True
        if memory is None:
            # take() waits for what leaves, with the lock held: nothing of that may be busy.
            is_busy = self._busy_for(unit, keep or ()) is not None
            memory = None if is_busy else self.host.take(unit, keep)
        elif not unit.is_over():
            return False
        if memory is None:
            return False
        self._finish_read(unit)
        unit.move(ByteState.READING)
        unit.fresh = set(missing)
        unit.present |= missing
        try:
            for run in unit.reads_of(missing):
                into = memory.tensor(run.at, run.nbytes, torch.uint8)
                unit.transfers.append(run.file.read(run.offset, into))
                self.bytes_read += run.nbytes
        except BaseException:
            _forget_read(self.host, unit)
            raise
        return True

    def _busy_for(self, unit: StreamedUnit, keep: Iterable[StreamedUnit]) -> StreamedUnit | None:
        """Return a unit that is busy, and is to leave host memory for this one."""
        return next((u for u in self.host.leaving_for(unit, keep) if u.is_busy()), None)

    def _finish_read(self, unit: StreamedUnit) -> HostMemory | None:
        """Return host memory with a unit's values; None: it is on the device already."""
        memory = unit.resident or self.host.get(unit)
        if memory is not None and unit.state is ByteState.READING:
            try:
                unit.settle(partial(_check_and_cast, unit, memory))
            except BaseException:
                _forget_read(self.host, unit)
                raise
        return memory

    def _begin_copy(
        self,
        unit: StreamedUnit,
        keep: Iterable[StreamedUnit] | None,
        experts: frozenset[int] = frozenset(),
    ) -> DeviceMemory | None:
        """Begin copying what of a unit is in host memory alone; None: there is no room."""
        buffer, missing = self.device.get(unit), experts - unit.copied_experts
        if self.link is None or (buffer is not None and not missing):
            return buffer
        memory = self._finish_read(unit)
        if buffer is None and memory is not None:
            buffer = self.device.take(unit, keep)
        if memory is None or buffer is None:
            return None
        # Only values cross the link. If nothing was cast, the buffer has nothing but values.
        if unit.experts:
            pairs = [
                (t.expert(t.values(buffer), expert), t.expert(t.values(memory), expert))
                for expert in sorted(missing)
                for t in unit.tensors
            ]
        elif unit.is_cast():
            pairs = [(tensor.values(buffer), tensor.values(memory)) for tensor in unit.tensors]
        else:
            pairs = [(buffer.bytes, memory.tensor(0, unit.nbytes, torch.uint8))]
        unit.copied_experts |= missing
        try:
            unit.copied = unit.last_copy = self.link.h2d(pairs, [buffer.last_use])
        except BaseException:
            self.device.drop(unit)  # it would be taken for the unit's values
            raise
        return buffer

    # --- buffers ---

    def _allocate(self, nbytes: int) -> HostMemory:
        if self.link is None:
            return Arena(nbytes, in_children=False)
        return PinnedBlock(nbytes, self.link.device, self.link.synchronize)

    def _allocate_on_device(self, nbytes: int) -> DeviceMemory:
        if self.link is None:
            message = "A buffer on a device was asked for, and the CPU computes."
            raise AssertionError(message)
        return DeviceMemory(nbytes, self.link)

    @staticmethod
    def _settle(unit: StreamedUnit, _: HostMemory) -> None:
        """Forget a unit's bytes in host memory; those that a copy still reads do not leave."""
        unit.leave()
        unit.present.clear()

    @staticmethod
    def _forget_copy(unit: StreamedUnit, _: DeviceMemory) -> None:
        unit.copied = None
        unit.copied_experts.clear()


def _forget_read(buffers: UnitBuffers[StreamedUnit, HostMemory], unit: StreamedUnit) -> None:
    """Forget a read that failed; other calls may compute with experts that were read before."""
    if not unit.attached:
        buffers.drop(unit)
        return
    _wait_for(unit)
    unit.transfers.clear()
    unit.move(ByteState.PRESENT)
    unit.present -= unit.fresh


def _wait_for(unit: StreamedUnit) -> None:
    """Wait until nothing uses a unit's buffer in host memory; ``settle`` raises the errors."""
    with suppress(OSError):
        unit.wait()
    if unit.last_copy is not None:
        unit.last_copy.synchronize()


def _check_and_cast(unit: StreamedUnit, memory: HostMemory) -> None:
    """Raise an error if a file has changed; else compute what is stored in another dtype."""
    for file in {run.file for run in unit.runs}:
        file.validate_unchanged()
    for tensor in unit.tensors:
        tensor.cast(memory, unit.fresh if unit.experts else None)
