"""Words that were retired as names stay retired: each has a standard word in its place."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tree import ROOT

RETIRED = {
    "board": "coordinator",
    "cargo": "transfer",
    "conductor": "scheduler",
    "confine": "bind",
    "course": "config",
    "deliver": "publish, upload",
    "ferry": "device feed",
    "landed": "complete",
    "lend": "acquire, pin",
    "lendable": "acquirable",
    "lent": "acquired, pinned",
    "lessor": "pager",
    "mirror": "host weight",
    "shelf": "pooled buffer",
    "stowage": "policy",
    "tenure": "alias",
    "trip": "chunk in flight",
    "withhold": "mark unpublished",
}
"""Retired word: the word in its place. A plural counts as the word."""
RETIRED_NAMES = {
    "BoostedLife": "BoostedRun",
    "Draws": "RandomBits",
    "Nursery": "ForkServer",
    "tell_story": "run_killed",
    "_bought": "_budget_used",
    "_core": "_runtime",
    "_grant": "_pin_chunk",
    "_Granted": "_PinnedChunk",
    "a_call": "exclusive_call",
    "Beside": "OverlapWith",
    "Calls": "CallLock",
    "Core": "OptimizerRuntime",
    "device_updates": "device_updater",
    "DeviceUpdates": "DeviceUpdater",
    "Given": "UpdateUnderWay",
    "gradient_on_its_way": "gradient_and_event",
    "has_left": "has_offloaded_gradient",
    "is_settled": "is_final",
    "LEAVE": "ABORT_ADVICE",
    "leave_behind": "mark_stale",
    "OwnParams": "ParamFilter",
    "settle_or_give_up": "wait_idle_or_abandon",
    "take_gradient": "wait_for_gradient",
    "take_one": "start_one",
    "updated_here": "updates_on_host",
    "updated_there": "updates_on_device",
    "UpdateSides": "UpdateRouter",
    "WAYS_OUT": "RECOVERY_ADVICE",
    "works_of": "StepRow",
}
"""Retired names whose words are ordinary ones, whole: the name in each one's place."""
STANDARD = {"TensorBoardScalars"}
"""Names that have such a part in its ordinary meaning, beside those with "round_trip"."""

NOT_NOUNS = frozenset(
    "behind each found given here kept known made others own there told untold what where".split()  # noqa: SIM905  # one line
)
"""Pronouns and participles, which do not say what a variable is."""

_BEGINS = "|".join(f"(?<![A-Za-z]){word}|{word.title()}" for word in RETIRED)
_WORD = re.compile(rf"(?:{_BEGINS})s?(?![a-z])|\b(?:{'|'.join(RETIRED_NAMES)})\b")
_LOWER = [word.lower() for word in (*RETIRED, *RETIRED_NAMES)]
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_NOT_CODE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)


def python_names(source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.string


def cpp_names(source: str) -> Iterator[str]:
    yield from re.findall(r"[A-Za-z_]\w*", _NOT_CODE.sub("", source))


def is_retired(name: str) -> bool:
    parts = {part.lower() for part in _PART.findall(name.replace("round_trip", ""))}
    return name in RETIRED_NAMES or (
        name not in STANDARD and any({word, word + "s"} & parts for word in RETIRED)
    )


def names_in(path: Path) -> Iterator[str]:
    source = path.read_text(encoding="utf-8")
    yield path.stem
    lower = source.lower()  # to look for words is quick, to look at every name is not
    if any(word in lower for word in _LOWER) and _WORD.search(source):
        yield from python_names(source) if path.suffix == ".py" else cpp_names(source)


def test_no_name_has_a_retired_word() -> None:
    files = [
        path
        for folder, ends in (
            ("src", "py"),
            ("tests", "py"),
            ("benchmarks", "py"),
            ("csrc", "cpp"),
            ("csrc", "h"),
        )
        for path in (ROOT / folder).rglob(f"*.{ends}")
        if path.name != "test_retired_names.py"
    ]
    assert files
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in set(names_in(path))
        if is_retired(name)
    }
    assert not found


def variables_in(source: str) -> Iterator[str]:
    """Yield the names of variables and fields that ``source`` assigns."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def test_variables_are_named_by_nouns() -> None:
    files = list((ROOT / "src").rglob("*.py"))
    assert files
    wrong = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in NOT_NOUNS.intersection(variables_in(path.read_text(encoding="utf-8")))
    }
    assert not wrong


def test_assigned_variables_are_seen() -> None:
    source = "a: int = 0\nfor b in c:\n    d = [e for e in f]\n    with g as h: pass"
    assert set(variables_in(source)) == set("abdeh")


@pytest.mark.parametrize(
    "name", ["lent_chunks", "LentChunk", "_trips", "Course", "set_lendable", "DeviceUpdates"]
)
def test_a_retired_name_is_found(name: str) -> None:
    assert is_retired(name)


@pytest.mark.parametrize(
    "name", ["round_trip", "equivalent", "strip", "dashboard", "talent", "measure_device_updates"]
)
def test_another_name_is_not(name: str) -> None:
    assert not is_retired(name)


def test_only_names_are_looked_at() -> None:
    assert list(python_names('a = "lent"  # a trip')) == ["a"]
    assert list(cpp_names('int a = b("lent"); // a trip')) == ["int", "a", "b"]
