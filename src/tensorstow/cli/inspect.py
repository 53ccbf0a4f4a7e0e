"""`tensorstow run inspect`: print what a run's directory holds, also while the run is live."""

import argparse
import time
from dataclasses import asdict

from rich.console import Console

from tensorstow.base.sizes import format_bytes, format_count
from tensorstow.cli.output import make_console, print_by_rank, print_facts, print_table
from tensorstow.store.inspect import DataFileInfo, StoreInfo, inspect_store
from tensorstow.store.rank_dirs import stores_in

_LABEL_COLUMNS = 13


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    directories = stores_in(options.directory)
    stores = [inspect_store(directory) for directory in directories]
    if options.json:
        print_by_rank([asdict(store) for store in stores], directories, options.directory)
        return 0
    console = make_console()
    for store in stores:
        print_facts(console, _lines(store), _LABEL_COLUMNS)
        if store.generations:
            print_generations(console, store)
    return 0


def print_generations(console: Console, store: StoreInfo) -> None:
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
        for summary in store.generations
    ]
    heads = ("generation", "step", "committed", "snapshots", "chunks", "bytes")
    print_table(console, heads, rows)


def _lines(store: StoreInfo) -> list[tuple[str, str]]:
    lines = [
        ("store", f"{store.directory}"),
        ("run", f"{store.run}, format {store.format}, by tensorstow {store.writer}"),
        ("held", f"by {store.holder}" if store.holder else "by nobody"),
        *(("file", _describe(file)) for file in store.files),
    ]
    if store.layout is None:
        return [*lines, ("generations", "none: nothing is committed yet")]
    layout = store.layout
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
