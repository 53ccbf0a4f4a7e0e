"""Writers of a run's scalars: TensorBoard, CSV files, Weights & Biases."""

import csv
import importlib
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from tensorstow.base.directories import expand_path, make_folder
from tensorstow.base.errors import OptionError
from tensorstow.base.regular_file import open_regular

Scalar = tuple[str, float, int]
"""A name, a value, and the step or the count of samples that it belongs to."""


class ScalarWriter(Protocol):
    """The interface of writers of a run's scalars."""

    def write(self, scalars: Iterable[Scalar]) -> None:
        """Write scalars and flush them."""

    def close(self) -> None:
        """End. Idempotent."""


class CsvScalars:
    """A file for each scalar, named after it, with a line for each value.

    Args:
        directory: The folder; it is created if it does not exist; files in it are continued.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = _create(directory)

    def write(self, scalars: Iterable[Scalar]) -> None:
        """Append a line for each scalar; a new file begins with a heading."""
        for name, value, step in scalars:
            path = self._directory / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            fd = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            with os.fdopen(fd, "a", encoding="utf-8", newline="") as file:
                lines = csv.writer(file)
                if file.tell() == 0:
                    lines.writerow(["step", name.rpartition("/")[2]])
                lines.writerow([step, value])

    def close(self) -> None:
        """Do nothing: no file is open."""


class TensorBoardScalars:
    """An event file of TensorBoard, by ``torch.utils.tensorboard``.

    Args:
        directory: The folder; it is created if it does not exist.

    Raises:
        OptionError: The package ``tensorboard`` is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        require("tensorboard")
        module: Any = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(str(_create(directory)))

    def write(self, scalars: Iterable[Scalar]) -> None:
        """Write scalars to the file."""
        for name, value, step in scalars:
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._writer.close()


class WandbScalars:
    """A run of Weights & Biases, by its package.

    Args:
        project: The project.
        group: The group of the run. Default: None.
        team: The entity that the run belongs to. Default: None, the user's default.

    Raises:
        OptionError: The package ``wandb`` is not installed.
    """

    def __init__(self, project: str, group: str | None = None, team: str | None = None) -> None:
        require("wandb")
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(project=project, group=group, entity=team)

    def write(self, scalars: Iterable[Scalar]) -> None:
        """Log scalars."""
        for name, value, step in scalars:
            self._run.log({name: value}, step=step)

    def close(self) -> None:
        """Finish the run. Idempotent."""
        self._run.finish()


def require(package: str) -> None:
    """Raise OptionError if a package, of the same name for import and for pip, is not installed."""
    if importlib.util.find_spec(package) is None:
        message = (
            f"Scalars were requested for {package}, and the package is not installed: `pip install"
            f" {package}`, or disable it."
        )
        raise OptionError(message)


def _create(directory: str | os.PathLike[str]) -> Path:
    path = expand_path(directory)
    make_folder(path)
    return path
