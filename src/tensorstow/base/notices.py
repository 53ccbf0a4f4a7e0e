"""Lines that users see without setting up logging: what was chosen for them."""

import logging

logger = logging.getLogger("tensorstow")


def show(line: str) -> None:
    """Write a line to standard error, unless the application has set up logging.

    An application with a handler, of the root logger or of "tensorstow", decides by itself: the
    caller has logged the same at INFO. Nothing is written either if the level of the logger
    "tensorstow" is above INFO. No handler and no level is changed.
    """
    last_resort = logging.lastResort  # None: the application wants nothing without handlers
    above = logger.level > logging.INFO or logger.manager.disable >= logging.INFO
    if last_resort is None or above or logger.disabled or logger.hasHandlers():
        return
    last_resort.handle(
        logger.makeRecord(logger.name, logging.INFO, __file__, 0, f"tensorstow: {line}", (), None)
    )
