"""Finds the generations that every rank of a run has.

Ranks number their generations each for itself; what they committed together has one id on all.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tensorstow.base.errors import OptionError, RankError
from tensorstow.checkpoint.ranks import Ranks
from tensorstow.store.records import Generation, Summary
from tensorstow.store.store import Store

logger = logging.getLogger("tensorstow")

COMMIT, FIRST = "commit", "first"
"""Keys of a generation's ``hyper``: its id, and whether its run had committed nothing before."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A generation, as ranks exchange it."""

    id: str | None
    number: int
    step: int
    names: tuple[str, ...]
    first: bool

    def called(self, which: str | int) -> bool:
        return which in self.names or which == self.number


def choose(store: Store, which: str | int | None, ranks: Ranks) -> Generation | None:
    """Return the newest generation that all ranks have, or the one that ``which`` names.

    None if nothing was ever committed and none is named; a number is rank 0's. Raises OptionError
    if the named one does not exist, RankError if the ranks have no generation in common.
    """
    if ranks.alone:
        return store.generation(which)
    kept = _everyones(store, f"resume({'' if which is None else repr(which)})", ranks)
    common = set.intersection(*({k.id for k in each} for each in kept)) - {None}
    if which is not None:
        wanted = _named(kept, which)
    elif common:
        wanted = next(k.id for k in reversed(kept[0]) if k.id in common)
        _log_difference(kept, wanted)
    else:
        _begin_anew(store, kept, ranks)
        return None
    mine = next(k for k in kept[ranks.rank] if k.id == wanted)
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
    what = f"snapshot({name!r})"
    _drop_unless_all(store, name, ranks, what)
    ranks.run_on_all(what, lambda: store.add_snapshot(name, number))


def drop_snapshot(store: Store, name: str, ranks: Ranks) -> None:
    """Drop a snapshot on all ranks, also one that only some have."""
    what = f"drop({name!r})"
    if not _drop_unless_all(store, name, ranks, what):
        ranks.run_on_all(what, lambda: store.drop_snapshot(name))


def _drop_unless_all(store: Store, name: str, ranks: Ranks, what: str) -> bool:
    """Drop a name that some ranks have, for others died before they had it; return whether."""
    here = any(name in summary.names for summary in store.generations())
    everyone = ranks.all_gather(what, here)
    torn = any(everyone) and not all(everyone)
    if torn:
        ranks.run_on_all(what, lambda: store.drop_snapshot(name) if here else None)
    return torn


def _everyones(store: Store, what: str, ranks: Ranks) -> list[list[_Kept]]:
    with ranks.reporting_errors(what):
        mine = [_described(store.load(summary)) for summary in store.generations()]
    gathered: list[list[dict[str, Any]]] = ranks.all_gather(what, mine)
    return [[_Kept(**{**k, "names": tuple(k["names"])}) for k in each] for each in gathered]


def _described(generation: Generation) -> dict[str, Any]:
    hyper: Mapping[str, Any] = generation.hyper
    return {
        "id": hyper.get(COMMIT),
        "number": generation.number,
        "step": generation.step,
        "names": generation.names,
        "first": bool(hyper.get(FIRST)),
    }


def _named(kept: Sequence[Sequence[_Kept]], which: str | int) -> str | None:
    """Return the id of what all ranks have under a name, or of what rank 0 has under a number."""
    ids = [next((k.id for k in each if k.called(which)), None) for each in kept]
    if not isinstance(which, str):
        ids = [ids[0] if any(k.id == ids[0] for k in each) else None for each in kept]
    lacking = [rank for rank, found in enumerate(ids) if found is None or found != ids[0]]
    if lacking:
        asked = f"snapshot {which!r}" if isinstance(which, str) else f"rank 0's generation {which}"
        there = set.intersection(*({name for k in each for name in k.names} for each in kept))
        message = (
            f"The {asked} was requested, and ranks {', '.join(map(str, lacking))} do not have it."
            f" Snapshots of all ranks: {', '.join(sorted(there)) or 'none at all'}."
        )
        raise OptionError(message)
    return ids[0]


def _log_difference(kept: Sequence[Sequence[_Kept]], wanted: str | None) -> None:
    newer = [rank for rank, each in enumerate(kept) if each[-1].id != wanted]
    if newer:
        step = next(k.step for k in kept[0] if k.id == wanted)
        newest = ", ".join(f"rank {rank}: {kept[rank][-1].step}" for rank in newer)
        logger.warning(
            "going on from step %d, the newest commit that all ranks have; newer ones that only"
            " some have (%s) are of no use and go with the next commit",
            step,
            newest,
        )


def _begin_anew(store: Store, kept: Sequence[Sequence[_Kept]], ranks: Ranks) -> None:
    """Drop a first commit that not all ranks made; raise RankError if more is missing."""
    if any(len(each) > 1 or any(k.names or not k.first for k in each) for each in kept):
        found = "; ".join(
            f"rank {rank}: {', '.join(str(k.step) for k in each) or 'nothing'}"
            for rank, each in enumerate(kept)
        )
        message = (
            f"The ranks have no commit in common (steps by rank: {found}). The stores are of"
            f" different runs, or a rank's is lost: this one looks in {store.directories[0]}. Bring"
            " back what was there, or name another directory for a new run."
        )
        raise RankError(message)
    for lone in kept[ranks.rank]:
        logger.warning(
            "the first commit of the run (step %d) was not made by all ranks: it is dropped, and"
            " the run begins anew",
            lone.step,
        )
        store.discard(lone.number)
