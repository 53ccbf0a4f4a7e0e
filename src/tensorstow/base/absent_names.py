"""Names and modules of other projects that are not here: their import says what to use instead."""

import dis
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

from tensorstow.base.errors import AbsentAttributeError, AbsentError

_IMPORT_FROM = dis.opmap["IMPORT_FROM"]
_GETTERS = {"__getattr__", "refuse_name"}
"""Functions of modules that ``refuse`` is called by."""


def refuse(module: str, name: str, absent: Mapping[str, str]) -> NoReturn:
    """Raise an error for a name that a module lacks on purpose, as its ``__getattr__``.

    Args:
        module: The module's name.
        name: The name; AttributeError is raised if it is not in ``absent``.
        absent: Why names are not here, by name.

    Raises:
        AbsentError: In an import, where Python would say of an AttributeError "cannot import name".
        AbsentAttributeError: Elsewhere, so that ``hasattr`` tells scripts that it is not here.
    """
    if name in absent:
        message = f"{name} is not in {module}: {absent[name]}."
        if _is_import():
            raise AbsentError(message)
        raise AbsentAttributeError(message)
    message = f"module {module!r} has no attribute {name!r}"
    raise AttributeError(message)


def _is_import() -> bool:
    """Return whether ``from ... import`` asks the innermost module's ``__getattr__``."""
    frame = sys._getframe(2)  # noqa: SLF001  # the one that called refuse()
    while frame.f_back is not None and frame.f_code.co_name in _GETTERS:
        frame = frame.f_back
    # importlib asks a package for the names of an import before the bytecode takes them.
    if frame.f_code.co_name == "_handle_fromlist":
        return True
    # A module that is no package is asked by the bytecode itself.
    at = frame.f_lasti
    return at >= 0 and frame.f_code.co_code[at] == _IMPORT_FROM


def refuse_names(module: str, absent: str | Mapping[str, str]) -> Callable[[str], object]:
    """Return a ``__getattr__`` that refuses names which are not here.

    Args:
        module: The module's ``__name__``.
        absent: Why names are not here, by name; of a module without any, what to do instead.
    """

    def refuse_name(name: str) -> object:
        # What begins so is what Python itself looks for.
        instead = {name: absent} if isinstance(absent, str) and not name.startswith("__") else {}
        refuse(module, name, instead if isinstance(absent, str) else absent)

    return refuse_name


def add_absent_modules(package: str, absent: Mapping[str, str]) -> None:
    """Let imports of modules of upstream's, and of all below them, raise AbsentError.

    Args:
        package: The ``__name__`` of the package that upstream has them in.
        absent: What to do instead, by the module's name in the package, with dots.
    """
    for name, instead in absent.items():
        full = f"{package}.{name}"
        sys.modules.setdefault(full, _AbsentModule(full, instead))


def refuse_other_modules(package: str, guide: str) -> None:
    """Let imports of any other module below a package raise AbsentError, which names the guide.

    Args:
        package: The ``__name__`` of a package with the interface of another project.
        guide: The page that lists what the package has.
    """
    # A package that is imported again has one finder still.
    finders = [f for f in sys.meta_path if not (isinstance(f, _Last) and f.package == package)]
    sys.meta_path[:] = [*finders, _Last(package, guide)]


class _Last(MetaPathFinder):
    """The finder of a package's modules that no other finder has."""

    def __init__(self, package: str, guide: str) -> None:
        self.package, self._guide = package, guide

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        del path, target
        if fullname.startswith(f"{self.package}.") and is_wanted(fullname):
            message = f"{fullname} is not here: {self._guide} lists what {self.package} has."
            raise AbsentError(message)


def is_wanted(fullname: str) -> bool:
    """Return whether the ``find_spec`` of a finder, which calls this, is asked by an import.

    Who asks ``importlib.util.find_spec`` whether a module exists gets None, as for any other. Names
    that begin with "_" are Python's, as ``__main__``.
    """
    is_pythons = fullname.rpartition(".")[2].startswith("_")
    # Frames from here: this function, the finder's ``find_spec``, importlib's ``_find_spec``.
    caller = sys._getframe(3).f_code.co_name  # noqa: SLF001
    return caller.startswith("_find_and_load") and not is_pythons


class _AbsentModule(ModuleType):
    """A module without names, whose submodules nobody finds either."""

    def __init__(self, name: str, instead: str) -> None:
        super().__init__(name, f"Not here: {instead}.")
        # As of a package: Python looks for submodules in ``__path__``, which raises the error.
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__ = _NoSubmodules(name, instead)
        self._instead = instead

    def __getattr__(self, name: str) -> object:
        # What looks through all modules asks for such names.
        refuse(self.__name__, name, {} if name.startswith("_") else {name: self._instead})


class _NoSubmodules(list[str]):
    """The places of an absent module's submodules: who looks for one in them is told."""

    def __init__(self, module: str, instead: str) -> None:
        super().__init__()
        self._message = f"Modules of {module} are not here: {instead}."

    def __iter__(self) -> Iterator[str]:
        raise AbsentError(self._message)
