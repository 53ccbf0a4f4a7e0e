"""What a mutation makes of the source, and which calls need one."""

import ast
from collections.abc import Iterator
from pathlib import Path

from mutations.table import Mutation

SOURCE = Path(__file__).parents[2] / "src" / "tensorstow"
_CALLS = frozenset(
    {"record_event", "record_stream", "synchronize", "wait_event", "wait_stream", "query"}
)
_OF_LINKS = frozenset({"join"})  # strings join too
_INDIRECT = frozenset({"wait", "join", "wait_for", "wait_for_copies"})
_DRIVES_DEVICES = ("step/", "fsdp/")
"""Folders in which these calls lead to the others."""
_KEYWORDS = frozenset({"non_blocking", "pin_memory"})
_ELSEWHERE = (
    # `synchronize` and `query` are an optimizer's, a writer's or SQLite's.
    *("cli/", "tensornvme/", "store/", "optim/generic/"),
    # `pin_memory` is an argument of torch's DataLoader, as the caller gives it.
    *("colossalai/booster/plugin/plugin_base.py", "deepspeed/runtime/dataloader.py"),
    # And of a tensor that scripts ask for and fill themselves.
    "deepspeed/ops/aio.py",
    # They wait for other processes, which no mutation reaches (test_shared_weights has late ranks).
    *("fsdp/gradient_reduction.py", "fsdp/shared_weights.py"),
    # And of Gemini's, where it changes nothing.
    *("colossalai/booster/plugin/gemini_plugin.py", "colossalai/zero/gemini/gemini_ddp.py"),
    # `synchronize` is there for scripts to call: nothing here waits by it.
    *("colossalai/accelerator.py", "deepspeed/accelerator/real_accelerator.py"),
)


def mutated(mutation: Mutation) -> str:
    """Return the source with ``mutation``."""
    text = (SOURCE / mutation.path).read_text()
    assert text.count(mutation.code) == 1, f"{mutation.path} has not once {mutation.code!r}"
    return text.replace(mutation.code, mutation.instead)


def lines_of(mutation: Mutation) -> range:
    """Return which lines ``mutation`` changes, from 1."""
    text = (SOURCE / mutation.path).read_text()
    at = text.index(mutation.code)
    first = text.count("\n", 0, at) + 1
    return range(first, first + mutation.code.rstrip("\n").count("\n") + 1)


def waits() -> Iterator[tuple[str, int]]:
    """Yield the path and line of each call that orders a device's work, or takes pinned memory."""
    for file in sorted(SOURCE.rglob("*.py")):
        path = file.relative_to(SOURCE).as_posix()
        if path.startswith(_ELSEWHERE):
            continue
        text = file.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and (
                _orders(node) or (path.startswith(_DRIVES_DEVICES) and _is_indirect(node))
            ):
                line = node.func.end_lineno
                assert line is not None
                yield path, line


def _orders(call: ast.Call) -> bool:
    if any(keyword.arg in _KEYWORDS for keyword in call.keywords):
        return True
    if isinstance(call.func, ast.Name):
        return call.func.id in {"synchronize", "PinnedBlock"}
    if not isinstance(call.func, ast.Attribute):
        return False
    name, of = call.func.attr, call.func.value
    owner = of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else ""
    return name in _CALLS or (name in _OF_LINKS and owner.strip("_") == "link")


def _is_indirect(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute) or isinstance(call.func.value, ast.Constant):
        return False  # text joins too
    return call.func.attr in _INDIRECT
