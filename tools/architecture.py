"""Write the table of packages in ARCHITECTURE.md, from their docstrings and import-linter's layers.

`make format` runs it, and a test compares. The site has a page of all modules.
"""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "ARCHITECTURE.md"
SOURCE = ROOT / "src" / "tensorstow"
BEGIN, END = "<!-- written by tools/architecture.py -->\n", "<!-- end of what it writes -->\n"


def layers() -> list[list[str]]:
    """Return the packages, the highest first; those that may not import each other in one list."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (rows,) = (c["layers"] for c in settings["contracts"] if c["type"] == "layers")
    return [[name.removeprefix("tensorstow.") for name in row.split(" | ")] for row in rows]


def first_line(file: Path) -> str:
    """Return the first sentence of a module's docstring, as Markdown."""
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")


def packages() -> str:
    """Return a table with a row for each package."""
    lines = ["| package | what is in it |", "|---|---|"]
    for row in layers():
        lines += [f"| `{name}` | {first_line(SOURCE / name / '__init__.py')} |" for name in row]
    return "\n".join(lines) + "\n"


def modules() -> Iterator[str]:
    """Yield the page of all modules: a heading, a sentence and a table for each package."""
    yield from ("# Modules", "", "The first line of each module, by package, highest first.", "")
    for layer in (name for row in layers() for name in row):
        for init in sorted((SOURCE / layer).rglob("__init__.py")):
            yield from (f"## `{init.parent.relative_to(SOURCE)}`", "", first_line(init), "")
            files = sorted(path for path in init.parent.glob("*.py") if path != init)
            if files:
                yield from ("| module | what it does |", "|---|---|")
                yield from (f"| `{file.stem}` | {first_line(file)} |" for file in files)
                yield ""


def written(text: str) -> str:
    """Return ``text`` with a new table between the two marks."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{packages()}\n{END}{after}"


if __name__ == "__main__":
    FILE.write_text(written(FILE.read_text()))
