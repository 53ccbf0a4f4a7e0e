"""The directories of the stores of several ranks, inside the run's directory."""

import re
from pathlib import Path

from tensorstow.base.errors import DirectoryError, OptionError, named
from tensorstow.base.sizes import format_count
from tensorstow.store.inspect import inspect_store, is_finished
from tensorstow.store.schema import MANIFEST_NAME

RANK_NAME = re.compile(r"rank-(\d+)-of-(\d+)")
"""Name of the directory of one of several ranks."""


def rank_directory(base: Path, rank: int, world: int) -> Path:
    """Return the directory of the store of ``rank``: a single process has it in ``base`` itself."""
    return base if world == 1 else base / f"rank-{rank}-of-{world}"


def run_directory(directory: Path, world: int) -> Path:
    """Return the run's directory, given that of the store of one of its ``world`` ranks."""
    return directory if world == 1 else directory.parent


def stores_in(base: Path) -> list[Path]:
    """Return the directories of the stores of the run in ``base``: of one process, then by rank.

    ``base`` itself if there is none.
    """
    ranks = [path for _, _, path in _ranks_in(base)]
    return [base, *ranks] if _has_store(base) or not ranks else ranks


def worlds_in(base: Path) -> dict[int, dict[int, Path]]:
    """Return the directories of the stores in ``base`` by number of ranks, then by rank.

    Those that were never finished, which hold nothing, are left out.
    """
    alone = [(1, 0, base)] if _has_store(base) else []
    worlds: dict[int, dict[int, Path]] = {}
    for world, rank, path in (*alone, *_ranks_in(base)):
        if is_finished(path):
            worlds.setdefault(world, {})[rank] = path
    return worlds


def refuse_other_worlds(base: Path, world: int) -> None:
    """Raise OptionError if ``base`` holds commits of another number of ranks."""
    other_worlds = {
        size
        for size, stores in worlds_in(base).items()
        if size != world and any(inspect_store(path).generations for path in stores.values())
    }
    if other_worlds:
        message = (
            f"{base} was named for a run of {_ranks(world)}, and it holds one of"
            f" {' and one of '.join(map(_ranks, sorted(other_worlds)))}. Call resume() to go on"
            " with that run, or name another directory for a new one (`tensorstow run clean`"
            " removes a dead run)."
        )
        raise OptionError(message)


def _ranks(world: int) -> str:
    return format_count(world, "rank")


def _has_store(directory: Path) -> bool:
    with named("Directory", directory):
        return (directory / MANIFEST_NAME).exists()


def _ranks_in(base: Path) -> list[tuple[int, int, Path]]:
    """Return number of ranks, rank and directory of each store of a rank, in that order.

    Raises:
        DirectoryError: One is a symbolic link: whoever gave the directory away chose its target.
    """
    with named("Directory", base):
        matches = [
            (m, path) for path in base.glob("rank-*") if (m := RANK_NAME.fullmatch(path.name))
        ]
        linked = sorted(path.name for _, path in matches if path.is_symlink())
        if linked:
            message = (
                f"{base} was named, and {', '.join(linked)} in it is a symbolic link: no run makes"
                " one, and nothing is read or changed through it. Put the directory there, or name"
                " the one that the link leads to."
            )
            raise DirectoryError(message)
        return sorted((int(m[2]), int(m[1]), path) for m, path in matches if _has_store(path))
