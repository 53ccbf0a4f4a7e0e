"""`tensorstow demo --gemini`: the table of ColossalAI's Gemini example, made on this machine."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tensorstow.base.directories import DirectoryFacts
from tensorstow.base.errors import StowError
from tensorstow.base.sizes import format_count
from tensorstow.cli.demo.configurations import ModelSize
from tensorstow.cli.demo.table import NONE
from tensorstow.cli.output import print_json
from tensorstow.cli.process import started
from tensorstow.io.local_share import usable_cores

STEPS = 3
"""The example's."""
WITHOUT = "without"
"""The row of the example without Gemini: ``train_cpu``."""
POLICIES = (WITHOUT, "cpu", "auto", "const")
FRACTIONS = (0.0, 1.0)
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class GeminiResult:
    """The output of one run of the example, and measurements of it."""

    policy: str
    fraction: float
    """Of the states, on disk."""
    losses: tuple[float, ...]
    seconds: float
    """Of all steps, as the example counts them: the making of model and optimizer is left out."""
    rss_bytes: int
    """Resident memory of the process at the end, as the example prints it."""
    peak_rss_bytes: int | None
    """None: unknown on this system."""

    @property
    def name(self) -> str:
        """What the row is called."""
        return self.policy if self.policy == WITHOUT else f"Gemini, {self.policy}"


def run_all(
    given: argparse.Namespace, facts: DirectoryFacts, scale: ModelSize, console: Console
) -> int:
    """Run the example in every way, one after the other, and print the table.

    Args:
        given: The command's options.
        facts: Where scratch files go.
        scale: The model's size.
        console: Where progress and the table are printed.

    Returns:
        The exit status: 1 if losses differ.

    Raises:
        StowError: A run failed.
    """
    options = ["--directory", str(facts.path), *(["--small"] if given.small else [])]
    rows = [(policy, fraction) for policy in POLICIES for fraction in FRACTIONS]
    columns = (
        TextColumn("{task.fields[name]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    results = []
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(rows), name="starting")
        for policy, fraction in rows:
            progress.update(task, name=f"{policy}, {fraction:.0%} on disk")
            results.append(_run_one(policy, fraction, options))
            progress.advance(task)
    are_equal = len({result.losses for result in results}) == 1
    if given.json:
        print_json(as_json(results, scale))
    else:
        console.print(_heading(scale), style="dim", highlight=False, soft_wrap=True)
        console.print(table_of(results))
        console.print(
            _parity_sentence(are_equal=are_equal), style="green" if are_equal else "bold red"
        )
    return 0 if are_equal else 1


def table_of(results: Sequence[GeminiResult]) -> Table:
    """Return the table.

    Args:
        results: All runs.

    Returns:
        A line for each.
    """
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for name in ("on disk", *(f"loss {i}" for i in range(STEPS)), "s", "MiB", "peak MiB", "saved"):
        table.add_column(name, justify="right")
    before = {result.policy: result for result in results if result.fraction == 0.0}
    for result in results:
        saved = before[result.policy].rss_bytes - result.rss_bytes
        table.add_row(
            result.name,
            f"{result.fraction:.0%}",
            *(f"{loss:.3f}" for loss in result.losses),
            f"{result.seconds:.2f}",
            f"{result.rss_bytes / _MIB:.0f}",
            NONE if result.peak_rss_bytes is None else f"{result.peak_rss_bytes / _MIB:.0f}",
            f"{saved / _MIB:.0f}" if result.fraction else "",
        )
    return table


def as_json(results: Sequence[GeminiResult], scale: ModelSize) -> dict[str, Any]:
    """Return what ``--json`` prints.

    Args:
        results: All runs.
        scale: The model's size.

    Returns:
        The heading, whether all losses are equal, and the rows.
    """
    return {
        "what": _heading(scale),
        "is_equal": len({result.losses for result in results}) == 1,
        "rows": [asdict(result) for result in results],
    }


def _heading(scale: ModelSize) -> str:
    return (
        f"ColossalAI's Gemini example: GPT-2, {scale.parameters / 1e6:.1f} M parameters, batch"
        f" {scale.batch} x {scale.sequence}, {STEPS} steps, {format_count(usable_cores(), 'core')}"
    )


def _parity_sentence(*, are_equal: bool) -> str:
    if are_equal:
        return "The losses of all rows are equal to the last bit."
    return "The losses are NOT equal: this is a bug. Please report it with what was printed."


def _run_one(policy: str, fraction: float, options: Sequence[str]) -> GeminiResult:
    row = ["--policy", policy, "--fraction", str(fraction), *options]
    with started(f"{policy} {fraction}", "tensorstow.cli.demo.gemini_worker", row) as process:
        process.tell_no_more()
        for said in process.messages():
            return GeminiResult(**{**said, "losses": tuple(said["losses"])})
    message = f"The run of {policy!r} with {fraction} on disk ended without a result."
    raise StowError(message)
