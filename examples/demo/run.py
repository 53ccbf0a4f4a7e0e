"""Runs every configuration, then prints and writes the results."""

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

from demo import crash, events, gemini, memory_plot, page, timeline
from demo.configurations import (
    CONFIGURATIONS,
    FULL,
    SMALL,
    TURN_STEPS,
    Configuration,
    ModelSize,
)
from demo.cpu_load import OtherLoad
from demo.parity import ParityReport, judge
from demo.plots import plot_of
from demo.result import RunResult, by_key
from demo.round_robin import fits_at_once, run_rows
from demo.table import figures_of, print_tables
from tensorstow.base.directories import DirectoryFacts, check_directory, choose_directory
from tensorstow.base.errors import OptionError, StowError
from tensorstow.base.sizes import format_bytes, format_count
from tensorstow.cli.output import make_console, make_progress, print_json, print_line
from tensorstow.fsdp.automatic import free_host_bytes
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


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status: 1 if our configurations are not bitwise equal."""
    scale = SMALL if options.small else FULL
    _check(options)
    facts = _directory(options.directory, scale)
    console = make_console(to_stderr=options.json)  # of progress, and of what people read
    if options.gemini:
        return gemini.run_all(options, facts, scale, console)
    heading = (
        f"GPT-2, {scale.parameters / 1e6:.1f} M parameters, batch {scale.batch} x {scale.sequence},"
        f" {options.steps} steps, {format_count(usable_cores(), 'core')}; scratch files in"
        f" {facts.path} ({facts.mount.filesystem} on {facts.mount.device},"
        f" {format_bytes(facts.free_bytes)} free)"
    )
    if options.small:
        heading += "; a toy: its times and its memory mean nothing"
    if not options.json:
        console.print(heading, style="dim", highlight=False, soft_wrap=True)
    started = time.monotonic()
    results, parity = _run_all(options, facts, scale, console)
    written = write_files(options.out, results, heading, parity)
    if options.json:
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
    drawn = page.Plots(plot_of(timeline.draw, results), plot_of(memory_plot.draw, results))
    (out / "timeline.png").write_bytes(drawn.timeline.png)
    (out / "memory.png").write_bytes(drawn.memory.png)
    (out / "events.json").write_text(json.dumps(log, separators=(",", ":")), encoding="utf-8")
    html = page.compose(results, heading, parity, drawn, LINES)
    (out / "report.html").write_text(html, encoding="utf-8")
    return paths


def _check(options: argparse.Namespace) -> None:
    if options.steps < TURN_STEPS:
        message = (
            f"--steps {options.steps} was given: use at least {TURN_STEPS}, because the first step"
            " of a turn is not counted."
        )
        raise OptionError(message)
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        message = (
            f"The demo needs {' and '.join(missing)}, not installed here:"
            ' pip install "tensorstow[demo]"'
        )
        raise StowError(message)
    if options.gemini:
        return  # it writes no files
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.out):
            pass
    except OSError as error:
        message = (
            f"--out {options.out} was given: no file can be made there ({error.strerror})."
            " Name another directory."
        )
        raise StowError(message) from error


def _directory(asked: str | None, scale: ModelSize) -> DirectoryFacts:
    needed = scale.run_disk_bytes
    return choose_directory(needed) if asked is None else check_directory(asked, needed)


def _run_all(
    options: argparse.Namespace, facts: DirectoryFacts, scale: ModelSize, console: Console
) -> tuple[list[RunResult], ParityReport]:
    arguments = ["--directory", str(facts.path), *(["--small"] if options.small else [])]
    at_once = fits_at_once(scale, facts.free_bytes, free_host_bytes())
    total = len(CONFIGURATIONS) * options.steps
    with make_progress(console) as progress:
        task = progress.add_task("", total=total, name="starting", part="")
        taken = dict.fromkeys((row.key for row in CONFIGURATIONS), 0)

        def announce(row: Configuration, step: int, part: str) -> None:
            doing = _PARTS.get(part, f"step {step + 1}, {part}")
            # The further step that compares torch's with ours is not a step of the run.
            taken[row.key] = min(options.steps, max(taken[row.key], step))
            progress.update(task, name=row.name, part=doing, completed=sum(taken.values()))

        load = OtherLoad()
        results = run_rows(CONFIGURATIONS, options.steps, arguments, announce, at_once=at_once)
        share = load.share()
        progress.update(task, completed=total, name=crash.NAME)
        ended = crash.kill_and_resume(
            options.out,
            facts.path,
            scale,
            small=options.small,
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
