"""Which extents of the store commits hold, and the tensors that are written for one."""

import logging
from collections.abc import Mapping, Sequence

import torch

import tensorstow._native as _native
from tensorstow.checkpoint.content import has_bytes, unmanaged_tensors
from tensorstow.checkpoint.frozen_weights import checksum_of, is_in_files
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
        """Records of the module's tensors, by name, with the version and checksum when written."""
        self._temporary: list[TensorRecord] = []
        """Tensors of the newest commit alone; the next commit releases them."""
        self._checksums: dict[str, int] = {}
        """Checksums of frozen weights in the user's files, which do not change, by name."""
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
        self,
        module: torch.nn.Module | None,
        params: ParamTable,
        storage: StoreStorage,
        copies: Mapping[str, torch.Tensor],
    ) -> list[TensorRecord]:
        """Write buffers and parameters that no optimizer updates, if they changed.

        Tensors in the user's files are not written: see ``checksums_in_files``.
        ``copies``: tensors to write in place of the module's, by name.
        """
        records = []
        left_out = []
        for name, tensor in unmanaged_tensors(module, (m.owner for m in params.all())):
            if not has_bytes(tensor):
                left_out.append(name)
                continue
            if is_in_files(tensor):
                continue
            with in_memory(tensor):
                written = self._write_changed(name, copies.get(name, tensor), storage)
                records.append(written)
        if left_out and not self._warned_left_out:
            self._warned_left_out = True
            logger.warning(
                "Commits do not keep %s: no bytes of their own (meta, sparse, expanded or"
                " quantised tensors that no optimizer updates). Load them before resume()",
                ", ".join(left_out[:_FEW]) + (" ..." if len(left_out) > _FEW else ""),
            )
        return records

    def checksums_in_files(
        self, module: torch.nn.Module | None, params: ParamTable
    ) -> dict[str, int]:
        """Return the checksums of frozen weights that are in the user's files, by name."""
        checksums: dict[str, int] = {}
        for name, tensor in unmanaged_tensors(module, (m.owner for m in params.all())):
            if is_in_files(tensor):
                checksums[name] = self._checksums.get(name) or checksum_of(tensor)
        self._checksums = checksums
        return checksums

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
                # The last generation refers to it: it is released when the next one is durable.
                self._temporary.append(before[1])
        return self._tensors[name][1]

    def retarget(self, store: StateStore, storage: StoreStorage) -> None:
        """Assign another extent for the next write to every chunk whose extent is now committed."""
        # The new generation refers to those that it needs.
        for record in self._temporary:
            storage.store.release(record.extent)
        self._temporary.clear()
        stored = store.pipeline.stored
        for chunk in store.chunks:
            place = stored.place(chunk)
            if place != stored.target_of(chunk):
                continue  # not written since the commit before: its other extent is still free
            before = self._places.get(chunk, NOWHERE)
            # It stays in use if a snapshot refers to it.
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
