"""Errors for keywords that a function does not have, with the one that was probably meant."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from tensorstow.base.errors import KeywordError, OptionError

_Target = TypeVar("_Target", bound=Callable[..., Any])


def names_keywords(target: _Target) -> _Target:
    """Have a function, or a class's constructor, raise KeywordError for an unknown keyword.

    A class is returned itself; a function that takes any keyword raises OptionError.
    """
    cls: Any = target
    if isinstance(target, type):
        cls.__init__ = _checked(cls.__init__, of_class=True)
        return target
    checked: Any = _checked(target, of_class=False)
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


def _checked(function: Callable[..., Any], *, of_class: bool) -> Callable[..., Any]:
    accepted = keywords_of(function)
    if accepted is None:
        message = f"{function.__name__} takes any keyword: let what it passes them to name its own."
        raise OptionError(message)
    names = frozenset(accepted)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # whatever the function takes
        if not names.issuperset(kwargs):
            name = type(args[0]).__name__ if of_class else function.__name__
            refuse_unknown_keywords(name, kwargs, accepted)
        return function(*args, **kwargs)

    return checked
