"""The table of ColossalAI's Gemini example on this machine: `python examples/demo --gemini`."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from demo.configurations import ADAM_STATE_BYTES, FOLDER, ModelSize
from demo.table import NONE
from tensorstow.base.directories import DirectoryFacts
from tensorstow.base.errors import StowError
from tensorstow.base.sizes import format_count
from tensorstow.cli.output import make_progress, print_json, print_table
from tensorstow.cli.process import started
from tensorstow.io.local_share import usable_cores

STEPS = 3
"""Number of steps, as in the example."""
WITHOUT = "without"
"""The row of the example without Gemini: ``train_cpu``."""
POLICIES = (WITHOUT, "cpu", "auto", "const")
FRACTIONS = (0.0, 1.0)
HEADS = ("Gemini", "disk", *(f"loss {i}" for i in range(STEPS)), "s", "MiB", "peak", "saved")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class GeminiResult:
    """The output of one run of the example, and measurements of it."""

    policy: str
    fraction: float
    """Share of the states on disk."""
    losses: tuple[float, ...]
    seconds: float
    """Seconds of all steps as the example counts them, without creating model and optimizer."""
    rss_bytes: int
    """Resident memory of the process at the end, as the example prints it."""
    peak_rss_bytes: int | None
    """None: unknown on this system."""


def run_all(
    options: argparse.Namespace, facts: DirectoryFacts, scale: ModelSize, console: Console
) -> int:
    """Run the example in all configurations, one after the other, and print the table.

    The exit status that is returned is 1 if losses differ.
    """
    arguments = ["--directory", str(facts.path), *(["--small"] if options.small else [])]
    rows = [(policy, fraction) for policy in POLICIES for fraction in FRACTIONS]
    results = []
    with make_progress(console) as progress:
        task = progress.add_task("", total=len(rows), name="starting", part="")
        for policy, fraction in rows:
            progress.update(task, name=f"{policy}, {fraction:.0%} on disk")
            results.append(_run_one(policy, fraction, arguments))
            progress.advance(task)
    are_equal = len({result.losses for result in results}) == 1
    if options.json:
        print_json(as_json(results, scale))
    else:
        console.print(_heading(scale), style="dim", highlight=False, soft_wrap=True)
        print_table(console, HEADS, rows_of(results), numbers_from=1)
        console.print(_legend(scale), style="dim", highlight=False, soft_wrap=True)
        console.print(
            _parity_sentence(are_equal=are_equal), style="green" if are_equal else "bold red"
        )
    return 0 if are_equal else 1


def rows_of(results: Sequence[GeminiResult]) -> list[list[str]]:
    """Return the rows of the table, one for each run, under HEADS."""
    before = {result.policy: result for result in results if result.fraction == 0.0}
    return [
        [
            result.policy,
            f"{result.fraction:.0%}",
            *(f"{loss:.3f}" for loss in result.losses),
            f"{result.seconds:.2f}",
            f"{result.rss_bytes / _MIB:.0f}",
            NONE if result.peak_rss_bytes is None else f"{result.peak_rss_bytes / _MIB:.0f}",
            f"{round((before[result.policy].rss_bytes - result.rss_bytes) / _MIB)}"
            if result.fraction
            else "",
        ]
        for result in results
    ]


def as_json(results: Sequence[GeminiResult], scale: ModelSize) -> dict[str, Any]:
    """Return what ``--json`` prints: the heading, whether all losses are equal, and the rows."""
    return {
        "what": _heading(scale),
        "state_bytes": scale.parameters * ADAM_STATE_BYTES,
        "is_equal": len({result.losses for result in results}) == 1,
        "rows": [asdict(result) for result in results],
    }


def _heading(scale: ModelSize) -> str:
    return (
        f"ColossalAI's Gemini example: GPT-2, {scale.parameters / 1e6:.1f} M parameters, batch"
        f" {scale.batch} x {scale.sequence}, {STEPS} steps, {format_count(usable_cores(), 'core')}"
    )


def _legend(scale: ModelSize) -> str:
    states = scale.parameters * ADAM_STATE_BYTES / _MIB
    return (
        "disk: the share of the states there. MiB: resident memory at the end, as the example"
        " prints it. peak: the most. saved: MiB less than with no states on disk; all states have"
        f" {states:.0f}."
    )


def _parity_sentence(*, are_equal: bool) -> str:
    if are_equal:
        return "The losses of all rows are equal to the last bit."
    return "The losses are NOT equal: this is a bug. Please report it with what was printed."


def _run_one(policy: str, fraction: float, arguments: Sequence[str]) -> GeminiResult:
    row = ["--policy", policy, "--fraction", str(fraction), *arguments]
    with started(f"{policy} {fraction}", "demo.gemini_worker", row, FOLDER) as process:
        process.tell_no_more()
        for said in process.messages():
            return GeminiResult(**{**said, "losses": tuple(said["losses"])})
    message = f"The run of {policy!r} with {fraction} on disk ended without a result."
    raise StowError(message)
