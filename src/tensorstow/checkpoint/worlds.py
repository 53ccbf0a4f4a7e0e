"""Finds where a run goes on that has stores of several numbers of ranks, and removes old ones.

[Note: Worlds] A number of ranks is a world, which has stores of its own in the run's directory. A
commit says how often its run has changed worlds: its era. The world whose newest common commit has
the highest era is the one to go on from. If that is another world, each rank writes the states and
weights of its rows to its own store, in chunks of its own, and all ranks commit them with the next
era. The old stores are removed when all ranks have resumed, unless they have snapshots. A crash
before the new commit is complete leaves the old world the newest; after it, both are equal.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from tensorstow.base.errors import OptionError, RankError, StowError
from tensorstow.base.machine import machine_id
from tensorstow.base.sizes import format_count
from tensorstow.checkpoint import agreement
from tensorstow.checkpoint.agreement import (
    RankGeneration,
    common_ids,
    exchanged,
)
from tensorstow.checkpoint.ranks import Ranks
from tensorstow.store.inspect import inspect_store, read_generations
from tensorstow.store.rank_dirs import RANK_NAME, rank_directory, run_directory, worlds_in
from tensorstow.store.remove import hold_dead_run, remove
from tensorstow.store.store import Store

logger = logging.getLogger("tensorstow")

_ASKED = "resume()"


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
    ours: World
    rest: Sequence[World]
    source: World
    """Has the commit to go on from."""
    commit: str | None
    """The id of that commit; None: there is none."""

    @property
    def next_era(self) -> int:
        """Return the era of what is committed from now on: above that of what others have."""
        if not self.moves and all(world.era < self.ours.era for world in self.rest):
            return max(self.ours.era, 0)
        worlds = (self.ours, *self.rest)
        return max((g.era for world in worlds for g in world.all), default=0) + 1

    @property
    def moves(self) -> bool:
        """Return whether rows are to move from another number of ranks."""
        return self.commit is not None and self.source is not self.ours


def survey(store: Store, ranks: Ranks, which: str | int | None) -> Worlds | None:
    """Find the commit to resume among those of all numbers of ranks; None if there are no others.

    ``which``: its snapshot's name or its number; None: the newest. Raises OptionError if there is
    none of that name, LockedError if a store of others is in use, RankError if stores are missing
    or the ranks see different ones.
    """
    base, *drives = (run_directory(path, ranks.world) for path in store.directories)
    with ranks.reporting_errors(_ASKED):
        paths = {size: stores for size, stores in worlds_in(base).items() if size != ranks.world}
    seen = ranks.all_gather(_ASKED, [[size, sorted(paths[size])] for size in sorted(paths)])
    if not any(seen):
        return None
    ours = World(ranks.world, agreement.list_generations(store, ranks, _ASKED))
    with ranks.reporting_errors(_ASKED):
        rest = [World(size, _listed(stores), stores) for size, stores in sorted(paths.items())]
    # Ranks may see different stores: the highest era that one of them sees decides for all.
    eras = ranks.all_gather(_ASKED, max((world.era for world in rest), default=-1))
    is_elsewhere = isinstance(which, str) and ours.find(which) is None
    with ranks.reporting_errors(_ASKED):
        if max(eras) >= ours.era or is_elsewhere:  # else others are left over: nobody reads them
            _refuse_other_sights(base, seen)
        chosen = _choose(base, drives, ours, rest, which)
    _refuse_other_commits(chosen, ranks)
    return chosen


def _choose(
    base: Path,
    drives: Sequence[Path],
    ours: World,
    rest: Sequence[World],
    which: str | int | None,
) -> Worlds:
    """Return where to go on, as this rank sees it."""
    worlds = sorted((*rest, ours), key=lambda world: world.era)  # ours last of equal ones
    newest = worlds[-1]
    if newest is not ours and newest.era == worlds[-2].era >= 0:
        message = (
            f"{base} holds runs of {worlds[-2].size} and of {newest.size} ranks, of which none"
            " came after the other. Start as many ranks as the run has that is to go on."
        )
        raise RankError(message)
    if newest.era < 0:
        _refuse_lost_source(base, worlds)
        return Worlds(base, drives, ours, rest, ours, None)
    if isinstance(which, str):
        fitting = [world for world in worlds if world.find(which) is not None]
        if not fitting:
            message = (
                f"The snapshot {which!r} was requested, and no commit in {base} has that name."
                f" Snapshots of {'; of '.join(map(str, worlds))}."
            )
            raise OptionError(message)
        return Worlds(base, drives, ours, rest, fitting[-1], fitting[-1].find(which))
    if newest.is_lost and newest is not ours:
        _refuse_lost(base, newest)
    commit = newest.find(which)
    if commit is None and newest is not ours:
        message = (
            f"Generation {which} was requested, and the newest commit in {base} is of"
            f" {format_count(newest.size, 'rank')}, which do not have it. Name a snapshot, or"
            " leave it out for the newest commit."
        )
        raise OptionError(message)
    return Worlds(base, drives, ours, rest, newest, commit)


def read_worlds(base: Path, asked: str) -> list[World]:
    """Return the commits in ``base`` by numbers of ranks, also of a run that is live.

    ``asked``: the request, for errors.
    """
    stores = sorted(worlds_in(base).items())
    return [World(size, _listed(paths, asked, live=True), paths) for size, paths in stores]


def _listed(
    paths: Mapping[int, Path], asked: str = "A resume", *, live: bool = False
) -> list[list[RankGeneration]]:
    listed = []
    for _, path in sorted(paths.items()):
        generations = map(exchanged, read_generations(path, asked, live=live))
        listed.append([replace(g, id=g.id or str(g.number)) for g in generations])
    return listed


def _refuse_lost(base: Path, world: World) -> NoReturn:
    stores = zip(sorted(world.paths) or range(world.size), world.listed, strict=True)
    missing = sorted(set(range(world.size)) - {rank for rank, commits in stores if commits})
    lacking = f"ranks {', '.join(map(str, missing))} have no commits there, on {machine_id()[0]}"
    message = (
        f"The newest commit in {base} is of {format_count(world.size, 'rank')}, and"
        f" {lacking if missing else 'not all of them have it'}. Copy or mount the directories of"
        " all ranks there, on every machine."
    )
    raise RankError(message)


def _refuse_lost_source(base: Path, worlds: Sequence[World]) -> None:
    """Raise RankError if rows were moved, and neither all of them nor their source is there."""
    moved = [world for world in worlds if any(g.era > 0 for g in world.all)]
    if moved:
        _refuse_lost(base, moved[-1])


def _refuse_other_commits(worlds: Worlds, ranks: Ranks) -> None:
    """Raise RankError if a rank would go on from another commit than rank 0.

    A copy of a run's directory on another machine does not get what the run commits later.
    """
    mine: list[Any] = []
    with ranks.reporting_errors(_ASKED):
        if worlds.moves:
            source, paths = worlds.source, worlds.source.paths
            runs = [inspect_store(path).run for _, path in sorted(paths.items())]
            (step,) = {g.step for g in source.listed[0] if g.id == worlds.commit}
            mine = [source.size, step, worlds.commit, runs]
    everyone = ranks.all_gather(_ASKED, mine)
    differing = [rank for rank, commit in enumerate(everyone) if commit != everyone[0]]
    if differing:
        steps = [commit[1] if commit else "its own" for commit in everyone]
        message = (
            f"{worlds.base} holds different commits on different machines: rank 0 would go on from"
            f" step {steps[0]}, and rank {differing[0]} from step {steps[differing[0]]}. Remove the"
            " older copies, and copy or mount the newest stores on every machine."
        )
        raise RankError(message)


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


def remove_stores(worlds: Worlds, ranks: Ranks) -> None:
    """Remove the stores of other numbers of ranks, unless they have snapshots.

    Those that have a newer commit than the one that was resumed stay too: whoever went back to a
    snapshot may go on from there still. Call it when these ranks have resumed. Each removes some;
    what cannot be removed stays, with a warning.
    """
    stores: list[tuple[Path, list[Path]]] = []
    for world in worlds.rest:
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
    machines = ranks.all_gather(_ASKED, machine_id())
    for path, drives in stores[ranks.rank :: ranks.world]:
        _remove(path, drives)
    ranks.all_gather(_ASKED)
    with ranks.reporting_errors(_ASKED):
        remaining = [path for world in worlds_in(worlds.base).values() for path in world.values()]
    ranks.all_gather(_ASKED)  # nobody reads what another one removes
    # What this rank was not to remove, and is there still, is a copy on this machine.
    if machines.index(machines[ranks.rank]) == ranks.rank:
        for number, (path, drives) in enumerate(stores):
            if path in remaining and machines[number % ranks.world] != machines[ranks.rank]:
                _remove(path, drives)
    ranks.all_gather(_ASKED)


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
