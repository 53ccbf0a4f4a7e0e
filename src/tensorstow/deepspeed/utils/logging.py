"""``deepspeed.utils.logging``: the log of this package, by upstream's names."""

import logging
from collections.abc import Collection

from tensorstow.deepspeed.ranks import rank_here

__all__ = ["log_dist", "logger"]

logger = logging.getLogger("tensorstow")


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
