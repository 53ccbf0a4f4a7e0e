"""Output of the commands: text that fits the terminal, or one JSON value."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

_NARROW = 60
"""Below this many columns a label gets its own line."""


class _Console(Console):
    """Rich's console, but a closed pipe raises an error instead of exiting with status 1."""

    def on_broken_pipe(self) -> NoReturn:
        """Leave the exit status to ``main``, which reserves 1 for damage and differences."""
        raise BrokenPipeError


def make_console(*, to_stderr: bool = False) -> Console:
    """Return a console for standard output, or standard error if the former is for JSON.

    A name such as ``mine:ok:`` is printed as it is, and not as a picture.
    """
    return _Console(stderr=to_stderr, emoji=False)


def print_json(value: object) -> None:
    """Print ``value``; paths become text."""
    print(json.dumps(value, indent=2, default=str))


def print_by_rank(values: Sequence[object], directories: Sequence[Path], asked: Path) -> None:
    """Print what ``--json`` prints: a list if ``asked`` has a store for each rank."""
    print_json(values[0] if list(directories) == [asked] else values)


def make_progress(console: Console) -> Progress:
    """Return a bar of tasks with the fields ``name`` and ``part``, which only a terminal shows."""
    columns = (
        TextColumn("{task.fields[name]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("[dim]{task.fields[part]}"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)


def print_facts(console: Console, facts: Iterable[tuple[str, str]], column: int) -> None:
    """Print labels and texts; one line each if the output is not a terminal.

    On a terminal long texts are wrapped in their column; nothing is cut off.
    """
    for label, text in facts:
        if not console.is_terminal:
            print_line(console, f"{label:<{column}}{text}")
        elif console.width < _NARROW:
            console.print(Text(label, style="bold", overflow="fold"))
            console.print(Padding(Text(text, overflow="fold"), (0, 0, 0, 2)))
        else:
            grid = Table.grid()
            grid.add_column(width=column, style="bold", no_wrap=True)
            grid.add_column(overflow="fold")
            grid.add_row(Text(label), Text(text))
            console.print(grid)


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print ``text`` without formatting or line breaks."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def print_table(
    console: Console,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers_from: int | None = None,
) -> None:
    """Print a table; if it is too wide, print its rows one below the other, with labels.

    Columns from ``numbers_from`` on are right-aligned.

    Lines are drawn only on a terminal: in a pipe they would disturb awk and grep.
    """
    table = Table(*heads, box=box.HEAVY_HEAD if console.is_terminal else None)
    for index, column in enumerate(table.columns):
        column.no_wrap = True
        if numbers_from is not None and index >= numbers_from:
            column.justify = "right"
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # rich takes [brackets] of a str for markup
    if fits(console, table):
        console.print(table)
        return
    widest = max(map(len, heads))
    for row in rows:
        console.print()
        named = zip(heads, row, strict=True)
        print_facts(console, [(head, cell) for head, cell in named if cell], widest + 2)


def format_rate(rate: float) -> str:
    """Return bytes per second as text, in decimal units."""
    if rate < 1e6:
        return f"{rate / 1e3:.0f} kB/s"
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.0f} MB/s"


def fits(console: Console, table: Table) -> bool:
    """Return whether ``table`` fits the width of the console."""
    unbounded = console.options.update(max_width=1 << 20)
    return console.measure(table, options=unbounded).maximum <= console.width
