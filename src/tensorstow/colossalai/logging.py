"""``colossalai.logging``: a logger for some or all ranks."""

import logging
from collections.abc import Collection
from functools import cache, partialmethod
from os import PathLike
from pathlib import Path
from typing import Literal

from tensorstow.base.directories import make_folder
from tensorstow.base.errors import OptionError
from tensorstow.base.fields import read_value
from tensorstow.fsdp.sharding import rank_here

_Level = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
_FORMAT = logging.Formatter("colossalai - %(name)s - %(levelname)s: %(message)s")


class DistributedLogger:
    """A logger of the standard library whose calls take ``ranks``.

    It writes to stderr, from INFO. Upstream writes the caller's file and line as a message of its
    own before each; here there is one message.

    Args:
        name: The logger's name.
    """

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False
        handler = logging.StreamHandler()
        handler.setFormatter(_FORMAT)
        self._logger.addHandler(handler)

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return rank_here()

    def set_level(self, level: str) -> None:
        """Set the lowest level that is written.

        Args:
            level: "DEBUG", "INFO", "WARNING" or "ERROR".

        Raises:
            OptionError: It is none of these.
        """
        self._logger.setLevel(read_value(_Level, level, "level"))

    def log_to_file(
        self,
        path: str | PathLike[str],
        mode: str = "a",
        level: str = "INFO",
        suffix: str | None = None,
    ) -> None:
        """Write to a file as well: ``rank_<rank>.log``, or ``rank_<rank>_<suffix>.log``.

        Args:
            path: The directory, which is created.
            mode: "a" appends to an existing file, "w" replaces it.
            level: The lowest level that is written to the file.
            suffix: Appended to the rank in the file's name. Default: None, nothing.

        Raises:
            OptionError: The level is unknown.
        """
        read_value(_Level, level, "level")
        folder = Path(path)
        make_folder(folder)
        ending = "" if suffix is None else f"_{suffix}"
        file = folder / f"rank_{self.rank}{ending}.log"
        if file.is_symlink():  # by whom is unknown, and a log is appended to what is there
            message = f"{file} was to be written, and it is a symbolic link: remove it."
            raise OptionError(message)
        handler = logging.FileHandler(file, mode)
        handler.setLevel(level)
        handler.setFormatter(_FORMAT)
        self._logger.addHandler(handler)

    def _log(self, level: int, message: str, ranks: Collection[int] | None = None) -> None:
        """Log a message on some ranks; None: on every rank."""
        if ranks is None or self.rank in ranks:
            self._logger.log(level, "%s", message)

    debug = partialmethod(_log, logging.DEBUG)
    info = partialmethod(_log, logging.INFO)
    warning = partialmethod(_log, logging.WARNING)
    error = partialmethod(_log, logging.ERROR)


@cache
def get_dist_logger(name: str = "colossalai") -> DistributedLogger:
    """Return the logger of a name, the same object at each call.

    Args:
        name: The name.
    """
    return DistributedLogger(name)


def disable_existing_loggers(
    include: Collection[str] | None = None, exclude: Collection[str] = ("colossalai",)
) -> None:
    """Let loggers that exist write from WARNING.

    Args:
        include: The loggers' names. Default: None, all but those of ``exclude``.
        exclude: Names that are left as they are, where ``include`` is None.
    """
    for name in list(logging.Logger.manager.loggerDict):
        if name in include if include is not None else name not in exclude:
            logging.getLogger(name).setLevel(logging.WARNING)
