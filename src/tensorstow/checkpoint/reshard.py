"""Moves a run to another number of ranks: each rank takes its rows from all stores.

The stores to move from are chosen by [Note: Worlds] in `checkpoint.worlds`. Bytes of states and
weights are copied block by block, with their checksums compared, into chunks of the new ranks.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from tensorstow.base.errors import RankError
from tensorstow.base.sizes import format_count
from tensorstow.checkpoint.agreement import (
    COMMIT,
    ERA,
    FIRST,
    exchanged,
)
from tensorstow.checkpoint.content import (
    ROWS,
    chunk_entry,
    module_tensors,
    rows_entry,
    shape_of,
)
from tensorstow.checkpoint.frozen_weights import CHECKSUMS, checksum_of, read_checksums
from tensorstow.checkpoint.ranks import Ranks
from tensorstow.checkpoint.resume import check, family_of, match, whole_facts
from tensorstow.checkpoint.stored_rows import PieceRead, RankReader, StoredPiece, refuse_cut
from tensorstow.checkpoint.worlds import Worlds
from tensorstow.io.arena import Arena, read_ahead
from tensorstow.io.files import IoFuture, wait_for_all
from tensorstow.states.chunks import Chunk
from tensorstow.step.param_table import ParamTable
from tensorstow.step.step_plan import Groups
from tensorstow.store.checksums import block_checksums, weight_checksums
from tensorstow.store.inspect import open_contents
from tensorstow.store.records import ChunkRecord, Content, Extent, Generation, TensorRecord
from tensorstow.store.store import Store
from tensorstow.tensors.dtensor import pager_of, rows_of, shard_of

logger = logging.getLogger("tensorstow")

_ASKED = "resume()"
_AHEAD = 4
"""Pieces that are read while one is copied."""


def move_rows(
    worlds: Worlds,
    params: ParamTable,
    groups: Groups,
    module: torch.nn.Module | None,
    store: Store,
    ranks: Ranks,
) -> None:
    """Commit the chosen commit of another number of ranks in these ranks' stores.

    Each rank takes its rows. Raises OptionError if the run has other parameters, or is cut in a way
    that cannot be changed. Nothing is changed before all ranks have written their rows.
    """
    source = worlds.source
    with ExitStack() as opened, ranks.reporting_errors(_ASKED):
        readers = []
        for _, path in sorted(source.paths.items()):
            contents = opened.enter_context(open_contents(path, "A resume"))
            generation = next(
                g for g in contents.generations if _id_of(g, source.size) == worlds.commit
            )
            readers.append(RankReader(contents.files, generation))
        move = _Move(readers, params, groups, module, store, ranks)
        content = move.content(worlds.next_era)
    try:
        with ranks.reporting_errors(_ASKED):
            # What could refuse the resume is found before the commit (ADR 0060).
            check(content.as_generation(), params, groups, module)
        if ranks.rank == 0:
            logger.warning(
                "going on with %s from step %d of a run of %s in %s",
                format_count(ranks.world, "rank"),
                content.step,
                format_count(source.size, "rank"),
                worlds.base,
            )
        # Now, because the id is that of the next gather, which ends the commit.
        content.hyper[COMMIT] = ranks.next_id()
        newest = max((summary.number for summary in store.generations()), default=None)
        ranks.run_on_all(_ASKED, lambda: store.commit(content, keep=newest))
    finally:
        # A generation refers to them if the commit was made; else they become free.
        for extent in content.extents():
            store.release(extent)


def _id_of(generation: Generation, ranks: int) -> str | None:
    return str(generation.number) if ranks == 1 else exchanged(generation).id


class _Move:
    """One rank's rows on their way from the stores of another number of ranks to its own."""

    def __init__(
        self,
        readers: Sequence[RankReader],
        params: ParamTable,
        groups: Groups,
        module: torch.nn.Module | None,
        store: Store,
        ranks: Ranks,
    ) -> None:
        """Match the parameters; raise OptionError if they are others."""
        self._readers = readers
        # What every old store has is read by the new ranks from different stores.
        self._nearest = readers[ranks.rank % len(readers)]
        self._store = store
        wholes = [reader.wholes() for reader in readers]
        if any(whole != wholes[0] for whole in wholes):
            message = (
                "The stores of the run that is stored here have different parameters: they are of"
                " different runs. Bring back what was there."
            )
            raise RankError(message)
        self._wholes = wholes[0]
        self._parameters = match(self._wholes, self._nearest.hyper, groups, module, whole_facts)
        self._families = [family_of(stored, params) for stored in self._wholes]
        self._starts = []
        for whole, parameter in zip(self._wholes, self._parameters, strict=True):
            rows = rows_of(parameter)
            is_whole = not parameter.ndim or (rows is not None and rows.count == rows.whole)
            if (rows is None and parameter.ndim) or (whole.order is not None and not is_whole):
                refuse_cut(whole.name)
            row = whole.elements // rows.whole if rows is not None and rows.whole else 0
            self._starts.append(0 if rows is None else rows.start * row)
        self._chunks = params.store.cut_chunks(
            [shard_of(parameter).numel() for parameter in self._parameters],
            self._families,
            [id(pager_of(parameter)) for parameter in self._parameters],
        )
        self._others = {} if module is None else dict(module_tensors(module))

    def content(self, era: int) -> Content:
        """Write this rank's rows to its store; return what is to be committed as of ``era``.

        The caller holds the extents.
        """
        generation = self._nearest.generation
        held: list[Extent] = []
        try:
            chunks = list(self._write_chunks(held))
            tensors = [self._write_tensor(record, held) for record in generation.tensors]
        except BaseException:
            for extent in held:
                self._store.release(extent)
            raise
        layout = {
            **generation.layout,
            "parameters": [
                {**entry, "shape": list(shard_of(parameter).shape), **rows_entry(parameter)}
                for entry, parameter in zip(self._entries(), self._parameters, strict=True)
            ],
            "chunks": [chunk_entry(chunk) for chunk in self._chunks],
        }
        hyper = {
            **generation.hyper,
            FIRST: True,  # of no use until all ranks have it
            ERA: era,
            CHECKSUMS: self._checksums(),
            "steps": {k: v for r in self._readers for k, v in r.generation.hyper["steps"].items()},
            "reseed": sorted({n for reader in self._readers for n in reader.hyper.reseed}),
            ROWS: {
                name: entry["rows"]
                for name, tensor in self._others.items()
                if (entry := rows_entry(tensor))
            },
        }
        return Content(generation.step, layout, hyper, generation.extra, chunks, tensors)

    def _checksums(self) -> dict[str, int]:
        """Return the checksums of frozen weights in the user's files, of this rank's rows."""
        return {
            # Checksums of an old rank's rows cannot be compared with these rows (ADR 0060).
            name: checksum_of(self._others[name]) if self._is_cut(name) else checksum
            for name, checksum in read_checksums(self._nearest.generation.hyper).items()
            if name in self._others
        }

    def _is_cut(self, name: str) -> bool:
        """Return whether a tensor of the module is sharded over these ranks or the stored ones."""
        stored = self._nearest.generation.hyper.get(ROWS) or {}
        return name in stored or bool(rows_entry(self._others[name]))

    def _entries(self) -> Iterator[dict[str, Any]]:
        """Yield the entries of the parameters without their rows."""
        for entry in self._nearest.generation.layout["parameters"]:
            yield {key: value for key, value in entry.items() if key != "rows"}

    def _write_chunks(self, held: list[Extent]) -> Iterator[ChunkRecord]:
        """Write each chunk while the next one is put together; add its extent to ``held``."""
        shapes = [shape_of(chunk) for chunk in self._chunks]
        largest = max((shape.nbytes for shape in shapes), default=0)
        arena = Arena(2 * largest, in_children=False)
        writes: deque[IoFuture] = deque()
        reads = self._read_ahead()
        try:
            for number, (chunk, shape) in enumerate(zip(self._chunks, shapes, strict=True)):
                # The oldest write has the memory that comes next.
                if len(writes) == 2:
                    writes.popleft().wait()
                memory = arena.tensor(number % 2 * largest, shape.nbytes, torch.uint8)
                is_blank = _fill(chunk, memory, reads)
                extent = self._store.allocate(shape.nbytes)
                held.append(extent)
                writes.append(self._store.files[extent.file].write(memory, extent.offset))
                at = memory.data_ptr()
                yield ChunkRecord(
                    number,
                    extent,
                    is_blank,
                    b"" if is_blank else block_checksums(shape, at),
                    weight_checksums(shape, at + shape.weight_offset),
                )
        finally:
            wait_for_all(writes)  # nothing may be written to an extent that the caller releases

    def _read_ahead(self) -> Iterator[tuple[int, PieceRead]]:
        """Yield the pieces of all chunks in turn, read, with their positions.

        Each is valid until the next one is asked for; the next ones are being read.
        """
        pieces = [piece for chunk in self._chunks for piece in self._pieces_of(chunk)]
        sizes = [piece.blocks.nbytes for _, piece in pieces]
        reads = read_ahead(sizes, lambda n, memory: pieces[n][1].read(memory), _AHEAD)
        for (position, _), (read, _) in zip(pieces, reads, strict=True):
            read.wait()
            yield position, read

    def _pieces_of(self, chunk: Chunk) -> Iterator[tuple[int, StoredPiece]]:
        """Yield the pieces of a chunk, each with its position; raise OptionError if one is cut."""
        for run in chunk.plan.runs:
            begin = self._starts[run.parameter] + run.start
            for first, piece in self._find(run.parameter, begin, run.count):
                position = run.position + first - begin
                if not piece.fits(position):
                    refuse_cut(self._wholes[run.parameter].name)
                yield position, piece

    def _find(self, number: int, start: int, count: int) -> Iterator[tuple[int, StoredPiece]]:
        """Yield elements of a whole parameter in the stores that have them, with their places."""
        stop = start + count
        while start < stop:
            reader, first, end = self._reader_of(number, start)
            end = min(end, stop)
            for place, piece in reader.find(number, start - first, end - first):
                yield place + first, piece
            start = end

    def _reader_of(self, number: int, element: int) -> tuple[RankReader, int, int]:
        """Return a store that has an element of a whole parameter, and all that it has of that."""
        for reader in self._readers:
            first, end = reader.span(number)
            if first <= element < end:
                return reader, first, end
        message = (
            f"Element {element} of {self._wholes[number].name or f'parameter {number}'} is in none"
            " of the stores of the run that is stored here: they are of different runs. Bring back"
            " what was there."
        )
        raise RankError(message)

    def _write_tensor(self, record: TensorRecord, held: list[Extent]) -> TensorRecord:
        """Write a tensor that is not in chunks; add its extent to ``held``."""
        tensor = self._nearest.read_tensor(record.kind, record.name)
        if record.kind == "module":
            tensor = self._own_rows(record.name, tensor)
        written = self._store.write_tensor(record.kind, record.name, tensor)
        held.append(written.extent)
        return written

    def _own_rows(self, name: str, nearest: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a tensor of the module, which a store has as ``nearest``."""
        rows = [(reader.generation.hyper.get(ROWS) or {}).get(name, ()) for reader in self._readers]
        wanted = None if name not in self._others else rows_of(self._others[name])
        # Without rows it is whole on each rank.
        whole = nearest if () in rows else self._put_together(name, rows, nearest)
        return whole if wanted is None else whole[wanted.start : wanted.start + wanted.count]

    def _put_together(
        self, name: str, rows: Sequence[Sequence[int] | None], like: torch.Tensor
    ) -> torch.Tensor:
        """Return a whole tensor, of which each store has ``rows``: the first, and their number."""
        whole: torch.Tensor | None = None
        for reader, reader_rows in zip(self._readers, rows, strict=True):
            if reader_rows is None:
                refuse_cut(name)
            if whole is None:
                whole = torch.zeros(
                    (reader_rows[1], *like.shape[1:]), dtype=like.dtype, device="cpu"
                )
            part = reader.read_tensor("module", name)
            whole[reader_rows[0] : reader_rows[0] + len(part)] = part
        return like if whole is None else whole


def _fill(chunk: Chunk, memory: torch.Tensor, reads: Iterator[tuple[int, PieceRead]]) -> bool:
    """Put a chunk together in ``memory`` of its pieces; return whether its states are blank."""
    shape, is_blank = shape_of(chunk), True
    left = sum(run.count for run in chunk.plan.runs)
    if left < shape.elements:
        memory.zero_()  # what is between parameters
    while left:
        position, read = next(reads)
        read.copy_to(shape, memory, position)
        left -= read.piece.count
        is_blank &= read.piece.record.blank
    return is_blank
