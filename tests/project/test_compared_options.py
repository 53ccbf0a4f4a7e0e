"""``overlap=`` and ``update_on=`` are compared by value only where they enter."""

import ast
from collections import Counter

import pytest

from tree import ROOT

SOURCE = ROOT / "src" / "tensorstow"
OPTIONS = ("overlap", "update_on")
WORDS = {"backward", "hybrid"}
"""Values that no other option has: comparisons to them under any name count."""
ALLOWED = {
    "base/update_on.py": (4, "is_auto, meant, reaches_device, reaches_host, which others ask"),
    "planner/seconds.py": (1, "auto: a plan predicts the choice that a run makes by measuring"),
    "step/share_tuner.py": (1, "where the way to choose the share is made"),
}
"""The most comparisons of a module, and why it has them."""


def is_compared(node: ast.AST) -> bool:
    """Return whether an expression branches on the value of one of the options."""
    if isinstance(node, ast.Subscript):
        return ast.unparse(node.slice).endswith(OPTIONS)
    if isinstance(node, ast.Match):
        return ast.unparse(node.subject).endswith(OPTIONS)
    if not isinstance(node, ast.Compare):
        return False
    words = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant)} - {None}
    sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
    names_option = any(s.endswith(OPTIONS) or f"'{o}'" in s for s in sides for o in OPTIONS)
    return bool(words & WORDS or (names_option and words))


def test_options_are_compared_where_they_enter() -> None:
    compared = Counter(
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if is_compared(node)
    )
    assert compared <= Counter({path: most for path, (most, _) in ALLOWED.items()})


@pytest.mark.parametrize(
    "text",
    [
        'plan.overlap == "none"',
        'overlap in {None, "none"}',
        'options.get("overlap") != "forward"',
        'asked == "backward"',
        "_TABLE[self._update_on]",
        'match plan.overlap:\n    case "none":\n        pass',
    ],
)
def test_comparisons_are_seen(text: str) -> None:
    assert any(map(is_compared, ast.walk(ast.parse(text))))
    assert not any(map(is_compared, ast.walk(ast.parse("self.update_on is None"))))
