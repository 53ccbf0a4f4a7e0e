"""Files are opened by name through ``base/regular_file.py``, or the reason is listed here."""

import ast
import re
from collections.abc import Iterator

import pytest

from tree import ROOT

SOURCE = ROOT / "src" / "tensorstow"
FUNCTIONS = {
    *("open", "io.open", "os.open", "sqlite3.connect", "safe_open", "load_file", "save_file"),
    *("is_zipfile", "shutil.copyfile", "shutil.copy", "shutil.copy2", "os.truncate"),
    *("torch.load", "torch.save", "torch.from_file", "numpy.memmap", "np.memmap", "np.fromfile"),
}
METHODS = {"open", "read_text", "read_bytes", "write_text", "write_bytes"}
SYSTEM = "the kernel's own file, which no user can replace"
DIRECTORY = "O_DIRECTORY: nothing but a directory is opened"
STREAM = "torch writes to a stream that is open"
CHECKED = "check_regular() precedes it: a library opens the file by name"
NO_FILE = "a method of that name, which is no file's"
EMPTY = "a new file in a directory that was empty"
PAGE = "a page that a user names on the command line, who may mean a device or a pipe"
ALLOWED = {
    "base/cores.py": {"path.read_text": SYSTEM},
    "base/mounts.py": {"file.read_text": SYSTEM},
    "base/new_file.py": {"os.open": "O_TMPFILE, O_EXCL or O_DIRECTORY: a new file, or no file"},
    "base/regular_file.py": {"os.open": "the one that is used"},
    "checkpoint/quantized_weights.py": {"os.open": DIRECTORY},
    "checkpoint/torch_file.py": {"is_zipfile": CHECKED, "torch.load": CHECKED},
    "checkpoint/weight_files.py": {"os.open": "O_PATH, after check_regular()"},
    "cli/main.py": {"os.open": "/dev/null"},
    "cli/plan.py": {"options.html.write_text": PAGE},
    "cli/pull.py": {"Store.open": "a store's method, which opens its files by the helper"},
    "checkpoint/serialize.py": {"numpy.memmap": "its type alone"},
    "colossalai/checkpoint_io.py": {"load_file": CHECKED, "torch.save": STREAM},
    "deepspeed/checkpoint/ds_to_universal.py": {"torch.save": EMPTY, "shutil.copyfile": EMPTY},
    "deepspeed/checkpoint/saved_module.py": {"torch.save": STREAM},
    "deepspeed/checkpoint/sharded.py": {"torch.save": STREAM},
    "deepspeed/evaluation.py": {"save_file": "a new file of a random name"},
    "deepspeed/ops/aio.py": {"os.open": "/dev/fd: a descriptor that the caller has open"},
    "deepspeed/utils/zero_to_fp32.py": {"torch.save": STREAM},
    "fsdp/frozen_files.py": {"().read_text": SYSTEM},
    "integrations/stowed_trainer.py": {"torch.save": STREAM},
    "integrations/torchtitan.py": {"torch.load": "bytes in memory", "torch.save": "to memory"},
    "report/page.py": {"().read_text": "a file of this package"},
    "report/rss.py": {"_STATM.read_text": SYSTEM, "_STATUS.read_text": SYSTEM},
    "states/stored.py": {"Store.open": NO_FILE},
    "step/param_table.py": {"self.links.open": NO_FILE},
    "store/bounds.py": {"sqlite3.connect": "a database in memory"},
    "store/durability.py": {"os.open": DIRECTORY},
    "store/opening.py": {"disk.open": NO_FILE},
    "store/recovery.py": {"().open": "a new file in a directory that has just been made"},
    "store/schema.py": {"sqlite3.connect": CHECKED},
    "tensornvme/async_file_io.py": {"os.open": DIRECTORY},
}
"""Calls by file, and why each needs no check of its own."""


def dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` for such an expression, with () for other parts."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "()"


def names_of(tree: ast.AST) -> dict[str, str]:
    """Return what names that an import has changed stand for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname: a.name for a in node.names if a.asname}
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                found[name.asname or name.name] = whole if whole in FUNCTIONS else name.name
    return found


def opened(code: str) -> Iterator[str]:
    """Yield the calls, and other uses of the functions, that open a file by name."""
    tree = ast.parse(code)
    names = names_of(tree)
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        first, dot, rest = dotted(node).partition(".")
        name = f"{names.get(first, first)}{dot}{rest}"
        is_method = isinstance(node, ast.Attribute) and node.attr in METHODS and node in called
        if name in FUNCTIONS or is_method:
            yield name


def test_files_are_opened_by_one_helper_or_the_reason_is_known() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    found = {str(p.relative_to(SOURCE)): set(opened(p.read_text())) for p in files}
    assert {f: calls for f, calls in found.items() if calls} == {
        f: {*c} for f, c in ALLOWED.items()
    }


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("open(p)", "open"),
        ("import os\nos.open(p, 0)", "os.open"),
        ("from os import open as raw\nraw(p, 0)", "os.open"),
        ("path.read_bytes()", "path.read_bytes"),
        ("(a / b).open()", "().open"),
        ("import sqlite3 as s\ns.connect(p)", "sqlite3.connect"),
        ("from safetensors import safe_open as read\nread(p)", "safe_open"),
        ("from zipfile import is_zipfile\nread = partial(is_zipfile, p)", "is_zipfile"),
    ],
)
def test_an_opened_file_is_seen(code: str, name: str) -> None:
    assert list(opened(code)) == [name]


@pytest.mark.parametrize("code", ["open_regular(p)", "read_text(p)", "path.exists()", "a.open = 1"])
def test_nothing_else_is(code: str) -> None:
    assert not list(opened(code))


REMOVING = {
    "base/new_file.py": "a file that this process made, whose name it gives up",
    "base/regular_file.py": "the one that is used",
    "io/files.py": "a new file, in the block that names its directory",
    "store/manifest_copy.py": "recovery and copies name the manifest",
}
"""Modules that remove files without the helper, and why each may."""


def test_files_are_removed_by_one_helper_or_the_reason_is_known() -> None:
    files = {str(p.relative_to(SOURCE)): p.read_text() for p in SOURCE.rglob("*.py")}
    found = {file for file, code in files.items() if re.search(r"\.unlink\(|os\.remove\(", code)}
    assert found == REMOVING.keys()


def test_no_error_is_taken_for_a_name_that_is_free() -> None:
    """``os.path.lexists`` and ``exists`` do: ``is_there`` raises them."""
    code = {str(p.relative_to(SOURCE)): p.read_text() for p in SOURCE.rglob("*.py")}
    found = {file for file, text in code.items() if re.search(r"os\.path\.l?exists\(", text)}
    assert found == {"store/remote.py"}  # of a place that may be an address
