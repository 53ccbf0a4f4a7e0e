"""Report imports by name that import-linter cannot see: they could hide a cycle.

`make lint` runs it.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "tensorstow"
TABLES = {
    "__init__.py": "public names are imported when they are first used",
    "deepspeed/__init__.py": "public names are imported when they are first used",
    "deepspeed/name.py": "installs tensorstow.deepspeed under upstream's name",
    "cli/main.py": "a command imports what it runs",
    "measure/models.py": "a user names the module",
}
"""Modules whose imports by name come from a table of their own, and why they have one."""


def hidden_imports(source: Path) -> Iterator[str]:
    """Yield each call of ``import_module`` with another argument than an outside package's name."""
    for file in sorted(source.rglob("*.py")):
        if str(file.relative_to(source)) in TABLES:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else None
            name = function.id if isinstance(function, ast.Name) else name
            if name not in {"import_module", "__import__"}:
                continue
            module = node.args[0].value if isinstance(node.args[0], ast.Constant) else "tensorstow"
            if str(module).split(".")[0] == "tensorstow":
                yield f"{file.relative_to(source)}:{node.lineno}: use an import statement"


if __name__ == "__main__":
    sys.exit("\n".join(hidden_imports(SOURCE)) or 0)
