"""`tensorstow inspect`: what a store has in it. Works while its run is live."""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tensorstow.base.sizes import format_bytes
from tensorstow.store.by_rank import stores_in
from tensorstow.store.survey import FileFacts, Survey, survey

_LABEL_COLUMNS = 13


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="the store's first directory")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead, or a list for ranks"
    )


def run(given: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    directories = stores_in(given.directory)
    found = [survey(directory) for directory in directories]
    if given.json:
        facts = [asdict(each) for each in found]
        several = directories != [given.directory]
        print(json.dumps(facts if several else facts[0], indent=2, default=str))
        return 0
    for each in found:
        _print(each)
    return 0


def _print(found: Survey) -> None:
    console = Console()
    for label, text in _lines(found):
        console.print(f"[bold]{label:<{_LABEL_COLUMNS}}[/]", end="")
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    if found.generations:
        console.print(generations_table(found))


def generations_table(found: Survey) -> Table:
    """Return the kept generations as a table, oldest first."""
    table = Table("generation", "step", "committed", "snapshots", "chunks", "bytes")
    for summary in found.generations:
        table.add_row(
            str(summary.number),
            str(summary.step),
            time.strftime("%F %T", time.localtime(summary.created)),
            escape(", ".join(summary.names)),
            str(summary.chunk_count),
            format_bytes(summary.bytes),
        )
    return table


def _lines(found: Survey) -> list[tuple[str, str]]:
    lines = [
        ("store", f"{found.directory}"),
        ("run", f"{found.run}, format {found.format}, by tensorstow {found.writer}"),
        ("held", f"by {found.holder}" if found.holder else "by nobody"),
        *(("file", _describe(file)) for file in found.files),
    ]
    if found.layout is None:
        return [*lines, ("generations", "none: nothing is committed yet")]
    layout = found.layout
    return [
        *lines,
        ("elements", f"{layout.elements:,} in {layout.chunks} chunks"),
        *(("per element", shape) for shape in layout.shapes),
        *((name, str(note)) for name, note in layout.notes.items()),
    ]


def _describe(file: FileFacts) -> str:
    if file.bytes is None or file.free_bytes is None:
        return f"{file.path} is gone"
    used, free = format_bytes(file.used_bytes), format_bytes(file.free_bytes)
    return f"{file.path}: {format_bytes(file.bytes)}, {used} kept, {free} free or in use by the run"
