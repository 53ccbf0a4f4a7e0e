"""Write the tables of modules in ARCHITECTURE.md, from the first lines of the modules' docstrings.

`make format` runs it, and a test compares.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "ARCHITECTURE.md"
SOURCE = ROOT / "src" / "tensorstow"
BEGIN, END = "<!-- written by tools/architecture.py -->\n", "<!-- end of what it writes -->\n"
LAYERS = (
    *("base", "io", "memory", "tensors", "nn", "formats", "store", "states", "step", "activations"),
    *("losses", "checkpoint", "report", "optim"),
    *("planner", "fsdp", "measure", "doorkit", "deepspeed", "colossalai"),
    *("integrations", "tensornvme", "cli"),
)
"""The packages, lowest first."""


def first_line(file: Path) -> str:
    """Return the first sentence of a module's docstring, as Markdown."""
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")


def tables() -> str:
    """Return a heading, a sentence and a table for each package."""
    lines: list[str] = []
    for layer in LAYERS:
        for init in sorted((SOURCE / layer).rglob("__init__.py")):
            folder = init.parent
            lines += [f"### `{folder.relative_to(SOURCE)}`", "", first_line(init), ""]
            modules = sorted(p for p in folder.glob("*.py") if p != init)
            if modules:
                lines += ["| module | what it does |", "|---|---|"]
                lines += [f"| `{module.stem}` | {first_line(module)} |" for module in modules]
                lines.append("")
    return "\n".join(lines) + "\n"


def written(text: str) -> str:
    """Return ``text`` with new tables between the two marks."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{tables()}{END}{after}"


if __name__ == "__main__":
    FILE.write_text(written(FILE.read_text()))
