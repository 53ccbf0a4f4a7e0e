"""`tensorstow demo`: runs every configuration, then prints and writes the results."""

import argparse
import importlib.util
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tensorstow.base.directories import DirectoryFacts, check_directory, choose_directory
from tensorstow.base.errors import OptionError, StowError
from tensorstow.base.sizes import format_bytes, format_count
from tensorstow.cli.arguments import TURN_STEPS
from tensorstow.cli.demo import crash, events, gemini, page, plots
from tensorstow.cli.demo.configurations import (
    CONFIGURATIONS,
    FULL,
    SMALL,
    Configuration,
    ModelSize,
)
from tensorstow.cli.demo.cpu_load import OtherLoad
from tensorstow.cli.demo.parity import ParityReport, judge
from tensorstow.cli.demo.result import RunResult, by_key
from tensorstow.cli.demo.round_robin import fits_at_once, run_rows
from tensorstow.cli.demo.table import figures_of, print_tables
from tensorstow.cli.output import make_console, print_json, print_line
from tensorstow.io.local_share import usable_cores

_EXTRA = ("transformers", "matplotlib")
_PARTS = {"build": "building the model", "last writes": "finishing the last writes"}

LINES = """\
import tensorstow

optimizer = tensorstow.AdamW(model.parameters(), lr=1e-4, states="disk", dir="/nvme/run")

# coming from ColossalAI: only the import changes
from tensorstow.colossalai import HybridAdam
optimizer = HybridAdam(model.parameters(), nvme_offload_fraction=1.0, nvme_offload_dir="/nvme/run")
"""


def run(given: argparse.Namespace) -> int:
    """Run the command; return its exit status: 1 if our configurations are not bitwise equal."""
    scale = SMALL if given.small else FULL
    _check(given)
    facts = _directory(given.directory, scale)
    console = make_console(to_stderr=given.json)  # of progress, and of what people read
    if given.gemini:
        return gemini.run_all(given, facts, scale, console)
    heading = (
        f"GPT-2, {scale.parameters / 1e6:.1f} M parameters, batch {scale.batch} x {scale.sequence},"
        f" {given.steps} steps, {format_count(usable_cores(), 'core')}; scratch files in"
        f" {facts.path} ({facts.filesystem} on {facts.device},"
        f" {format_bytes(facts.free_bytes)} free)"
    )
    if given.small:
        heading += "; a toy: its times and its memory mean nothing"
    if not given.json:
        console.print(heading, style="dim", highlight=False, soft_wrap=True)
    started = time.monotonic()
    results, parity = _run_all(given, facts, scale, console)
    written = write_files(given.out, results, heading, parity)
    if given.json:
        print_json(_as_json(heading, results, parity, written))
    else:
        _print_outcome(console, results, parity, written)
        took = time.monotonic() - started
        console.print(f"\nThat took {took:.0f} seconds.", style="dim", highlight=False)
    return 0 if parity.is_equal else 1


def write_files(
    out: Path, results: Sequence[RunResult], heading: str, parity: ParityReport
) -> dict[str, Path]:
    """Write all files; return their paths by description."""
    paths = {
        "report": out / "report.html",
        "timeline": out / "timeline.png",
        "memory": out / "memory.png",
        "event log, for ui.perfetto.dev": out / "events.json",
    }
    log = events.trace(results)
    drawn = page.Plots(plots.draw_timeline(results), plots.draw_memory(results))
    (out / "timeline.png").write_bytes(drawn.timeline.png)
    (out / "memory.png").write_bytes(drawn.memory.png)
    (out / "events.json").write_text(json.dumps(log, separators=(",", ":")), encoding="utf-8")
    html = page.compose(results, heading, parity, drawn, LINES)
    (out / "report.html").write_text(html, encoding="utf-8")
    return paths


def _check(given: argparse.Namespace) -> None:
    if given.steps < TURN_STEPS:
        message = (
            f"--steps {given.steps} was given: at least {TURN_STEPS} are needed, for the first of a"
            " turn is not counted."
        )
        raise OptionError(message)
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        message = (
            f"The demo needs {' and '.join(missing)}, not installed here:"
            ' pip install "tensorstow[demo]"'
        )
        raise StowError(message)
    if given.gemini:
        return  # it writes no files
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=given.out):
            pass
    except OSError as error:
        message = (
            f"--out {given.out} was given: no file can be made there ({error.strerror})."
            " Name another directory."
        )
        raise StowError(message) from error


def _directory(asked: str | None, scale: ModelSize) -> DirectoryFacts:
    needed = scale.run_disk_bytes
    return choose_directory(needed) if asked is None else check_directory(asked, needed)


def _run_all(
    given: argparse.Namespace, facts: DirectoryFacts, scale: ModelSize, console: Console
) -> tuple[list[RunResult], ParityReport]:
    arguments = ["--directory", str(facts.path), *(["--small"] if given.small else [])]
    at_once = fits_at_once(scale, facts.free_bytes)
    columns = (
        TextColumn("{task.fields[name]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("[dim]{task.fields[part]}"),
        TimeElapsedColumn(),
    )
    total = len(CONFIGURATIONS) * given.steps
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total, name="starting", part="")
        taken = dict.fromkeys((row.key for row in CONFIGURATIONS), 0)

        def announce(row: Configuration, step: int, part: str) -> None:
            doing = _PARTS.get(part, f"step {step + 1}, {part}")
            # A further step is no step of the run: torch's is compared with ours by it.
            taken[row.key] = min(given.steps, max(taken[row.key], step))
            progress.update(task, name=row.name, part=doing, completed=sum(taken.values()))

        others = OtherLoad()
        results = run_rows(CONFIGURATIONS, given.steps, arguments, announce, at_once=at_once)
        share = others.share()
        progress.update(task, completed=total, name=crash.NAME)
        ended = crash.kill_and_resume(
            given.out,
            facts.path,
            scale,
            small=given.small,
            tell=lambda part: progress.update(task, part=_PARTS.get(part, part)),
        )
        progress.update(task, name="done", part="")
    return results, judge(results, ended, others=share, at_once=at_once)


def _as_json(
    heading: str, results: Sequence[RunResult], parity: ParityReport, written: dict[str, Path]
) -> dict[str, Any]:
    torch = by_key(results)["torch"]
    return {
        "what": heading,
        "is_equal": parity.is_equal,
        "parity": asdict(parity),
        "sentences": parity.sentences(),
        "rows": {result.key: figures_of(result, torch) for result in results},
        "files": written,
    }


def _print_outcome(
    console: Console, results: Sequence[RunResult], parity: ParityReport, written: dict[str, Path]
) -> None:
    print_tables(console, results)
    first, *rest = parity.sentences()
    console.print(first, style="bold", highlight=False)
    for sentence in rest:
        console.print(sentence, style=_style(sentence), highlight=False)
    console.print("\nIn your own script:\n", style="bold")
    for line in LINES.splitlines():
        print_line(console, f"    {line}")
    console.print("\nWritten:\n", style="bold")
    for name, path in written.items():
        console.print(f"    {path}  [dim]{name}[/]", highlight=False, soft_wrap=True)


def _style(sentence: str) -> str:
    if "NOT" in sentence:
        return "bold red"
    return "yellow" if "BUSY" in sentence else "green" if "hash" in sentence else ""
