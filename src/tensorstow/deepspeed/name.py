"""Lets ``import deepspeed`` import ``tensorstow.deepspeed``, for libraries that import it."""

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from tensorstow.base.absent_names import is_wanted
from tensorstow.base.errors import AbsentError, OptionError

_UPSTREAM, _OURS = "deepspeed", "tensorstow.deepspeed"
_LOOKED_ALREADY = ("accelerate", "transformers.integrations.deepspeed", "lightning.fabric")
"""Libraries that look for DeepSpeed when they are imported."""


def take_name() -> None:
    """Let ``import deepspeed`` import this package, in this process.

    For libraries that import DeepSpeed themselves: the Trainer of transformers with ``deepspeed=``,
    accelerate. Call it before they are imported. To them DeepSpeed is then installed, in the
    version ``tensorstow.deepspeed.__version__``; one that is installed as well is not imported.

    Raises:
        OptionError: DeepSpeed, or a library that has looked for it, is imported already.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    late = [name for name in (_UPSTREAM, *_LOOKED_ALREADY) if name in sys.modules]
    if late:
        message = (
            f"take_name() was called when {', '.join(late)} was imported: a library that has looked"
            " for DeepSpeed does not look again. Call it first, above their imports."
        )
        raise OptionError(message)
    sys.meta_path.insert(0, _Finder())


class _Distribution(importlib.metadata.Distribution):
    """What says which version of ``deepspeed`` is installed."""

    def read_text(self, filename: str) -> str | None:
        """Return the text of the one file that it has."""
        if filename != "METADATA":
            return None
        version = importlib.import_module(_OURS).__version__
        return f"Metadata-Version: 2.1\nName: {_UPSTREAM}\nVersion: {version}\n"

    def locate_file(self, path: Any) -> Path:
        """Return the path of a file of the package."""
        return Path(__file__).parent.parent.joinpath(path)


class _Loader(Loader):
    """Gives a module of this package to an import by upstream's name."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make an empty module, which ``exec_module`` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of this package in the place of ``module``."""
        # An import returns what ``sys.modules`` has once the module was executed.
        sys.modules[module.__name__] = importlib.import_module(_ours(module.__name__))


class _Finder(importlib.metadata.DistributionFinder):
    """Finds modules by upstream's names, and upstream's distribution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how ``fullname`` is imported; None if this package has no such module."""
        del path, target
        if fullname != _UPSTREAM and not fullname.startswith(f"{_UPSTREAM}."):
            return None
        spec = importlib.util.find_spec(_ours(fullname))
        if spec is None:
            if is_wanted(fullname):
                message = (
                    f"{fullname} is not here: docs/guides/deepspeed.md lists what {_OURS} has."
                )
                raise AbsentError(message)
            return None
        is_package = spec.submodule_search_locations is not None
        return ModuleSpec(fullname, _Loader(), origin=spec.origin, is_package=is_package)

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        """Yield upstream's distribution if ``context`` is for it, or for all."""
        if context is None or context.name in {None, _UPSTREAM}:
            yield _Distribution()


def _ours(name: str) -> str:
    return _OURS + name.removeprefix(_UPSTREAM)
