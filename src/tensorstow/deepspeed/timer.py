"""What an engine logs of its steps: every ``steps_per_print``, by the first rank."""

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

logger = logging.getLogger("tensorstow.deepspeed")
_FORMAT = "[%(asctime)s] [%(levelname)s] [Rank 0] %(message)s"


class StepTimer:
    """Counts the seconds of the parts of a step, and logs where a step is due."""

    def __init__(self, every: int | None, *, timed: bool, logs: bool) -> None:
        """Log every so many steps; None: never. ``timed``: seconds too, which costs waiting.

        ``logs``: whether this rank does.
        """
        self._every = every
        self._timed = timed
        self._logs = logs
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Count what runs inside, the accelerator's work too."""
        if not self._timed:
            yield
            return
        _wait()
        start = time.perf_counter()
        try:
            yield
        finally:
            _wait()
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def log_step(self, step: int, facts: Mapping[str, object]) -> None:
        """Take note of a step's end."""
        if not self._every or step % self._every:
            return
        seconds = {f"{name} (s)": f"{spent:.3f}" for name, spent in self._seconds.items()}
        self._seconds.clear()
        if self._logs:
            told = ", ".join(f"{name}={value}" for name, value in {**facts, **seconds}.items())
            _tell(f"step={step}, {told}")


def _tell(line: str) -> None:
    """Log what the configuration asked for, to stdout where nobody has set up logging.

    Not by the level that loggers have unless somebody sets one (WARNING): the key would do nothing.
    A level that the user gave "tensorstow" or this logger holds.
    """
    given = [logging.getLogger(name).level for name in ("tensorstow", logger.name)]
    if max(*given, logger.manager.disable) > logging.INFO:
        return
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
    logger.handle(logger.makeRecord(logger.name, logging.INFO, __file__, 0, line, (), None))


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
