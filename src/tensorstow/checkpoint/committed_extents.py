"""Which extents of the store commits hold, and the tensors that are written for one."""

import logging
from collections.abc import Sequence

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import tensorstow._native as _native
from tensorstow.checkpoint.content import module_tensors
from tensorstow.states.chunks import Chunk
from tensorstow.states.state_store import StateStore
from tensorstow.states.stored import StoreStorage
from tensorstow.states.stored_chunks import NOWHERE, FilePosition
from tensorstow.step.param_table import ParamTable
from tensorstow.store.records import TensorRecord
from tensorstow.tensors.dtensor import in_memory, shard_of

logger = logging.getLogger("tensorstow")
_FEW = 5


class CommittedExtents:
    """The extents that the newest commit of one optimizer holds in its store."""

    def __init__(self) -> None:
        """Begin with none."""
        self._places: dict[Chunk, FilePosition] = {}
        self._tensors: dict[str, tuple[tuple[int, int], TensorRecord]] = {}
        """Of the module, by name, with the tensor's version and address when it was written."""
        self._temporary: list[TensorRecord] = []
        """Of that commit alone: the next one has others."""
        self._warned_left_out = False

    def write(
        self, kind: str, tensors: Sequence[torch.Tensor], storage: StoreStorage
    ) -> list[TensorRecord]:
        """Write tensors that belong to this commit alone."""
        records = []
        for i, tensor in enumerate(tensors):
            written = storage.store.write_tensor(kind, str(i), tensor.detach().cpu().contiguous())
            self._temporary.append(written)  # at once: the next one may fail
            records.append(written)
        return records

    def write_module(
        self, module: torch.nn.Module | None, params: ParamTable, storage: StoreStorage
    ) -> list[TensorRecord]:
        """Write buffers and parameters that no optimizer updates, where they changed."""
        if module is None:
            return []
        managed = {id(m.owner) for m in params.all()}
        records = []
        left_out = []
        for name, tensor in module_tensors(module):
            if id(tensor) in managed or is_lazy(tensor):  # which has no values yet
                continue
            if not _has_bytes(tensor):
                left_out.append(name)
                continue
            with in_memory(tensor):
                records.append(self._write_changed(name, tensor, storage))
        if left_out and not self._warned_left_out:
            self._warned_left_out = True
            logger.warning(
                "Commits do not keep %s: no bytes of their own (meta, sparse, expanded or"
                " quantised tensors that no optimizer updates). Load them before resume()",
                ", ".join(left_out[:_FEW]) + (" ..." if len(left_out) > _FEW else ""),
            )
        return records

    def _write_changed(
        self, name: str, tensor: torch.Tensor, storage: StoreStorage
    ) -> TensorRecord:
        """Write a tensor, unless the last commit has the same bytes."""
        held = shard_of(tensor).detach().cpu().contiguous()
        nbytes = held.numel() * held.element_size()
        # Both: batch_norm writes its statistics without incrementing the version counter.
        mark = (tensor._version, _native.checksum(held.data_ptr(), nbytes))  # noqa: SLF001
        before = self._tensors.get(name)
        if before is None or before[0] != mark:
            self._tensors[name] = (mark, storage.store.write_tensor("module", name, held))
            if before is not None:
                self._temporary.append(before[1])
        return self._tensors[name][1]

    def retarget(self, store: StateStore, storage: StoreStorage) -> None:
        """Assign another extent for the next write to every chunk whose extent is now committed."""
        for record in self._temporary:
            storage.store.release(record.extent)
        self._temporary.clear()
        stored = store.pipeline.stored
        for chunk in store.chunks:
            place = stored.place(chunk)
            if place != stored.target_of(chunk):
                continue  # not written since the commit before: its other extent is still free
            before = self._places.get(chunk, NOWHERE)
            if before not in {NOWHERE, place}:
                storage.release(before)
            self._places[chunk] = place
            (free,) = storage.reserve([chunk.file_bytes])
            stored.target(chunk, free)

    def resumed(self, store: StateStore, storage: StoreStorage) -> None:
        """Hold the extents of the chunks of a generation that was just loaded."""
        for record in (*self._temporary, *(record for _, record in self._tensors.values())):
            storage.store.release(record.extent)
        self.forget()
        self._places = {chunk: store.pipeline.stored.place(chunk) for chunk in store.chunks}

    def forget(self) -> None:
        """Drop all extents: the run moves to another store."""
        self._tensors.clear()
        self._temporary.clear()
        self._places.clear()


def _has_bytes(tensor: torch.Tensor) -> bool:
    """Return whether a frozen parameter or buffer is a plain tensor whose bytes can be stored.

    A tensor made of others (quantised weights are) is put together by code that no commit keeps.
    """
    shard = shard_of(tensor)
    if shard.layout != torch.strided or shard.is_meta or shard.is_quantized:
        return False
    expanded = 0 in shard.stride() and shard.numel() > 1
    return not expanded and not is_traceable_wrapper_subclass(shard)
