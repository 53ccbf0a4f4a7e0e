"""The part of a recording that a stowed model's parameters are: disk, links, and its plan."""

import weakref
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from tensorstow.fsdp.report import parameter_bytes
from tensorstow.fsdp.stowed_parameter import storage_of
from tensorstow.io.buffer_pool import BufferPool
from tensorstow.io.device_link import DeviceLink
from tensorstow.io.transfer_log import TransferLog
from tensorstow.planner.placement import Item
from tensorstow.report.run_record import Compared
from tensorstow.states.memory import StateMemory


class ParameterPart:
    """What a model that ``stow`` placed holds and moves, beside its optimizer's states.

    Args:
        model: The model, which is not kept alive.
        links: The links that its weights and gradients go over.
        predict: Returns what its plan holds on each tier.
    """

    def __init__(
        self, model: nn.Module, links: Sequence[DeviceLink], predict: Callable[[], Sequence[Item]]
    ) -> None:
        """Log nothing yet; the class documents the arguments."""
        self._model = weakref.ref(model)
        self._links = tuple(links)
        self._predict = predict
        shards = [s for p in model.parameters() if (s := storage_of(p)) is not None]
        pools = [shard.pager.pool for shard in shards if shard.pager is not None]
        self._pools: list[BufferPool] = list({id(pool): pool for pool in pools}.values())

    def start_log(self, log: TransferLog) -> None:
        """Put transfers, and waits for them, into ``log`` from now on."""
        for link in self._links:
            link.start_log(log)
        for pool in self._pools:
            pool.start_log(log)

    def end_log(self) -> None:
        """Put the rest into the log, and log no more."""
        for link in self._links:
            link.end_log()
        for pool in self._pools:
            pool.end_log()

    def held(self) -> Mapping[str, Callable[[], int]]:
        """Return what counts the memory of weights that are read from disk."""
        if not self._pools:
            return {}
        return {"buffer pool": lambda: sum(pool.held_bytes for pool in self._pools)}

    def moved(self) -> Mapping[str, int]:
        """Return the bytes of weights and gradients moved so far."""
        return {
            "weights read": sum(pool.bytes_read for pool in self._pools),
            "weights written": sum(pool.bytes_written for pool in self._pools),
            "from the accelerator": sum(link.bytes_down for link in self._links),
            "to the accelerator": sum(link.bytes_up for link in self._links),
        }

    def disk_bytes(self) -> int:
        """Return the bytes of weights on disk."""
        model = self._model()
        return 0 if model is None else parameter_bytes(model).disk_bytes

    def compared(self, memory: StateMemory) -> list[Compared]:
        """Return what the plan predicts, beside what is there.

        Args:
            memory: What the optimizer's states hold.
        """
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
        }
        stored = [p for p in model.parameters() if storage_of(p) is not None]
        if not stored:
            whole = sum(p.nbytes for p in model.parameters() if p.is_cpu)
            measured["host", "parameters"] = whole
        elif any(p.is_cpu for p in stored):
            measured["host", "parameters"] = held.host_bytes
        found = []
        for item in self._predict():
            tier = str(item.tier)
            found.append(
                Compared(tier.upper(), item.what, item.nbytes, measured.get((tier, item.what)))
            )
        return found
