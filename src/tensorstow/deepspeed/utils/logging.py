"""``deepspeed.utils.logging``: the log of this package, by upstream's names."""

import logging
from collections.abc import Collection

from tensorstow.base.errors import OptionError
from tensorstow.fsdp.sharding import rank_here

logger = logging.getLogger("tensorstow")
_LEVELS = {
    name.lower(): getattr(logging, name)
    for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
}


def log_dist(message: str, ranks: Collection[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on some ranks.

    Args:
        message: The text.
        ranks: The ranks that log it; -1 among them: all. Default: None, all.
        level: The level of ``logging``. Default: INFO.
    """
    rank = rank_here()
    if not ranks or rank in ranks or -1 in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def set_log_level_from_string(
    log_level_str: str, custom_logger: logging.Logger | None = None
) -> None:
    """Set the level of a log and of its handlers.

    Args:
        log_level_str: "debug", "info", "warning", "error" or "critical", in any case.
        custom_logger: The log. Default: None, that of this package.

    Raises:
        OptionError: There is no such level.
    """
    level = _LEVELS.get(log_level_str.lower())
    if level is None:
        message = f"log_level_str={log_level_str!r} was given: it is one of {', '.join(_LEVELS)}."
        raise OptionError(message)
    log = logger if custom_logger is None else custom_logger
    log.setLevel(level)
    for handler in log.handlers:
        handler.setLevel(level)
