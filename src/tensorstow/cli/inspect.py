"""`tensorstow inspect`: print what a run's directory holds, also while the run is live."""

import argparse
import time
from dataclasses import asdict

from rich.console import Console

from tensorstow.base.sizes import format_bytes, format_count
from tensorstow.cli.output import (
    by_rank,
    make_console,
    print_facts,
    print_json,
    print_table,
)
from tensorstow.store.inspect import DataFileInfo, StoreInfo, inspect_store
from tensorstow.store.rank_dirs import stores_in

_LABEL_COLUMNS = 13


def run(given: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    directories = stores_in(given.directory)
    found = [inspect_store(directory) for directory in directories]
    if given.json:
        print_json(by_rank([asdict(each) for each in found], directories, given.directory))
        return 0
    console = make_console()
    for each in found:
        print_facts(console, _lines(each), _LABEL_COLUMNS)
        if each.generations:
            print_generations(console, each)
    return 0


def print_generations(console: Console, found: StoreInfo) -> None:
    """Print the kept generations as a table, oldest first."""
    rows = [
        (
            str(summary.number),
            str(summary.step),
            time.strftime("%F %T", time.localtime(summary.created)),
            ", ".join(summary.names),
            str(summary.chunk_count),
            format_bytes(summary.bytes),
        )
        for summary in found.generations
    ]
    heads = ("generation", "step", "committed", "snapshots", "chunks", "bytes")
    print_table(console, heads, rows)


def _lines(found: StoreInfo) -> list[tuple[str, str]]:
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
        ("elements", f"{layout.elements:,} in {format_count(layout.chunks, 'chunk')}"),
        *(("per element", shape) for shape in layout.shapes),
        *((name, str(note)) for name, note in layout.notes.items()),
    ]


def _describe(file: DataFileInfo) -> str:
    if file.bytes is None or file.free_bytes is None:
        return f"{file.path} is gone"
    used, free = format_bytes(file.used_bytes), format_bytes(file.free_bytes)
    return f"{file.path}: {format_bytes(file.bytes)}, {used} kept, {free} free or in use by the run"
