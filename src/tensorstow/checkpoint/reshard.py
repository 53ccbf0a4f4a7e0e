"""Goes on with a run of another number of ranks: each rank takes its rows from all stores.

[Note: Worlds] A number of ranks is a world, which has stores of its own in the run's directory. A
commit says how often its run has changed worlds: its era. The world whose newest common commit has
the highest era is the one to go on from. If that is another world, each rank writes the states and
weights of its rows to its own store, in chunks of its own, and all ranks commit them with the next
era. The old stores are removed when all ranks have resumed, unless they have snapshots. A crash
before the new commit is complete leaves the old world the newest; after it, both are equal.
"""

import logging
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tensorstow.base.errors import OptionError, RankError, StowError
from tensorstow.base.sizes import format_count
from tensorstow.checkpoint.agreement import (
    COMMIT,
    ERA,
    FIRST,
    RankGeneration,
    common_ids,
    era_of,
    exchanged,
    newest_era,
)
from tensorstow.checkpoint.content import (
    ROWS,
    chunk_entry,
    module_tensors,
    rows_entry,
    shape_of,
)
from tensorstow.checkpoint.ranks import Ranks
from tensorstow.checkpoint.resume import family_of, match, whole_facts
from tensorstow.checkpoint.stored_rows import PieceRead, RankReader, StoredPiece, refuse_cut
from tensorstow.io.arena import Arena
from tensorstow.io.files import IoFuture
from tensorstow.states.chunks import Chunk
from tensorstow.step.param_table import ParamTable
from tensorstow.step.step_plan import Groups
from tensorstow.store.checksums import block_checksums, weight_checksums
from tensorstow.store.contents import StoreContents, open_contents
from tensorstow.store.rank_dirs import RANK_NAME, run_directory, worlds_in
from tensorstow.store.records import ChunkRecord, Content, Extent, Generation, TensorRecord
from tensorstow.store.remove import hold_dead_run, remove
from tensorstow.store.store import Store
from tensorstow.tensors.dtensor import pager_of, rows_of, shard_of

logger = logging.getLogger("tensorstow")

_ASKED = "resume()"
_AHEAD = 4
"""Pieces that are read while one is copied."""


@dataclass(frozen=True, slots=True)
class World:
    """The stores of a run of another number of ranks, open for reading."""

    size: int
    """The number of ranks."""
    base: Path
    """The run's directory."""
    stores: Mapping[int, StoreContents]
    """By rank; some may be missing."""

    def _listed(self) -> list[list[RankGeneration]]:
        """Return the generations of each rank; those of a single process have numbers for ids."""
        return [
            [
                replace(listed, id=listed.id or str(listed.number))
                for listed in map(exchanged, self.stores[rank].generations)
            ]
            for rank in sorted(self.stores)
        ]

    @property
    def era(self) -> int | None:
        """Return the era of the newest commit of all ranks that are there; None: there is none."""
        listed = self._listed()
        common = common_ids(listed)
        return max((g.era for g in listed[0] if g.id in common), default=None)

    def generations(self, which: str | int | None) -> list[Generation]:
        """Return a commit, by rank: the newest, or the one that ``which`` names.

        Raises OptionError if a store is missing, or if there is no such commit.
        """
        missing = sorted(set(range(self.size)) - self.stores.keys())
        if missing:
            message = (
                f"The newest commit in {self.base} is of {format_count(self.size, 'rank')}, and"
                f" the stores of {', '.join(map(str, missing))} are not there. Copy or mount the"
                " directories of all ranks there, on every machine."
            )
            raise OptionError(message)
        listed = self._listed()
        common = common_ids(listed)
        fitting = [g.id for g in listed[0] if g.id in common and (which is None or g.called(which))]
        if not fitting:
            names = sorted({name for g in listed[0] if g.id in common for name in g.names})
            message = (
                f"{which!r} was requested of the run of {format_count(self.size, 'rank')} in"
                f" {self.base}, which does not have it. Its snapshots:"
                f" {', '.join(names) or 'none'}."
            )
            raise OptionError(message)
        return [
            next(
                generation
                for generation, g in zip(self.stores[rank].generations, of_rank, strict=True)
                if g.id == fitting[-1]
            )
            for rank, of_rank in enumerate(listed)
        ]


@contextmanager
def newer_world(store: Store, ranks: Ranks) -> Iterator[World | None]:
    """Open the stores of another number of ranks if those have the newest commit; else None.

    Raises LockedError if one is in use, RankError if the ranks see different stores.
    """
    base = run_directory(store.directories[0], ranks.world)
    with ranks.reporting_errors(_ASKED):
        others = {size: paths for size, paths in worlds_in(base).items() if size != ranks.world}
    seen = ranks.all_gather(_ASKED, [[size, sorted(others[size])] for size in sorted(others)])
    if not any(seen):
        yield None
        return
    own = newest_era(store, ranks)
    with ExitStack() as opened:
        with ranks.reporting_errors(_ASKED):
            _refuse_other_sights(base, seen)
            newest = _newest(
                [
                    World(size, base, {r: opened.enter_context(_opened(p)) for r, p in at.items()})
                    for size, at in others.items()
                ],
                own,
            )
        yield newest


def _opened(path: Path) -> AbstractContextManager[StoreContents]:
    return open_contents(path, "A resume")


def _newest(worlds: Sequence[World], own: int | None) -> World | None:
    """Return the world with the highest era, if that is above ``own``."""
    eras = [(era, world) for world in worlds if (era := world.era) is not None]
    if eras:
        era, newest = max(eras, key=lambda pair: pair[0])
        return newest if own is None or era > own else None
    if own is None and any(store.generations for w in worlds for store in w.stores.values()):
        message = (
            f"{worlds[0].base} holds commits of runs of other numbers of ranks"
            f" ({', '.join(str(world.size) for world in worlds)}), and none that all ranks of one"
            " have. Bring back what is missing, or name another directory for a new run."
        )
        raise RankError(message)
    return None


def _refuse_other_sights(base: Path, seen: Sequence[object]) -> None:
    """Raise RankError if a rank sees other stores than rank 0."""
    differing = [rank for rank, stores in enumerate(seen) if stores != seen[0]]
    if differing:
        message = (
            f"{base} holds a run of another number of ranks, and not all of its stores are there"
            f" on every machine: rank 0 finds [ranks, [rank, ...]] = {seen[0]}, rank"
            f" {differing[0]} finds {seen[differing[0]]}. Copy or mount the directories of all"
            " ranks there, on every machine."
        )
        raise RankError(message)


def move_rows(
    world: World,
    which: str | int | None,
    params: ParamTable,
    groups: Groups,
    module: torch.nn.Module | None,
    store: Store,
    ranks: Ranks,
) -> None:
    """Commit a commit of ``world`` in the stores of these ranks; each takes its rows.

    ``which``: the name or number of the commit; None: the newest. Raises OptionError if the run has
    other parameters, or is cut in a way that cannot be changed. Nothing else is changed.
    """
    with ranks.reporting_errors(_ASKED):
        readers = [
            RankReader(world.stores[rank].files, generation)
            for rank, generation in enumerate(world.generations(which))
        ]
        move = _Move(readers, params, groups, module, store, ranks)
        content = move.content()
    if ranks.rank == 0:
        logger.warning(
            "going on with %s from step %d of a run of %s in %s",
            format_count(ranks.world, "rank"),
            content.step,
            format_count(world.size, "rank"),
            world.base,
        )
    try:
        if isinstance(content.hyper, dict):
            content.hyper[COMMIT] = ranks.next_id()
        ranks.run_on_all(_ASKED, lambda: store.commit(content))
    finally:
        for extent in content.extents():
            store.release(extent)


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
        self._nearest = readers[ranks.rank % len(readers)]
        self._store = store
        wholes = [reader.wholes() for reader in readers]
        if any(others != wholes[0] for others in wholes):
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

    def content(self) -> Content:
        """Write this rank's rows to its store; return what is to be committed.

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
            FIRST: False,
            ERA: era_of(generation) + 1,
            "steps": {k: v for r in self._readers for k, v in r.generation.hyper["steps"].items()},
            "reseed": sorted({n for reader in self._readers for n in reader.hyper.reseed}),
            ROWS: {
                name: entry["rows"]
                for name, tensor in self._others.items()
                if (entry := rows_entry(tensor))
            },
        }
        return Content(generation.step, layout, hyper, generation.extra, chunks, tensors)

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
        with closing(self._read_ahead()) as reads:
            try:
                for number, (chunk, shape) in enumerate(zip(self._chunks, shapes, strict=True)):
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
                        block_checksums(shape, at),
                        weight_checksums(shape, at + shape.weight_offset),
                    )
            finally:
                while writes:  # nothing may be written to an extent that the caller releases
                    writes.popleft().wait()

    def _read_ahead(self) -> Generator[tuple[int, PieceRead]]:
        """Yield the pieces of all chunks in turn, read, with their positions.

        Each is valid until the next one is asked for; the next ones are being read.
        """
        pieces = [
            (run.position + first - begin, piece)
            for chunk in self._chunks
            for run in chunk.plan.runs
            for begin in [self._starts[run.parameter] + run.start]
            for first, piece in self._find(run.parameter, begin, run.count)
        ]
        largest = max((piece.blocks.nbytes for _, piece in pieces), default=0)
        arena = Arena((_AHEAD + 1) * largest, in_children=False)
        reads: deque[tuple[int, PieceRead]] = deque()
        try:
            for number in range(len(pieces) + _AHEAD):
                if number < len(pieces):
                    position, piece = pieces[number]
                    slot = number % (_AHEAD + 1) * largest
                    memory = arena.tensor(slot, piece.blocks.nbytes, torch.uint8)
                    reads.append((position, piece.read(memory)))
                if number >= _AHEAD:
                    position, read = reads[0]
                    read.wait()
                    yield position, read
                    reads.popleft()
        finally:
            for _, read in reads:
                for future in read.reads:
                    with suppress(StowError):
                        future.wait()

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
        for reader, own in zip(self._readers, rows, strict=True):
            if own is None:
                refuse_cut(name)
            if whole is None:
                whole = torch.zeros((own[1], *like.shape[1:]), dtype=like.dtype, device="cpu")
            part = reader.read_tensor("module", name)
            whole[own[0] : own[0] + len(part)] = part
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


def remove_world(world: World, ranks: Ranks) -> None:
    """Remove the stores of ``world``, which these ranks have gone on from, unless it has snapshots.

    Each rank removes some. What cannot be removed stays, with a warning.
    """
    if any(g.names for store in world.stores.values() for g in store.generations):
        if ranks.rank == 0:
            logger.warning(
                "the stores of the run of %s in %s stay, because they have snapshots: `tensorstow"
                " run clean` removes them",
                format_count(world.size, "rank"),
                world.base,
            )
        return
    for rank, store in world.stores.items():
        if rank % ranks.world == ranks.rank:
            _remove(store)


def _remove(store: StoreContents) -> None:
    others = {file.path.parent for file in store.files} - {store.directory}
    try:
        with hold_dead_run(store.directory, sorted(others)) as removal:
            remove(removal)
        for directory in (store.directory, *others):
            if RANK_NAME.fullmatch(directory.name):
                with suppress(OSError):  # something of the user's is in it
                    directory.rmdir()
    except (StowError, OSError) as error:
        logger.warning("an old store could not be removed from %s: %s", store.directory, error)
