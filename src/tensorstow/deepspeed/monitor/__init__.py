"""Writes an engine's scalars, by the sections ``tensorboard``, ``csv_monitor`` and ``wandb``."""

from collections.abc import Sequence
from pathlib import Path

from tensorstow.deepspeed.config.settings import MonitorFiles, Settings
from tensorstow.report.scalars import (
    CsvScalars,
    Scalar,
    ScalarWriter,
    TensorBoardScalars,
    WandbScalars,
    require,
)


class Monitor:
    """Writes the scalars of one engine on the rank that ``writes``.

    Every rank raises OptionError if a package that the configuration needs is not installed.
    """

    def __init__(self, settings: Settings, *, writes: bool) -> None:
        for name in ("tensorboard", "wandb"):
            if getattr(settings, name).enabled:
                require(name)
        self._writers: list[ScalarWriter] = []
        if not writes:
            return
        if settings.tensorboard.enabled:
            self._writers.append(TensorBoardScalars(_place(settings.tensorboard, "tensorboard")))
        if settings.csv_monitor.enabled:
            self._writers.append(CsvScalars(_place(settings.csv_monitor, "csv_monitor")))
        if settings.wandb.enabled:
            asked = settings.wandb
            self._writers.append(WandbScalars(asked.project, asked.group, asked.team))

    @property
    def enabled(self) -> bool:
        """Whether anything is written on this rank."""
        return bool(self._writers)

    def write_events(self, events: Sequence[Scalar]) -> None:
        """Write scalars: name, value and count of samples of each."""
        for writer in self._writers:
            writer.write(events)

    def close(self) -> None:
        """Close what was opened. Idempotent."""
        for writer in self._writers:
            writer.close()
        self._writers = []


def _place(section: MonitorFiles, name: str) -> Path:
    """Return the directory; without output_path, one in the home directory, as upstream."""
    base = Path(section.output_path) if section.output_path else Path.home() / name
    return base / section.job_name
