"""Tables of keywords: the check of a call, the log line, the docstring."""

import ast
import inspect
import logging
import textwrap
from typing import Any

import pytest

from tensorstow.base.errors import KeywordError, OptionError, StowError
from tensorstow.colossalai.booster.plugin import (
    GeminiPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from tensorstow.colossalai.zero import GeminiDDP, GeminiOptimizer
from tensorstow.doorkit.keyword_table import (
    Support,
    checks_keywords,
    defaults_of,
    honoured,
    log_without_effect,
    no_effect,
    refused,
    table_of,
)

TABLE = {
    "size": honoured("Bytes of a block."),
    **no_effect("nothing is pinned", "pin"),
    **refused("one rank has all", "ranks"),
}


@checks_keywords(TABLE)
class Sized:
    """Has a size.

    Raises:
        OptionError: More ranks.
    """

    def __init__(self, size: int, *, pin: bool = False, ranks: int = 1) -> None:
        """Note the size."""
        self.arguments = (size, pin, ranks)

    @checks_keywords(no_effect("it is always fast", "fast"))
    def fill(self, value: int, *, fast: bool = True) -> int:  # noqa: D417  # the table has it
        """Fill it.

        Args:
            value: The value.

        Returns:
            The value.
        """
        del fast
        return value


def test_other_values_are_refused_logged_or_taken(caplog: pytest.LogCaptureFixture) -> None:
    assert Sized(3, pin=False, ranks=1).arguments == (3, False, 1)
    assert not caplog.records
    assert Sized(size=3, pin=True).arguments == (3, True, 1)
    assert Sized(3).fill(7, fast=False) == 7
    assert caplog.messages == [
        "Sized: pin=True changes nothing: nothing is pinned",
        "Sized: fast=False changes nothing: it is always fast",
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    refusal = r"^ranks=2 was given to Sized: one rank has all\. Leave it out \(1\)\.$"
    with pytest.raises(OptionError, match=refusal):
        Sized(3, pin=True, ranks=2)
    assert len(caplog.records) == 2  # a refused call logs nothing
    with pytest.raises(KeywordError, match="Did you mean ranks="):
        Sized(3, rank=2)


def test_values_that_matter_later_are_logged_later(caplog: pytest.LogCaptureFixture) -> None:
    log_without_effect(Sized, "the CPU computes", pin=False, ranks=3)
    assert caplog.messages == ["Sized: ranks=3 changes nothing: the CPU computes"]


def test_the_signature_stays_and_the_docstring_has_every_keyword() -> None:
    assert (
        str(inspect.signature(Sized)) == "(size: int, *, pin: bool = False, ranks: int = 1) -> None"
    )
    assert defaults_of(Sized) == {"size": inspect.Parameter.empty, "pin": False, "ranks": 1}
    assert inspect.getdoc(Sized) == textwrap.dedent(
        """\
        Has a size.

        Args:
            size: Bytes of a block.
            pin: No effect: nothing is pinned.
            ranks: Refused unless 1: one rank has all.

        Raises:
            OptionError: More ranks."""
    )
    text = inspect.getdoc(Sized.fill) or ""
    assert "    value: The value.\n    fast: No effect: it is always fast.\n\nReturns:" in text
    assert text.endswith("\n\nRaises:\n    OptionError: An argument that cannot be used.")
    assert (inspect.getdoc(Sized) or "").count("Raises:") == 1


def test_a_table_of_other_names_is_an_error() -> None:
    with pytest.raises(StowError, match="__init__ has no width, as its table has"):

        @checks_keywords({"width": honoured("Columns.")})
        class Wide:
            def __init__(self, size: int) -> None:
                self.size = size


CLASSES: list[Any] = [
    *(GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin),
    *(GeminiDDP, GeminiOptimizer),
]


@pytest.mark.parametrize("cls", CLASSES)
def test_what_a_door_honours_is_used_and_nothing_else_is(cls: type) -> None:
    """A keyword that a constructor ignores without a word would be a silent no-op."""
    table = table_of(cls)
    assert set(table) == set(defaults_of(cls))
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(cls.__init__)))
    used = {
        node.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    module = inspect.getmodule(cls)
    for group in ("LOSS_SCALE", "_OF_PLUGIN", "_OF_TORCH"):  # those of arguments[name]
        used |= set(getattr(module, group, ())) if group in used else set()
    assert {name for name, word in table.items() if word.support is Support.HONOURED} == (
        used & set(table)
    )


@pytest.mark.parametrize("cls", CLASSES)
def test_every_refused_keyword_is_refused(cls: Any) -> None:  # noqa: ANN401
    needed = [None for default in defaults_of(cls).values() if default is inspect.Parameter.empty]
    for name, word in table_of(cls).items():
        if word.support is Support.REFUSED:
            with pytest.raises(OptionError, match=f"^{name}=.* was given to {cls.__name__}: "):
                cls(*needed, **{name: object()})
