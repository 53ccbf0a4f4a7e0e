"""No code of ours opens a file in a way that runs what the file says.

Pickles are read by ``torch.load(weights_only=True)`` and by the one restricted unpickler.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tree import ROOT

RESTRICTED = Path("src/tensorstow/deepspeed/checkpoint/restricted_reader.py")
"""The one file that may subclass pickle's reader, and torch's reader of checkpoints."""
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
READERS = {"load", "loads", "open", "Unpickler", "read_pickle"}
YAML = {"load", "load_all", "full_load", "full_load_all", "unsafe_load", "unsafe_load_all"}
OF_TORCH = {"jit", "hub", "package", "export"}
DISTRIBUTED = {"FileSystemReader", "dcp_to_torch_save", "torch_save_to_dcp"}


def dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` for such an expression; empty for another."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def names_of(tree: ast.AST) -> dict[str, str]:
    """Return what imported names stand for, by their name in the file."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname: a.name for a in node.names if a.asname}
        elif isinstance(node, ast.ImportFrom):
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return found


def is_true(call: ast.Call, keyword: str) -> bool:
    given = [k.value for k in call.keywords if k.arg == keyword]
    return len(given) == 1 and isinstance(given[0], ast.Constant) and given[0].value is True


def objection(node: ast.AST, names: dict[str, str]) -> str | None:
    """Return what is wrong with a piece of code, if anything."""
    if isinstance(node, ast.keyword):
        value = node.value.value if isinstance(node.value, ast.Constant) else None
        wrong = {"weights_only": value is not True, "allow_pickle": value is not False}
        return f"{node.arg}=" if wrong.get(node.arg or "") else None
    if isinstance(node, ast.Name | ast.Attribute):
        first, _, rest = dotted(node).partition(".")
        whole = ".".join(filter(None, [names.get(first, first), rest]))
        module, _, name = whole.rpartition(".")
        is_reader = (
            (module.partition(".")[0] in MODULES and name in READERS)
            or (module == "yaml" and name in YAML)
            or (module.startswith("torch.") and module.split(".")[1] in OF_TORCH and name == "load")
            or name in DISTRIBUTED
            or (module.startswith("torch.distributed.checkpoint") and name == "load")
            or whole in {"eval", "exec", "builtins.eval", "builtins.exec", "numpy.load", "np.load"}
        )
        return whole if is_reader else None
    if isinstance(node, ast.Call):
        name = dotted(node.func)
        name = names.get(name, name)
        if name == "torch.load" and not is_true(node, "weights_only"):
            return "torch.load without weights_only=True"
    return None


def objections(code: str) -> Iterator[str]:
    tree = ast.parse(code)
    names = names_of(tree)
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        is_passed_on = names.get(dotted(node), dotted(node)) == "torch.load" and node not in called
        if found := "torch.load" if is_passed_on else objection(node, names):
            yield f"{getattr(node, 'lineno', 0)}: {found}"


@pytest.mark.parametrize("folder", ["src", "examples", "tools", "benchmarks"])
def test_no_file_runs_what_it_opens(folder: str) -> None:
    files = [p for p in sorted((ROOT / folder).rglob("*.py")) if p != ROOT / RESTRICTED]
    assert files
    found = {str(p.relative_to(ROOT)): list(objections(p.read_text())) for p in files}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.load(f)",
        "import torch\ntorch.load(f, weights_only=False)",
        "import torch\ntorch.load(f, weights_only=how)",
        "from torch import load as read\nread(f)",
        "io.load_checkpoint(f, weights_only=False)",
        "import pickle\npickle.load(f)",
        "import pickle as p\np.loads(b)",
        "from pickle import Unpickler\nclass A(Unpickler): pass",
        "import shelve\nshelve.open('a')",
        "import marshal\nmarshal.loads(b)",
        "import yaml\nyaml.load(f, Loader=yaml.Loader)",
        "from yaml import unsafe_load\nunsafe_load(f)",
        "import numpy as np\nnp.load(f)",
        "read_array(f, allow_pickle=True)",
        "eval(text)",
        "exec(text)",
        "import torch\ntorch.jit.load(f)",
        "from torch.distributed.checkpoint.filesystem import FileSystemReader\nFileSystemReader(f)",
        "import torch.distributed.checkpoint as dcp\ndcp.FileSystemReader(f)",
        "from torch.distributed.checkpoint.state_dict_loader import load\nload(x, checkpoint_id=f)",
        "import torch\nread = functools.partial(torch.load, mmap=True)",
    ],
)
def test_what_runs_code_is_found(code: str) -> None:
    assert list(objections(code))


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.load(f, weights_only=True)",
        "import json\njson.load(f)",
        "import yaml\nyaml.safe_load(f)",
        "read_array(f, allow_pickle=False)",
        "model.eval()",
        "from pickle import UnpicklingError\nUnpicklingError()",
    ],
)
def test_what_runs_nothing_is_not(code: str) -> None:
    assert not list(objections(code))
