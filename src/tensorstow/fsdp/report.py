"""Counts the bytes that a stowed model's parameters hold and move, for reports."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from tensorstow.fsdp.gradient_offload import gradient_offload_of
from tensorstow.fsdp.h2d_prefetch import h2d_prefetcher_of
from tensorstow.fsdp.read_only import streams_in
from tensorstow.fsdp.shard_storage import ShardStorage
from tensorstow.fsdp.stowed_parameter import storage_of
from tensorstow.fsdp.units import is_read_only
from tensorstow.io.device_link import DeviceLink
from tensorstow.io.transfer_log import TransferLog
from tensorstow.memory.buffer_pool import BufferPool
from tensorstow.planner.placement import Item
from tensorstow.report.run_record import Compared, PredictedStep
from tensorstow.states.memory import StateMemory
from tensorstow.tensors.dtensor import to_local
from tensorstow.tensors.placeholder import AbsentWeight


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Bytes of one rank's parameters, padding included."""

    host_bytes: int = 0
    """Bytes of parameters that stay in host memory."""
    disk_bytes: int = 0
    """Bytes of parameters on disk."""
    buffer_pool_bytes: int = 0
    """Host memory that parameters on disk hold now."""
    most_buffer_pool_bytes: int = 0
    """The most that they held at once."""
    bytes_read: int = 0
    bytes_written: int = 0
    link_bytes_down: int = 0
    """Bytes of reduced gradients copied from the device that computes, if it is not the CPU."""
    link_bytes_up: int = 0
    """Bytes of weights copied to the device that computes, before they are gathered."""
    pinned_bytes: int = 0
    """Host memory that is pinned, for weights and gradients: where they stay or pass through."""
    staging_bytes: int = 0
    """Host memory that weights pass through if the device cannot copy them in place."""
    device_bytes: int = 0
    """The device's memory that weights pass through before they are gathered."""
    device_cache_bytes: int = 0
    """The device's memory in which copies of weights stay (``Plan.device_budget``)."""
    device_parameter_bytes: int = 0
    """Bytes of parameters that stay on the device that computes, if it is not the CPU."""
    file_bytes: int = 0
    """Bytes of parameters on disk that are read from your own files, without a copy."""


def parameter_bytes(model: nn.Module) -> ParameterBytes:
    """Return the bytes that a model's parameters hold and have moved on this rank.

    Parameters on the meta device have no bytes.
    """
    if is_read_only(model):
        return _bytes_of_read_only(model)
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # sizes, and no weights to wait for
        return _bytes_of_trained(model)


def _bytes_of_trained(model: nn.Module) -> ParameterBytes:
    """Return the counts of a model that is trained."""
    shards = [s for p in model.parameters() if (s := storage_of(p)) is not None]
    on_disk = [s for s in shards if s.pager is not None and not s.pager.is_in_files]
    pools = _pools_of(shards)
    read = {s.pager for s in shards if s.pager is not None and s.pager.is_in_files}
    decoders = [pager.decoder for pager in read if pager.decoder is not None]
    file_bytes = sum(pager.file_bytes for pager in read)
    blocks = {s.block for s in shards if s.block is not None}
    h2d, gradients = h2d_prefetcher_of(model), gradient_offload_of(model)
    plain = _own_bytes(p for p in model.parameters() if storage_of(p) is None)
    return ParameterBytes(
        host_bytes=plain.host
        + sum(s.padded.nbytes for s in shards if s.pager is None)
        + sum(decoder.held_bytes for decoder in decoders),
        disk_bytes=sum(shard.padded.nbytes for shard in on_disk) + file_bytes,
        buffer_pool_bytes=sum(pool.memory.held for pool in pools),
        most_buffer_pool_bytes=sum(pool.memory.peak for pool in pools),
        bytes_read=sum(pool.bytes_read for pool in pools),
        bytes_written=sum(pool.bytes_written for pool in pools),
        link_bytes_down=0 if gradients is None else gradients.bytes_down,
        link_bytes_up=sum(shard.bytes_up for shard in shards),
        pinned_bytes=sum(block.pinned_bytes for block in blocks)
        + (0 if gradients is None else gradients.pinned_bytes)
        + (0 if h2d is None else h2d.buffers.pinned_bytes),
        staging_bytes=0 if h2d is None else h2d.buffers.staging_bytes,
        device_bytes=0 if h2d is None else h2d.buffers.device_bytes,
        device_cache_bytes=0 if h2d is None else h2d.buffers.own_bytes,
        device_parameter_bytes=plain.device,
        file_bytes=file_bytes,
    )


def _bytes_of_read_only(model: nn.Module) -> ParameterBytes:
    """Return the counts of a model that is only read."""
    streams = streams_in(model)
    units = [unit for stream in streams for unit in stream.units]
    resident = _own_bytes(p for p in model.parameters() if not isinstance(p, AbsentWeight))
    links = [stream.link for stream in streams if stream.link is not None]
    return ParameterBytes(
        host_bytes=resident.host + sum(unit.nbytes for unit in units if unit.resident is not None),
        disk_bytes=sum(run.nbytes for unit in units for run in unit.runs),
        buffer_pool_bytes=sum(stream.host.memory.held for stream in streams),
        most_buffer_pool_bytes=sum(stream.host.memory.peak for stream in streams),
        bytes_read=sum(stream.bytes_read for stream in streams),
        link_bytes_up=sum(link.bytes_up for link in links),
        pinned_bytes=sum(stream.pinned_bytes for stream in streams),
        device_bytes=sum(stream.device.memory.held for stream in streams),
        device_parameter_bytes=resident.device,
        file_bytes=sum(run.nbytes for unit in units for run in unit.runs),
    )


class _OwnBytes(NamedTuple):
    """Bytes of parameters that have memory of their own."""

    host: int
    device: int


def _own_bytes(parameters: Iterable[nn.Parameter]) -> _OwnBytes:
    """Return the bytes of this rank's part of plain parameters, and of torch's sharded ones."""
    host = device = 0
    for parameter in parameters:
        local = to_local(parameter)
        if local.is_cpu:
            host += local.nbytes
        elif not local.is_meta:
            device += local.nbytes
    return _OwnBytes(host, device)


def _pools_of(shards: Iterable[ShardStorage]) -> list[BufferPool]:
    return list(dict.fromkeys(shard.pager.pool for shard in shards if shard.pager is not None))


class ParameterPart:
    """What a model that ``stow`` placed holds and moves, apart from its optimizer's states."""

    def __init__(
        self,
        model: weakref.ref[nn.Module],
        links: Sequence[DeviceLink],
        predict: Callable[[], Sequence[Item]],
        step: PredictedStep | None = None,
    ) -> None:
        """Log nothing yet; ``links``: those that the model's weights and gradients go over.

        ``predict`` returns what the plan holds on each tier; ``step`` is the prediction for a step.
        """
        self._model = model
        self._links = tuple(links)
        self._predict = predict
        self._step = step
        alive = model()
        parameters = [] if alive is None else alive.parameters()
        shards = [s for p in parameters if (s := storage_of(p)) is not None]
        self.pools = _pools_of(shards)

    def start_log(self, log: TransferLog) -> None:
        """Log transfers, and waits for them, to ``log`` from now on."""
        for link in self._links:
            link.start_log(log)
        for pool in self.pools:
            pool.log_to(log)

    def end_log(self) -> None:
        """Log the rest, and stop logging."""
        for link in self._links:
            link.end_log()
        for pool in self.pools:
            pool.log_to(None)

    def held(self) -> Mapping[str, Callable[[], int]]:
        """Return counters of the memory of weights that are read from disk."""
        if not self.pools:
            return {}
        return {"buffer pool": lambda: sum(pool.memory.held for pool in self.pools)}

    def moved(self) -> Mapping[str, int]:
        """Return the bytes of weights and gradients moved so far."""
        return {
            "weights read": sum(pool.bytes_read for pool in self.pools),
            "weights written": sum(pool.bytes_written for pool in self.pools),
            "from the accelerator": sum(link.bytes_down for link in self._links),
            "to the accelerator": sum(link.bytes_up for link in self._links),
        }

    def disk_bytes(self) -> int:
        """Return the bytes of weights on disk."""
        model = self._model()
        return 0 if model is None else parameter_bytes(model).disk_bytes

    def predicted(self) -> PredictedStep | None:
        """Return the predicted step; None: nothing was predicted."""
        return self._step

    def compared(self, memory: StateMemory) -> list[Compared]:
        """Return the plan's predictions with the measured bytes."""
        model = self._model()
        if model is None:
            return []
        held = parameter_bytes(model)
        measured = {
            ("host", "states"): memory.ram_bytes,
            ("host", "ring of states"): memory.ring_bytes,
            ("disk", "states"): memory.file_bytes,
            ("host", "parameters from disk, in memory"): held.most_buffer_pool_bytes,
            ("disk", "parameters"): held.disk_bytes,
            ("host", "weights that updates write"): memory.host_weight_bytes,
            ("host", "buffers for gradients of chunks"): memory.staging_bytes,
            ("host", "buffers for parameters"): held.staging_bytes,
            ("device", "buffers for states"): memory.device_bytes,
            ("device", "buffers for parameters"): held.device_bytes,
            ("device", "parameters"): held.device_parameter_bytes,
        }
        stored = [p for p in model.parameters() if storage_of(p) is not None]
        if not stored or any(p.is_cpu for p in stored):
            measured["host", "parameters"] = held.host_bytes
        items = [(str(item.tier), item.purpose, item.nbytes) for item in self._predict()]
        return [Compared(t.upper(), name, n, measured.get((t, name))) for t, name, n in items]
