"""Gather the pages and pictures of the site in one folder, for Sphinx: `make docs`.

Beside docs/ these are files of the root, and pages of what code has: commands, keys of DeepSpeed's
configuration, keywords of ColossalAI's classes, modules, decisions. Links between files are written
as they are in the repository, where people read them too; here they are moved to where the site has
the pages.
"""

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from inspect import Parameter
from pathlib import Path, PurePosixPath
from typing import Any

from architecture import modules

from tensorstow.cli.main import make_parser
from tensorstow.colossalai.booster import plugin
from tensorstow.colossalai.zero import GeminiDDP, GeminiOptimizer
from tensorstow.deepspeed.config.settings import KEYS
from tensorstow.doorkit.keyword_table import defaults_of, table_of

ROOT = Path(__file__).resolve().parent.parent
MOVED = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/results/table.md": "figures.md",
}
"""Files of the repository outside of docs/, and where the site has them."""
FOLDERS = {"docs/adr": "adr/index.md"}
"""Folders that pages link to, and the pages that list them."""
PEERS = {
    "torch fused": "torch's fused AdamW",
    "torch composition": "torch's operations",
    "composition in tiles": "torch's operations",
    "DeepSpeed": "DeepSpeed",
    "TensorNVMe": "TensorNVMe",
    "cpu_offload": "accelerate",
    "disk_offload": "accelerate",
    "FSDP2": "torch's FSDP2",
    "fio": "fio",
}
"""What a figure is named by, and whose code that is."""
PLACERS = (GeminiDDP, GeminiOptimizer)
"""The classes of ColossalAI that place a model without a booster."""
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(#[^)\s]*)?(?=\))")
"""The target of a link to another file."""


def gather(folder: Path) -> None:
    """Write all pages to ``folder``, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    docs = {
        str(file.relative_to(ROOT)): str(file.relative_to(ROOT / "docs"))
        for file in sorted((ROOT / "docs").rglob("*.md"))
    }
    for source, target in {**docs, **MOVED}.items():
        _write(folder / target, moved((ROOT / source).read_text("utf-8"), source, target))
    shutil.copytree(ROOT / "docs/images", folder / "images")
    home = folder / "index.md"
    _write(home, home.read_text("utf-8") + (ROOT / "docs/contents.txt").read_text("utf-8"))
    for target, lines in (
        ("adr/index.md", decisions()),
        ("comparison.md", comparison()),
        ("reference/commands.md", commands()),
        ("reference/deepspeed-keys.md", keys()),
        ("reference/colossalai-keywords.md", keywords()),
        ("modules.md", modules()),
    ):
        _write(folder / target, "\n".join(lines) + "\n")


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")


def moved(text: str, source: str, target: str) -> str:
    """Return a page with its links to other files as the site has them.

    Args:
        text: The page, in Markdown.
        source: Its path in the repository.
        target: Its path in the site.
    """

    def of(match: re.Match[str]) -> str:
        path = _normal(PurePosixPath(source).parent / match[1])
        there = {**MOVED, **FOLDERS}.get(path) or path.removeprefix("docs/")
        up = [".."] * (len(PurePosixPath(target).parts) - 1)
        return "/".join([*up, there]) + (match[2] or "")

    return LINK.sub(of, text)


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def decisions() -> Iterator[str]:
    """Yield the page that lists the decisions."""
    yield from ("# Decisions", "", "What would surprise a newcomer, and why it is so.", "")
    yield from ("```{toctree}", ":maxdepth: 1", "")
    yield from (file.stem for file in sorted((ROOT / "docs/adr").glob("0*.md")))
    yield "```"


def commands() -> Iterator[str]:
    """Yield a page of what `tensorstow --help` and `tensorstow COMMAND --help` print."""
    parser = make_parser()
    yield from ("# Commands", "", "```text", parser.format_help().rstrip(), "```")
    actions = parser._actions  # noqa: SLF001  # argparse offers no other way
    (found,) = (a for a in actions if isinstance(a, argparse._SubParsersAction))  # noqa: SLF001
    for name, command in found.choices.items():
        yield from ("", f"## {name}", "", "```text", command.format_help().rstrip(), "```")


def keys() -> Iterator[str]:
    """Yield a page of all keys of a DeepSpeed configuration."""
    yield from ("# Keys of a DeepSpeed configuration", "")
    yield "What each does here. A refused key is an error with any value but the one that is off."
    yield from ("", "| key | values | | |", "|---|---|---|---|")
    for key in KEYS.values():
        cells = (f"`{key.path}`", key.kind.allowed, key.support.value, key.note)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def keywords() -> Iterator[str]:
    """Yield a page of all keywords of ColossalAI's classes that place models."""
    yield from ("# Keywords of ColossalAI's classes", "")
    yield "What each does here. A keyword with no meaning changes nothing, and a log line says why."
    yield "A refused one is an error with any value but its default."
    for cls in (*(vars(plugin)[name] for name in plugin.__all__ if name != "Plugin"), *PLACERS):
        yield from ("", f"## {cls.__name__}", "", "| keyword | default | | |", "|---|---|---|---|")
        table = table_of(cls)
        for name, default in defaults_of(cls).items():
            note = table[name].note.replace("``", "`")
            cells = (f"`{name}`", _cell(default), table[name].support.value, note)
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _cell(default: object) -> str:
    return "" if default is Parameter.empty else f"`{default!r}`"


def comparison() -> Iterator[str]:
    """Yield the page of what was measured beside other projects' code, and of nothing else."""
    yield from ("# Comparison", "")
    yield "What was measured beside other projects' code. Each figure is a ratio of medians of one"
    yield "run, in which both took turns; what is not listed was not measured. In"
    yield "[figures](figures.md) are all others."
    for path in sorted((ROOT / "benchmarks/results").glob("*.json")):
        document = json.loads(path.read_text("utf-8"))
        rows = [row for row in document["figures"] if row["measured"] is not None and _peer_in(row)]
        if rows:
            machine = ", ".join(f"{key} {value}" for key, value in document["machine"].items())
            command = f"python benchmarks/run.py {document['subject']}"
            yield from (
                "",
                f"## {document['subject']}",
                "",
                f"`{command}`: {document['pairs']} pairs;",
            )
            yield from (f"{machine}.", "", "| figure | beside | measured |", "|---|---|---|")
            for row in rows:
                yield f"| {row['name']} | {_peer_in(row)} | {row['measured']:.3g} {row['unit']} |"


def _peer_in(row: Mapping[str, Any]) -> str | None:
    """Return whose code a figure is of beside ours."""
    return next((peer for word, peer in PEERS.items() if word in row["name"]), None)


if __name__ == "__main__":
    gather(Path(sys.argv[1]))
