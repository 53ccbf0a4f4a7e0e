"""Tables of the keywords of another project's signature: what each does here, and why.

[Note: One table] A signature is Python's own, so that editors and ``inspect`` show it. A table has
what tensorstow does with its keywords, and each default stands in the signature alone. From both
come the check of a call, the lines of the log, the docstring's Args and the page of the guide.
"""

import functools
import inspect
import logging
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn, TypeVar

from tensorstow.base.errors import OptionError, StowError
from tensorstow.base.keywords import keywords_of, names_keywords

logger = logging.getLogger("tensorstow")

_Target = TypeVar("_Target", bound=Callable[..., Any])


class Support(Enum):
    """What tensorstow does with a keyword, or with a key of a configuration."""

    HONOURED = "honoured"
    NO_MEANING = "no meaning"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Keyword:
    """One keyword: a sentence on what it sets, or why it does nothing or is refused."""

    support: Support
    note: str

    def described(self, default: object) -> str:
        """Return the keyword's entry in a docstring."""
        if self.support is Support.HONOURED:
            return self.note
        if self.support is Support.NO_MEANING:
            return f"No effect: {self.note}."
        return f"Refused unless {default!r}: {self.note}."


Table = Mapping[str, Keyword]
_SECTIONS = frozenset({"Returns:", "Yields:", "Raises:"})
"""What follows the Args in a docstring."""
_RAISES = "Raises:\n    OptionError: An argument that cannot be used."


def honoured(meaning: str) -> Keyword:
    """Return a keyword that has its upstream meaning, as this sentence describes."""
    return Keyword(Support.HONOURED, meaning)


def no_effect(why: str, *names: str) -> dict[str, Keyword]:
    """Return keywords whose other values are logged, and change nothing for this reason."""
    return dict.fromkeys(names, Keyword(Support.NO_MEANING, why))


def refused(why: str, *names: str) -> dict[str, Keyword]:
    """Return keywords whose other values raise OptionError for this reason."""
    return dict.fromkeys(names, Keyword(Support.REFUSED, why))


def refused_call(name: str, why: str) -> Callable[..., NoReturn]:
    """Return a function, or a method, that raises OptionError whatever it is given."""

    def refuse(*_: object, **__: object) -> NoReturn:
        message = f"{name}() was called: {why}."
        raise OptionError(message)

    refuse.__name__ = name
    refuse.__doc__ = f"Refuse: {why}.\n\nRaises:\n    OptionError: Always."
    return refuse


def checks_keywords(table: Table) -> Callable[[_Target], _Target]:
    """Return a decorator that checks the calls of a method, or of a class, by a table.

    A call raises OptionError for a refused keyword that differs from its default, and logs a
    keyword without effect that does. The docstring's Args get the table's keywords, and it gets a
    section Raises if it has none.

    Args:
        table: The keywords, all of them in the signature.
    """

    def decorate(target: _Target) -> _Target:
        constructor: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
        checked = _checked(constructor, table)
        documented: Any = target if isinstance(target, type) else checked
        text = _documented(target.__doc__, table, defaults_of(target))
        documented.__doc__ = text if "\nRaises:\n" in text else f"{text.rstrip()}\n\n{_RAISES}"
        if isinstance(target, type):
            documented.__init__ = checked
            return target if keywords_of(target) is None else names_keywords(target)
        return documented  # type: ignore[no-any-return]

    return decorate


def describes(table: Table) -> Callable[[_Target], _Target]:
    """Return a decorator that adds those of a table's keywords that a function has to its Args."""

    def decorate(target: _Target) -> _Target:
        target.__doc__ = _documented(target.__doc__, table, defaults_of(target))
        return target

    return decorate


def table_of(cls: type) -> Table:
    """Return the table by which a class checks its constructor's keywords."""
    table: Table = cls.__init__.keyword_table  # type: ignore[misc]
    return table


def defaults_of(target: Callable[..., Any]) -> dict[str, object]:
    """Return the defaults of a signature by name; ``inspect.Parameter.empty`` if it has none."""
    return {name: p.default for name, p in inspect.signature(target).parameters.items()}


def log_without_effect(owner: type, why: str, **values: object) -> None:
    """Log those of a constructor's keywords that differ from their defaults, and change nothing."""
    defaults = defaults_of(owner)
    for name, value in values.items():
        if _differs(value, defaults[name]):
            _log(owner.__name__, name, value, why)


def _log(owner: str, name: str, value: object, why: str) -> None:
    logger.warning("%s: %s=%r changes nothing: %s", owner, name, value, why)


def _differs(value: object, default: object) -> bool:
    return value is not default and value != default


def _checked(function: Any, table: Table) -> Any:  # noqa: ANN401  # of any signature
    signature, defaults = inspect.signature(function), defaults_of(function)
    if unknown := table.keys() - defaults.keys():
        message = f"{function.__qualname__} has no {', '.join(sorted(unknown))}, as its table has."
        raise StowError(message)

    unsupported = {name for name, word in table.items() if word.support is not Support.HONOURED}

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # whatever the function takes
        owner = type(args[0]).__name__
        nondefaults = {
            name: value
            for name, value in signature.bind(*args, **kwargs).arguments.items()
            if name in unsupported and _differs(value, defaults[name])
        }
        for name, value in nondefaults.items():
            if table[name].support is Support.REFUSED:
                message = (
                    f"{name}={value!r} was given to {owner}: {table[name].note}. Leave it out"
                    f" ({defaults[name]!r})."
                )
                raise OptionError(message)
        for name, value in nondefaults.items():
            if table[name].support is Support.NO_MEANING:
                _log(owner, name, value, table[name].note)
        return function(*args, **kwargs)

    result: Any = checked
    result.keyword_table = table
    return result


def _documented(text: str | None, table: Table, defaults: Mapping[str, object]) -> str:
    """Return a docstring with the table's keywords at the end of its Args."""
    lines = inspect.cleandoc(text or "").splitlines()
    entries = [
        line
        for name in defaults
        if name in table
        for line in textwrap.wrap(
            f"{name}: {table[name].described(defaults[name])}",
            width=100,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
        )
    ]
    if "Args:" in lines:
        begin = lines.index("Args:")
        at = next((n for n in range(begin, len(lines)) if not lines[n]), len(lines))
    else:
        at = next((n for n, line in enumerate(lines) if line in _SECTIONS), len(lines))
        entries = ["", "Args:", *entries] if at == len(lines) else ["Args:", *entries, ""]
    return "\n".join([*lines[:at], *entries, *lines[at:]])


ADAM: Table = {
    "model_params": honoured("Parameters, named parameters, or parameter groups."),
    "lr": honoured("The learning rate."),
    "bias_correction": honoured("Whether the moments are corrected for their start at zero."),
    "betas": honoured("The decay rates of the first and the second moment."),
    "eps": honoured("Is added to the root of the second moment."),
    "weight_decay": honoured("The weight decay."),
    "amsgrad": honoured("Whether the running maximum of the second moment is used."),
    "adamw_mode": honoured("Whether the decay is decoupled (AdamW) instead of an L2 penalty."),
}
"""The keywords that Adam has in both projects' signatures."""
FP32_STATES = refused(
    'states are fp32; those of Adam have other sizes by state_format="bf16"',
    "fp32_optimizer_states",
)
"""The keyword by which DeepSpeed's optimizers keep smaller states."""
