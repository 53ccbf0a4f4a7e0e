"""The directories of the stores of several ranks, inside the run's directory."""

import re
from pathlib import Path

from tensorstow.base.errors import DirectoryError, OptionError, named
from tensorstow.base.sizes import format_count
from tensorstow.store.schema import MANIFEST_NAME

_NAME = re.compile(r"rank-(\d+)-of-(\d+)")


def rank_directory(base: Path, rank: int, world: int) -> Path:
    """Return the directory of the store of ``rank``: a single process has it in ``base`` itself."""
    return base if world == 1 else base / f"rank-{rank}-of-{world}"


def stores_in(base: Path) -> list[Path]:
    """Return the directories of the stores of the run in ``base``, by rank.

    ``base`` itself if it is a store, or if there is none.
    """
    ranks = [path for _, _, path in _ranks_in(base)]
    return ranks if ranks and not _has_store(base) else [base]


def refuse_other_worlds(base: Path, world: int) -> None:
    """Raise OptionError if ``base`` holds a run of another number of ranks."""
    other_worlds = {count for count, _, _ in _ranks_in(base)} | ({1} if _has_store(base) else set())
    other_worlds.discard(world)
    if other_worlds:
        message = (
            f"{base} was named for a run of {_ranks(world)}, and it holds one of"
            f" {' and one of '.join(map(_ranks, sorted(other_worlds)))}: each rank has its own"
            " shards in its own store. Start as many as before; or, to go on with another number,"
            " resume there, save by torch.distributed.checkpoint, and load that into a run in"
            " another directory (docs/guides/saving-and-resuming.md). To remove a dead run, use"
            " `tensorstow run clean`."
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
        matches = [(m, path) for path in base.glob("rank-*") if (m := _NAME.fullmatch(path.name))]
        linked = sorted(path.name for _, path in matches if path.is_symlink())
        if linked:
            message = (
                f"{base} was named, and {', '.join(linked)} in it is a symbolic link: no run makes"
                " one, and nothing is read or changed through it. Put the directory there, or name"
                " the one that the link leads to."
            )
            raise DirectoryError(message)
        return sorted((int(m[2]), int(m[1]), path) for m, path in matches if _has_store(path))
