"""What an engine logs of its steps: every ``steps_per_print``, by the first rank."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

logger = logging.getLogger("tensorstow")


class Progress:
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
    def part(self, name: str) -> Iterator[None]:
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

    def stepped(self, step: int, facts: Mapping[str, object]) -> None:
        """Take note of a step's end."""
        if not self._every or step % self._every:
            return
        seconds = {f"{name} (s)": f"{spent:.3f}" for name, spent in self._seconds.items()}
        self._seconds.clear()
        if self._logs:
            told = ", ".join(f"{name}={value}" for name, value in {**facts, **seconds}.items())
            logger.info("step=%d, %s", step, told)


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
