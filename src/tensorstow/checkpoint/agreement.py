"""Finds the generations that every rank of a run has.

Ranks number their generations each for itself; what they committed together has one id on all.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from tensorstow.base.errors import OptionError, RankError
from tensorstow.base.machine import machine_id
from tensorstow.checkpoint.ranks import Ranks
from tensorstow.store.inspect import inspect_store
from tensorstow.store.rank_dirs import rank_directory, run_directory, worlds_in
from tensorstow.store.records import Generation, Summary
from tensorstow.store.store import Store

logger = logging.getLogger("tensorstow")

COMMIT, FIRST, ERA = "commit", "first", "era"
"""Keys of a generation's ``hyper``: its id, whether its run had committed nothing before, and how
often the run went on with another number of ranks."""


@dataclass(frozen=True, slots=True)
class RankGeneration:
    """A generation, as ranks exchange it."""

    id: str | None
    number: int
    step: int
    names: Sequence[str]
    first: bool
    era: int

    def called(self, which: str | int) -> bool:
        """Return whether ``which`` is its number or one of its snapshots' names."""
        return which in self.names or which == self.number


def choose(store: Store, which: str | int | None, ranks: Ranks) -> Generation | None:
    """Return the newest generation that all ranks have, or the one that ``which`` names.

    None if the ranks have never committed together and ``which`` is None. A number is rank 0's.
    Raises OptionError if the named one does not exist, RankError if the ranks have no generation
    in common.
    """
    if ranks.alone:
        return store.generation(which)
    _refuse_elsewhere(store, ranks)
    generations = _everyones(store, f"resume({'' if which is None else repr(which)})", ranks)
    common = common_ids(generations)
    if which is not None:
        wanted = _named(generations, which)
    elif common:
        wanted = next(g.id for g in reversed(generations[0]) if g.id in common)
        _log_difference(generations, wanted)
    else:
        _refuse_lost(store, generations, ranks)
        return None
    # Each rank has its own number for that id.
    mine = next(g for g in generations[ranks.rank] if g.id == wanted)
    return store.generation(mine.number)


def snapshots(store: Store, ranks: Ranks) -> list[Summary]:
    """Return this rank's generations with those of their names that all ranks have."""
    mine = [summary for summary in store.generations() if summary.names]
    all_names = ranks.all_gather(
        "snapshots()", sorted(name for summary in mine for name in summary.names)
    )
    common = set.intersection(*map(set, all_names))
    named = [replace(s, names=tuple(n for n in s.names if n in common)) for s in mine]
    return [summary for summary in named if summary.names]


def add_snapshot(store: Store, name: str, number: int | None, ranks: Ranks) -> None:
    """Name a generation on all ranks; drop the name where only some ranks have it."""
    operation = f"snapshot({name!r})"
    _drop_unless_all(store, name, ranks, operation)
    ranks.run_on_all(operation, lambda: store.add_snapshot(name, number))


def drop_snapshot(store: Store, name: str, ranks: Ranks) -> None:
    """Drop a snapshot on all ranks, also one that only some have."""
    operation = f"drop({name!r})"
    if not _drop_unless_all(store, name, ranks, operation):
        ranks.run_on_all(operation, lambda: store.drop_snapshot(name))


def _drop_unless_all(store: Store, name: str, ranks: Ranks, operation: str) -> bool:
    """Drop a name that only some ranks have, as after a crash; return whether it was one."""
    is_named = any(name in summary.names for summary in store.generations())
    everyone = ranks.all_gather(operation, is_named)
    torn = any(everyone) and not all(everyone)
    if torn:
        ranks.run_on_all(operation, lambda: store.drop_snapshot(name) if is_named else None)
    return torn


def list_generations(store: Store, ranks: Ranks, operation: str) -> list[list[RankGeneration]]:
    """Return the generations of every rank; those of a process alone have numbers for ids."""
    if ranks.alone:
        return [
            [
                replace(listed, id=str(listed.number))
                for listed in map(exchanged, map(store.load, store.generations()))
            ]
        ]
    return _everyones(store, operation, ranks)


def common_ids(generations: Sequence[Sequence[RankGeneration]]) -> set[str | None]:
    """Return the ids of the generations that every rank has, given those of each."""
    return set.intersection(*({g.id for g in of_rank} for of_rank in generations)) - {None}


def _everyones(store: Store, operation: str, ranks: Ranks) -> list[list[RankGeneration]]:
    # The other ranks wait in the gather: they learn of a damaged generation here.
    with ranks.reporting_errors(operation):
        mine = [astuple(exchanged(store.load(summary))) for summary in store.generations()]
    gathered: list[list[list[Any]]] = ranks.all_gather(operation, mine)
    return [[RankGeneration(*row) for row in of_rank] for of_rank in gathered]


def exchanged(generation: Generation) -> RankGeneration:
    """Return what ranks exchange of ``generation``."""
    hyper: Mapping[str, Any] = generation.hyper if isinstance(generation.hyper, dict) else {}
    # Digests do not say who wrote the rows, so the values may be of any type: [Note: Bounds].
    commit_id, is_first = hyper.get(COMMIT), bool(hyper.get(FIRST))
    return RankGeneration(
        commit_id if isinstance(commit_id, str) else None,
        generation.number,
        generation.step,
        generation.names,
        is_first,
        era_of(generation),
    )


def era_of(generation: Generation) -> int:
    """Return how often the run of ``generation`` had gone on with another number of ranks."""
    era = generation.hyper.get(ERA, 0) if isinstance(generation.hyper, dict) else 0
    return era if type(era) is int else 0


def _named(generations: Sequence[Sequence[RankGeneration]], which: str | int) -> str | None:
    """Return the id of what all ranks have under a name, or of what rank 0 has under a number."""
    ids = [next((k.id for k in of_rank if k.called(which)), None) for of_rank in generations]
    if not isinstance(which, str):
        ids = [ids[0] if any(k.id == ids[0] for k in of_rank) else None for of_rank in generations]
    lacking = [
        rank for rank, commit_id in enumerate(ids) if commit_id is None or commit_id != ids[0]
    ]
    if lacking:
        asked = f"snapshot {which!r}" if isinstance(which, str) else f"rank 0's generation {which}"
        common = set.intersection(
            *({name for k in of_rank for name in k.names} for of_rank in generations)
        )
        message = (
            f"The {asked} was requested, and ranks {', '.join(map(str, lacking))} do not have it."
            f" Snapshots of all ranks: {', '.join(sorted(common)) or 'none at all'}."
        )
        raise OptionError(message)
    return ids[0]


def _log_difference(generations: Sequence[Sequence[RankGeneration]], wanted: str | None) -> None:
    newer = [rank for rank, of_rank in enumerate(generations) if of_rank[-1].id != wanted]
    if newer:
        step = next(k.step for k in generations[0] if k.id == wanted)
        newest = ", ".join(f"rank {rank}: {generations[rank][-1].step}" for rank in newer)
        logger.warning(
            "going on from step %d, the newest commit that all ranks have; newer ones that only"
            " some have (%s) are of no use and go with the next commit",
            step,
            newest,
        )


def _refuse_elsewhere(store: Store, ranks: Ranks) -> None:
    """Raise RankError if another rank's machine has a rank's newer commits: they changed places.

    One rank of each machine looks for what lies there of ranks on other machines.
    """
    operation = "the places of all stores"
    with ranks.reporting_errors(operation):
        report = inspect_store(store.directories[0])
    mine = [machine_id(), report.run, max((g.number for g in report.generations), default=-1)]
    places: list[tuple[list[str], str, int]] = ranks.all_gather(operation, mine)
    machines = [machine for machine, _, _ in places]
    strays: list[int] = []
    with ranks.reporting_errors(operation):
        if machines.index(machines[ranks.rank]) == ranks.rank:
            base = run_directory(store.directories[0], ranks.world)
            for rank, path in worlds_in(base).get(ranks.world, {}).items():
                if machines[rank] != machines[ranks.rank] and _is_newer(path, *places[rank][1:]):
                    strays.append(rank)
    for place, of_machine in enumerate(ranks.all_gather(operation, strays)):
        if of_machine:
            numbers = ", ".join(map(str, of_machine))
            message = (
                f"Newer commits of ranks {numbers} than their own are on {machines[place][0]},"
                f" where rank {place} is now. Start the machines in the order that they had"
                " (torchrun --node-rank), or move each rank's directory"
                f" ({rank_directory(Path(), of_machine[0], ranks.world)}, ...) to its machine."
            )
            raise RankError(message)


def _is_newer(path: Path, run: str, number: int) -> bool:
    """Return whether a store has commits that the rank's own store, of ``run``, is to have."""
    other = inspect_store(path)
    newest = max((generation.number for generation in other.generations), default=-1)
    return newest > number and (number == -1 or other.run == run)


def _refuse_lost(
    store: Store, generations: Sequence[Sequence[RankGeneration]], ranks: Ranks
) -> None:
    """Raise RankError if ranks lack more than the first commit of the run.

    A crash may leave the first commit on some ranks. It stays until all ranks have made another.
    """
    # A crash leaves nothing else than a first commit without a name, of a run that moved no rows.
    if any(k.names or not k.first or k.era for of_rank in generations for k in of_rank):
        steps = "; ".join(
            f"rank {rank}: {', '.join(str(k.step) for k in of_rank) or 'nothing'}"
            for rank, of_rank in enumerate(generations)
        )
        message = (
            f"The ranks have no commit in common (steps by rank: {steps}). The stores are of"
            f" different runs, or a rank's is lost: this one looks in {store.directories[0]}. Bring"
            " back what was there, or name another directory for a new run."
        )
        raise RankError(message)
    for lone in generations[ranks.rank][-1:]:
        logger.warning(
            "the first commit of the run (step %d) was not made by all ranks: the run begins anew,"
            " and its next commit replaces that one. If a directory of another rank is missing,"
            " end the run now and bring it back",
            lone.step,
        )
