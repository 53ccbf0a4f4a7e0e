"""Errors for keywords that a function does not have, with the one that was probably meant.

[Note: Deprecation] An old name of the public interface works for one minor release, in which each
use of it issues a DeprecationWarning with the new name. The next minor release removes it. Nothing
inside uses an old name: tests make these warnings errors.
"""

import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from tensorstow.base.errors import KeywordError, OptionError

_Target = TypeVar("_Target", bound=Callable[..., Any])
RENAMED: Mapping[str, Mapping[str, str]] = {
    "Plan": {
        "units": "parameter_units",
        "buffer_pool_bytes": "weight_ram_budget",
        "device_limit": "device_budget",
    },
}
"""For a function or class, each old keyword and the new one."""
RENAMED_VALUES: Mapping[str, Mapping[str, str]] = {"checkpoints": {"ticket": "reference"}}
"""For a keyword of any function or class, each old value and the new one."""


def names_keywords(target: _Target) -> _Target:
    """Have a function, or a class's constructor, raise KeywordError for an unknown keyword.

    Old keywords and values become new ones, with a warning ([Note: Deprecation]). A class is
    returned itself; a function that takes any keyword raises OptionError.
    """
    cls: Any = target
    if isinstance(target, type):
        cls.__init__ = _checked(cls.__init__, target.__name__, of_class=True)
        return target
    checked: Any = _checked(target, target.__name__, of_class=False)
    return checked  # type: ignore[no-any-return]


def keywords_of(function: Callable[..., Any]) -> list[str] | None:
    """Return the keywords that a function or class has; None: it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return None
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in named and p.name != "self"]


def keyword_only(function: Callable[..., Any]) -> list[str]:
    """Return the names of the keyword-only parameters of a function or class."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind == p.KEYWORD_ONLY]


def refuse_unknown_keywords(name: str, passed: Iterable[str], accepted: Iterable[str]) -> None:
    """Raise KeywordError if a keyword that ``name`` was called with is not accepted."""
    names = list(accepted)
    for keyword in passed:
        if keyword not in names:
            meant = difflib.get_close_matches(keyword, names, n=1)
            advice = f"Did you mean {meant[0]}=?" if meant else f"It has {', '.join(names)}."
            message = f"{name}() was called with {keyword}=, which it does not have. {advice}"
            raise KeywordError(message)


def with_new_names(owner: str, keywords: Mapping[str, Any], stacklevel: int = 3) -> dict[str, Any]:
    """Return the keywords of a call by their new names, and warn for each old one.

    Args:
        owner: The name of the function or class.
        keywords: What it was called with.
        stacklevel: As in ``warnings.warn``. Default: 3, whoever called the caller.

    Raises:
        KeywordError: A keyword by both of its names.
    """
    renamed: dict[str, Any] = {}
    for name, value in keywords.items():
        new = RENAMED.get(owner, {}).get(name, name)
        if new != name:
            if new in keywords:
                message = (
                    f"{owner}() was called with {name}= and {new}=, its new name. Pass {new}=."
                )
                raise KeywordError(message)
            warn_renamed(f"{owner}({name}=)", f"{new}=", stacklevel + 1)
        renamed[new] = value
        if isinstance(value, str) and value in RENAMED_VALUES.get(new, ()):
            renamed[new] = RENAMED_VALUES[new][value]
            warn_renamed(f'{new}="{value}"', f'{new}="{renamed[new]}"', stacklevel + 1)
    return renamed


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Issue the DeprecationWarning of an old name ([Note: Deprecation])."""
    message = f"{old} is deprecated, and the next minor release removes it. Use {new}."
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)


def _checked(function: Callable[..., Any], owner: str, *, of_class: bool) -> Callable[..., Any]:
    accepted = keywords_of(function)
    if accepted is None:
        message = f"{function.__name__} takes any keyword: let what it passes them to name its own."
        raise OptionError(message)
    names, old = frozenset(accepted), frozenset(RENAMED.get(owner, ()))

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # whatever the function takes
        if not (old.isdisjoint(kwargs) and RENAMED_VALUES.keys().isdisjoint(kwargs)):
            kwargs = with_new_names(owner, kwargs)
        if not names.issuperset(kwargs):
            name = type(args[0]).__name__ if of_class else owner
            refuse_unknown_keywords(name, kwargs, accepted)
        return function(*args, **kwargs)

    return checked
