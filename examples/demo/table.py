"""The table of the demo: one line per figure, one column per configuration."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from demo.configurations import CONFIGURATIONS, TURN_STEPS
from demo.result import RunResult, by_key, spread, steady
from tensorstow.cli.output import fits
from tensorstow.states.memory import StateMemory

NONE = "\N{EN DASH}"
ROW_NUMBERS = range(len(CONFIGURATIONS))
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """One figure for every configuration."""

    label: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """Figures of one subject."""

    title: str
    note: str
    """The meaning of the words in it."""
    lines: tuple[Line, ...]


def sections(results: Sequence[RunResult]) -> list[Section]:
    """Return all figures, formatted."""
    runs = by_key(results)
    ordered = [runs[row.key] for row in CONFIGURATIONS]
    torch = runs["torch"]

    def line(label: str, cell: Callable[[RunResult], str]) -> Line:
        return Line(label, tuple(cell(result) for result in ordered))

    def predicted(cell: Callable[[StateMemory], int]) -> Callable[[RunResult], str]:
        return lambda result: NONE if result.predicted is None else _mib(cell(result.predicted))

    return [
        Section(
            "Result",
            "The loss of each step, and a hash (SHA-256, its first 8 digits) over all weights in"
            " the end: one bit of one weight changes it.",
            (*_loss_lines(ordered), line("hash of weights", lambda r: r.checksum[:8])),
        ),
        Section(
            "Seconds",
            f"Turns have {TURN_STEPS} steps. A steady step begins while the one before is still"
            " under way, as in a long run: the first of a turn does not, and is not counted."
            " Median; spread: (longest - shortest) / median.",
            (
                line("first step", lambda r: f"{r.step_seconds[0]:.2f}"),
                line("steady step", lambda r: _seconds(r.steady_seconds, 2)),
                line("  spread", _spread),
                line("  against torch", lambda r: _against(r, torch)),
                line("  of it opt.step()", lambda r: _seconds(r.steady_optimizer_seconds, 3)),
            ),
        ),
        Section(
            "Process memory, MiB",
            "RSS (resident set size): what the process has in RAM, weights, Python and libraries"
            " included; in the end, after freed memory was given back.",
            (
                line("peak RSS", lambda r: _mib(r.peak_rss_bytes)),
                line("RSS at the end", lambda r: _mib(r.end_rss_bytes)),
                line("  less than torch", lambda r: _saved(r, torch)),
                line("  of states' size", lambda r: _share(r, torch)),
            ),
        ),
        Section(
            "Optimizer states, MiB",
            "Adam keeps two fp32 numbers per weight. States on disk pass through buffers in RAM,"
            " whose size does not grow with the model. Files of the last column hold the weights"
            " too.",
            (
                line("in RAM, predicted", predicted(lambda m: m.ram_bytes)),
                line("in RAM, measured", lambda r: _mib(r.measured.ram_bytes)),
                line("on disk, predicted", predicted(lambda m: m.file_bytes)),
                line("on disk, measured", lambda r: _mib(r.allocated_file_bytes)),
                line("buffers, predicted", predicted(lambda m: m.ring_bytes)),
                line("buffers, measured", lambda r: _mib(r.measured.ring_bytes)),
            ),
        ),
        Section(
            "Disk traffic of states",
            "A transfer counts as moved during opt.step() by the share of its time that lies"
            " inside. Not read again: what the buffers still held.",
            (
                line("read, GB", lambda r: _gb(r.bytes_read)),
                line("written, GB", lambda r: _gb(r.bytes_written)),
                line("not read again, GB", lambda r: _gb(r.bytes_spared)),
                line("GB/s in opt.step()", _bandwidth),
                line("outside opt.step()", _outside),
            ),
        ),
    ]


def print_tables(console: Console, results: Sequence[RunResult]) -> None:
    """Print all figures, with as many columns side by side as fit."""
    figures = sections(results)
    columns = _columns_that_fit(console, figures)
    for first in range(0, len(CONFIGURATIONS), columns):
        console.print(render(figures, range(first, min(first + columns, len(CONFIGURATIONS)))))
        console.print()
    for row in CONFIGURATIONS:
        console.print(f"[bold]{row.name}[/]: {row.about}", highlight=False)
    for section in figures:
        console.print(f"[bold]{section.title}[/]: {section.note}", highlight=False)
    console.print()


def render(figures: Sequence[Section], columns: Sequence[int]) -> Table:
    """Return the table of some columns for a terminal."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(CONFIGURATIONS[column].title, justify="right", no_wrap=True)
    for section in figures:
        table.add_row(f"[bold]{section.title}[/]")
        for line in section.lines:
            table.add_row(f"  {line.label}", *(line.cells[column] for column in columns))
        table.add_section()
    return table


def figures_of(result: RunResult, torch: RunResult) -> dict[str, Any]:
    """Return the figures of one configuration for ``--json``: all but the single spans."""
    plain = {k: v for k, v in asdict(result).items() if k not in {"key", "spans", "rss"}}
    return {
        **plain,
        "step_seconds": result.step_seconds,
        "steady_step_seconds": steady(result),
        "spread": spread(result.steady_seconds),
        "optimizer_seconds": result.optimizer_seconds,
        "less_bytes_than_torch": torch.end_rss_bytes - result.end_rss_bytes,
    }


def _columns_that_fit(console: Console, figures: Sequence[Section]) -> int:
    """Return how many columns fit on the console, at least one."""

    def all_fit(columns: int) -> bool:
        starts = range(0, len(CONFIGURATIONS), columns)
        return all(fits(console, render(figures, ROW_NUMBERS[s : s + columns])) for s in starts)

    return next((n for n in range(len(CONFIGURATIONS), 1, -1) if all_fit(n)), 1)


def _loss_lines(ordered: Sequence[RunResult]) -> list[Line]:
    steps = range(len(ordered[0].losses))
    return [
        Line(f"loss, step {step + 1}", tuple(f"{r.losses[step]:.5f}" for r in ordered))
        for step in steps
    ]


def _seconds(values: Sequence[float], digits: int) -> str:
    return f"{median(values):.{digits}f}" if values else NONE


def _spread(result: RunResult) -> str:
    share = spread(result.steady_seconds)
    return NONE if share is None else f"{share:.0%}"


def _against(result: RunResult, base: RunResult) -> str:
    mine, theirs = steady(result), steady(base)
    return NONE if result is base or mine is None or theirs is None else f"{mine / theirs - 1:+.0%}"


def _share(result: RunResult, base: RunResult) -> str:
    if result is base:
        return NONE
    saved = base.end_rss_bytes - result.end_rss_bytes
    return f"{saved / base.measured.logical_bytes:.0%}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.1f}" if nbytes else NONE


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g}" if nbytes else NONE


def _saved(result: RunResult, base: RunResult) -> str:
    return NONE if result is base else f"{(base.end_rss_bytes - result.end_rss_bytes) / _MIB:,.1f}"


def _bandwidth(result: RunResult) -> str:
    return f"{result.step_bandwidth / 1e9:.2f}" if result.moved_bytes else NONE


def _outside(result: RunResult) -> str:
    if not result.moved_bytes:
        return NONE
    return f"{max(0.0, 1 - result.bytes_inside / result.moved_bytes):.0%}"
