"""Times an engine's steps and logs them every ``steps_per_print``, on the first rank."""

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

logger = logging.getLogger("tensorstow.deepspeed")
_UNTIMED_STEPS = 2
_FORMAT = "[%(asctime)s] [%(levelname)s] [Rank 0] %(message)s"


class StepTimer:
    """Measures the parts of a step, and logs every ``steps_per_print`` steps."""

    def __init__(self, every: int | None, *, timed: bool, logs: bool) -> None:
        """Log every ``every`` steps; None: never.

        ``timed``: whether seconds are measured, for which the accelerator is synchronized.
        ``logs``: whether this rank logs.
        """
        self._every = every
        self._timed = timed
        self._logs = logs
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Measure the block, with the accelerator's work in it."""
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
        """Log the end of a step if it is due."""
        if not self._every or step % self._every:
            return
        seconds = {f"{name} (s)": f"{spent:.3f}" for name, spent in self._seconds.items()}
        self._seconds.clear()
        if self._logs:
            line = ", ".join(f"{name}={value}" for name, value in {**facts, **seconds}.items())
            _tell(f"step={step}, {line}")


class ThroughputTimer:
    """Samples per second of an engine's steps, by the host's clock: ``engine.tput_timer``."""

    def __init__(self, batch_size: int) -> None:
        """Count ``batch_size`` samples a step, of all ranks; the first two steps count nothing."""
        self.batch_size = batch_size
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self._start: float | None = None

    def update_epoch_count(self) -> None:
        """Count an epoch."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Begin a micro-batch."""
        self._start = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End the micro-batch that has begun; ``global_step``: a step ends with it."""
        del report_speed
        if self._start is None:
            return
        if self.global_step_count >= _UNTIMED_STEPS:
            self.total_elapsed_time += time.perf_counter() - self._start
        self._start = None
        self.micro_step_count += 1
        self.global_step_count += global_step

    def avg_samples_per_sec(self) -> float:
        """Return the samples per second since the third step; before its end, minus infinity."""
        timed = self.global_step_count - _UNTIMED_STEPS
        if timed <= 0:
            return float("-inf")
        return self.batch_size * timed / self.total_elapsed_time


def _tell(line: str) -> None:
    """Log at INFO, to stdout if no handler is set up.

    The default level (WARNING) is not applied: the configuration enables the line. A level that
    the user set for "tensorstow" or this logger is.
    """
    levels = [logging.getLogger(name).level for name in ("tensorstow", logger.name)]
    if max(*levels, logger.manager.disable) > logging.INFO:
        return
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
    logger.handle(logger.makeRecord(logger.name, logging.INFO, __file__, 0, line, (), None))


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
