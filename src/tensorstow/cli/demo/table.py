"""The one table of the demo: figures down, rows of the demo across."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from tensorstow.cli.demo.result import RowResult, by_key, steady
from tensorstow.cli.demo.rows import ROWS

NONE = "\N{EN DASH}"
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """One figure for every row."""

    label: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """Figures that belong together."""

    title: str
    lines: tuple[Line, ...]


def sections(results: Sequence[RowResult]) -> list[Section]:
    """Return all figures, formatted."""
    known = by_key(results)
    ordered = [known[row.key] for row in ROWS]

    def line(label: str, cell: Callable[[RowResult], str]) -> Line:
        return Line(label, tuple(cell(result) for result in ordered))

    return [
        Section("Result", (*_loss_lines(ordered), line("SHA-256, parameters", _short_checksum))),
        Section(
            "Seconds",
            (
                line("first step", lambda r: f"{r.step_seconds[0]:.2f}"),
                line("later steps, median", lambda r: _seconds(steady(r.step_seconds), 2)),
                line("first opt.step()", lambda r: f"{r.optimizer_seconds[0]:.3f}"),
                line("later ones, median", lambda r: _seconds(steady(r.optimizer_seconds), 3)),
            ),
        ),
        Section(
            "Process memory, MiB",
            (
                line("peak RSS", lambda r: _mib(r.peak_rss_bytes)),
                line("RSS at the end", lambda r: _mib(r.end_rss_bytes)),
                line("end, below torch", lambda r: _saved(r, known["torch"])),
            ),
        ),
        Section(
            "Optimizer states, MiB",
            (
                line("in RAM, predicted", lambda r: _mib(r.predicted.ram_bytes)),
                line("in RAM, measured", lambda r: _mib(r.measured.ram_bytes)),
                line("on disk, predicted", lambda r: _mib(r.predicted.file_bytes)),
                line("on disk, measured", lambda r: _mib(r.allocated_file_bytes)),
                line("buffers, predicted", lambda r: _mib(r.predicted.ring_bytes)),
                line("buffers, measured", lambda r: _mib(r.measured.ring_bytes)),
            ),
        ),
        Section(
            "Disk traffic",
            (
                line("read, GB", lambda r: _gb(r.bytes_read)),
                line("written, GB", lambda r: _gb(r.bytes_written)),
                line("not read again, GB", lambda r: _gb(r.bytes_spared)),
                line("GB/s in opt.step()", _bandwidth),
                line("outside opt.step()", _outside),
            ),
        ),
    ]


def render(results: Sequence[RowResult]) -> Table:
    """Return the table for a terminal."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("", no_wrap=True)
    for row in ROWS:
        table.add_column(row.title, justify="right", no_wrap=True)
    for section in sections(results):
        table.add_row(f"[bold]{section.title}[/]")
        for line in section.lines:
            table.add_row(f"  {line.label}", *line.cells)
        table.add_section()
    return table


def _loss_lines(ordered: Sequence[RowResult]) -> list[Line]:
    steps = range(len(ordered[0].losses))
    return [
        Line(f"loss, step {step + 1}", tuple(f"{r.losses[step]:.5f}" for r in ordered))
        for step in steps
    ]


def _short_checksum(result: RowResult) -> str:
    return result.checksum[:8]


def _seconds(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.1f}" if nbytes else NONE


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g}" if nbytes else NONE


def _saved(result: RowResult, base: RowResult) -> str:
    return NONE if result is base else f"{(base.end_rss_bytes - result.end_rss_bytes) / _MIB:,.1f}"


def _bandwidth(result: RowResult) -> str:
    return f"{result.step_bandwidth / 1e9:.2f}" if result.moved_bytes else NONE


def _outside(result: RowResult) -> str:
    if not result.moved_bytes:
        return NONE
    return f"{max(0.0, 1 - result.bytes_inside / result.moved_bytes):.0%}"
