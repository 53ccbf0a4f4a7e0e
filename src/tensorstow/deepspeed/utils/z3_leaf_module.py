"""``deepspeed.utils.z3_leaf_module``: modules whose parameters are gathered together.

Upstream gathers each module's own parameters as it is called, and hangs where ranks call different
ones, as experts are. Here the parameters of a whole block are gathered together, those of all its
experts among them. So every module in a block is such a leaf; what is set is noted for those who
ask, and changes nothing.
"""

import weakref
from collections.abc import Callable, Sequence

from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.doorkit.keyword_table import Table, describes, honoured

_LEAVES: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
LeafClasses = Sequence[type[nn.Module] | str]
_KEYWORDS: Table = {
    "model": honoured("A model, or a module."),
    "leaf_module_classes": honoured(
        "Classes, their names, or their names with the module's before them."
    ),
    "module_names": honoured("Names in ``model.named_modules()``."),
    "module_name_suffixes": honoured("What names in ``model.named_modules()`` end in."),
    "flag": honoured("False: the modules are taken from the leaves."),
    "raise_if_not_found": honoured("Whether it is an error that the model lacks one."),
}


@describes(_KEYWORDS)
def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether a module was set as a leaf."""
    return model in _LEAVES


@describes(_KEYWORDS)
def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the leaves in a model, in the order of ``model.modules()``."""
    return [module for module in model.modules() if module in _LEAVES]


@describes(_KEYWORDS)
def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: LeafClasses, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Set the modules of some classes as leaves.

    Returns:
        The modules.

    Raises:
        OptionError: The model has none.
    """
    modules = _of_classes(model, leaf_module_classes, strict=raise_if_not_found)
    _LEAVES.update(modules)
    return modules


@describes(_KEYWORDS)
def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Set modules as leaves by their names.

    Returns:
        The modules, and the names that the model has not.

    Raises:
        OptionError: The model has not all of them.
    """
    return _set_by(str.__eq__, model, module_names, (flag, raise_if_not_found))


@describes(_KEYWORDS)
def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Set modules as leaves by what their names end in.

    Returns:
        The modules, and the ends that no name has.

    Raises:
        OptionError: A module has none of these names.
    """
    return _set_by(str.endswith, model, module_name_suffixes, (flag, raise_if_not_found))


@describes(_KEYWORDS)
def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: LeafClasses, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the modules of some classes from the leaves.

    Returns:
        The modules that are no leaves any more.

    Raises:
        OptionError: The model has none.
    """
    modules = _of_classes(model, leaf_module_classes, strict=raise_if_not_found)
    _LEAVES.difference_update(modules)
    return modules


def _set_by(
    matches: Callable[[str, str], bool],
    model: nn.Module,
    wanted: Sequence[str],
    flags: tuple[bool, bool],
) -> tuple[list[nn.Module], list[str]]:
    """Set the modules whose names match; ``flags``: whether as leaves, and whether all must."""
    is_leaf, must_all = flags
    named = list(model.named_modules())
    by_text = {text: [m for name, m in named if matches(name, text)] for text in wanted}
    missing = [text for text, modules in by_text.items() if not modules]
    if missing and must_all:
        message = (
            f"Modules {missing} were to be leaves, and the model has none of these names. Pass"
            " names of model.named_modules()."
        )
        raise OptionError(message)
    matching = list(dict.fromkeys(m for modules in by_text.values() for m in modules))
    (_LEAVES.update if is_leaf else _LEAVES.difference_update)(matching)
    return matching, missing


def _of_classes(model: nn.Module, classes: LeafClasses, *, strict: bool) -> list[nn.Module]:
    modules = [m for m in model.modules() if _is_one_of(m, classes)]
    if strict and not modules:
        message = (
            f"Leaves of {list(classes)} were requested, and the model has no module of these"
            " classes. Pass classes of its modules."
        )
        raise OptionError(message)
    return modules


def _is_one_of(module: nn.Module, classes: LeafClasses) -> bool:
    kind = type(module)
    names = {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}
    return any(c in names if isinstance(c, str) else isinstance(module, c) for c in classes)
