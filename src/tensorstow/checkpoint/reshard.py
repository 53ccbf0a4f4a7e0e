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
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any, NoReturn

import torch

from tensorstow.base.errors import OptionError, RankError, StowError
from tensorstow.base.sizes import format_count
from tensorstow.checkpoint import agreement
from tensorstow.checkpoint.agreement import (
    COMMIT,
    ERA,
    FIRST,
    RankGeneration,
    common_ids,
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
from tensorstow.io.arena import Arena
from tensorstow.io.files import IoFuture
from tensorstow.states.chunks import Chunk
from tensorstow.step.param_table import ParamTable
from tensorstow.step.step_plan import Groups
from tensorstow.store.checksums import block_checksums, weight_checksums
from tensorstow.store.contents import open_contents, read_generations
from tensorstow.store.rank_dirs import RANK_NAME, rank_directory, run_directory, worlds_in
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
    """The commits of a number of ranks."""

    size: int
    """The number of ranks."""
    listed: Sequence[Sequence[RankGeneration]]
    """The generations of each rank that has a store, oldest first."""
    paths: Mapping[int, Path] = field(default_factory=dict)
    """The directories of the stores, by rank; empty for these ranks' own."""

    @property
    def common(self) -> list[RankGeneration]:
        """Return the commits that all ranks have, oldest first, as the first rank has them."""
        if len(self.listed) < self.size:
            return []
        common = common_ids(self.listed)
        return [g for g in self.listed[0] if g.id in common]

    @property
    def is_lost(self) -> bool:
        """Return whether some ranks have commits that all ranks had, and not all have them.

        The first commit of a run, and the one that moved rows, may lack others by a crash; but all
        stores of a run are there before its first one.
        """
        is_missing = len(self.listed) < self.size
        return not self.common and any(
            not g.first or g.names or (is_missing and g.era == 0) for g in self.all
        )

    @property
    def all(self) -> list[RankGeneration]:
        """Return the generations of all ranks."""
        return [generation for of_rank in self.listed for generation in of_rank]

    @property
    def era(self) -> int:
        """Return the era of its newest commit; -1 if it has nothing to go on from."""
        generations = self.all if self.is_lost else self.common
        return max((generation.era for generation in generations), default=-1)

    def find(self, which: str | int | None) -> str | None:
        """Return the id of the commit that ``which`` names, the newest for None; or None."""
        ids = [g.id for g in self.common if which is None or g.called(which)]
        return ids[-1] if ids else None

    def __str__(self) -> str:
        """Return it in words, with its snapshots."""
        names = sorted({name for generation in self.common for name in generation.names})
        return f"{format_count(self.size, 'rank')}: {', '.join(names) or 'none'}"


@dataclass(frozen=True, slots=True)
class Worlds:
    """What a run's directory holds, and where to go on."""

    base: Path
    drives: Sequence[Path]
    """The run's other directories."""
    own: World
    others: Sequence[World]
    source: World
    """Has the commit to go on from."""
    commit: str | None
    """The id of that commit; None: there is none."""

    @property
    def next_era(self) -> int:
        """Return the era of what is committed from now on: above that of what others have."""
        if not self.moves and all(world.era < self.own.era for world in self.others):
            return max(self.own.era, 0)
        worlds = (self.own, *self.others)
        return max((g.era for world in worlds for g in world.all), default=0) + 1

    @property
    def moves(self) -> bool:
        """Return whether rows are to move from another number of ranks."""
        return self.commit is not None and self.source is not self.own


def survey(store: Store, ranks: Ranks, which: str | int | None) -> Worlds | None:
    """Find the commit to resume among those of all numbers of ranks; None if there are no others.

    ``which``: its snapshot's name or its number; None: the newest. Raises OptionError if there is
    none of that name, LockedError if a store of others is in use, RankError if stores are missing
    or the ranks see different ones.
    """
    base, *drives = (run_directory(path, ranks.world) for path in store.directories)
    with ranks.reporting_errors(_ASKED):
        paths = {size: found for size, found in worlds_in(base).items() if size != ranks.world}
    seen = ranks.all_gather(_ASKED, [[size, sorted(paths[size])] for size in sorted(paths)])
    if not any(seen):
        return None
    own = World(ranks.world, agreement.list_generations(store, ranks, _ASKED))
    with ranks.reporting_errors(_ASKED):
        _refuse_other_sights(base, seen)
        others = [World(size, _listed(found), found) for size, found in sorted(paths.items())]
        worlds = sorted((*others, own), key=lambda world: world.era)  # own last of equal ones
        newest = worlds[-1]
        if newest.era == worlds[-2].era >= 0 and newest is not own:
            message = (
                f"{base} holds runs of {worlds[-2].size} and of {newest.size} ranks, of which none"
                " came after the other. Start as many ranks as the run has that is to go on."
            )
            raise RankError(message)
        if newest.era < 0:
            _refuse_lost_source(base, worlds)
            return Worlds(base, drives, own, others, own, None)
        if isinstance(which, str):
            fitting = [world for world in worlds if world.find(which) is not None]
            if not fitting:
                message = (
                    f"The snapshot {which!r} was requested, and no commit in {base} has that name."
                    f" Snapshots of {'; of '.join(map(str, worlds))}."
                )
                raise OptionError(message)
            return Worlds(base, drives, own, others, fitting[-1], fitting[-1].find(which))
        if newest.is_lost and newest is not own:
            _refuse_lost(base, newest)
        commit = newest.find(which)
        if commit is None and newest is not own:
            message = (
                f"Generation {which} was requested, and the newest commit in {base} is of"
                f" {format_count(newest.size, 'rank')}, which do not have it. Name a snapshot, or"
                " leave it out for the newest commit."
            )
            raise OptionError(message)
        return Worlds(base, drives, own, others, newest, commit)


def read_worlds(base: Path, asked: str) -> list[World]:
    """Return the commits in ``base`` by numbers of ranks; ``asked``: the request, for errors."""
    found = sorted(worlds_in(base).items())
    return [World(size, _listed(paths, asked), paths) for size, paths in found]


def _listed(paths: Mapping[int, Path], asked: str = "A resume") -> list[list[RankGeneration]]:
    listed = []
    for _, path in sorted(paths.items()):
        generations = map(exchanged, read_generations(path, asked))
        listed.append([replace(g, id=g.id or str(g.number)) for g in generations])
    return listed


def _refuse_lost(base: Path, world: World) -> NoReturn:
    missing = sorted(set(range(world.size)) - world.paths.keys())
    what = f"the stores of ranks {', '.join(map(str, missing))} are not there"
    message = (
        f"The newest commit in {base} is of {format_count(world.size, 'rank')}, and"
        f" {what if missing else 'not all of them have it'}. Copy or mount the directories of all"
        " ranks there, on every machine."
    )
    raise RankError(message)


def _refuse_lost_source(base: Path, worlds: Sequence[World]) -> None:
    """Raise RankError if rows were moved, and neither all of them nor their source is there."""
    moved = [world for world in worlds if any(g.era > 0 for g in world.all)]
    if moved:
        _refuse_lost(base, moved[-1])


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
            fields = {each.name: getattr(content, each.name) for each in dataclass_fields(content)}
            check(Generation(**fields), params, groups, module)
        if ranks.rank == 0:
            logger.warning(
                "going on with %s from step %d of a run of %s in %s",
                format_count(ranks.world, "rank"),
                content.step,
                format_count(source.size, "rank"),
                worlds.base,
            )
        content.hyper[COMMIT] = ranks.next_id()
        newest = max((summary.number for summary in store.generations()), default=None)
        ranks.run_on_all(_ASKED, lambda: store.commit(content, keep=newest))
    finally:
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
                        b"" if is_blank else block_checksums(shape, at),
                        weight_checksums(shape, at + shape.weight_offset),
                    )
            finally:
                while writes:  # nothing may be written to an extent that the caller releases
                    writes.popleft().wait()

    def _read_ahead(self) -> Generator[tuple[int, PieceRead]]:
        """Yield the pieces of all chunks in turn, read, with their positions.

        Each is valid until the next one is asked for; the next ones are being read.
        """
        pieces = [piece for chunk in self._chunks for piece in self._pieces_of(chunk)]
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


def remove_stores(worlds: Worlds, ranks: Ranks) -> None:
    """Remove the stores of other numbers of ranks, unless they have snapshots.

    Those that have a newer commit than the one that was resumed stay too: whoever went back to a
    snapshot may go on from there still. Call it when these ranks have resumed. Each removes some;
    what cannot be removed stays, with a warning.
    """
    stores: list[tuple[Path, list[Path]]] = []
    for world in worlds.others:
        if world.era > worlds.source.era:
            continue
        if any(generation.names for generation in world.all):
            if ranks.rank == 0 and worlds.moves:
                listed = " ".join(map(str, sorted(world.paths.values())))
                logger.warning(
                    "the stores of the run of %s stay, because they have snapshots; `tensorstow run"
                    " clean` removes them one by one: %s",
                    format_count(world.size, "rank"),
                    listed,
                )
        else:
            stores += [
                (path, [rank_directory(drive, rank, world.size) for drive in worlds.drives])
                for rank, path in sorted(world.paths.items())
            ]
    for path, others in stores[ranks.rank :: ranks.world]:
        _remove(path, others)
    ranks.all_gather(_ASKED)  # a rank that goes on must not find what another one removes


def _remove(directory: Path, others: Sequence[Path]) -> None:
    try:
        with hold_dead_run(directory, [path for path in others if path.is_dir()]) as removal:
            if any(summary.names for summary in removal.generations):
                return  # another process has named one since
            remove(removal)
        for path in (directory, *others):
            if RANK_NAME.fullmatch(path.name):
                with suppress(OSError):  # something of the user's is in it
                    path.rmdir()
    except (StowError, OSError) as error:
        logger.warning("an old store could not be removed from %s: %s", directory, error)
