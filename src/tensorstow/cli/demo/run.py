"""`tensorstow demo`: every row in turn, then what is made of their results."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tensorstow.base.cores import usable_cores
from tensorstow.base.directories import DirectoryFacts, check_directory, choose_directory
from tensorstow.base.errors import OptionError, StowError
from tensorstow.base.sizes import format_bytes
from tensorstow.cli.demo import curve, events, page, table, timeline
from tensorstow.cli.demo.result import RowResult
from tensorstow.cli.demo.rows import FULL, ROWS, SMALL, Row, Scale
from tensorstow.cli.demo.verdict import Verdict, judge

_EXTRA = ("transformers", "matplotlib")
_PARTS = {"build": "building the model", "last writes": "landing the last writes"}
Announce = Callable[[int, str], None]

LINES = """\
import tensorstow

optimizer = tensorstow.AdamW(model.parameters(), lr=1e-4, states="disk", dir="/nvme/run")

# coming from ColossalAI: only the import changes
from tensorstow.colossalai import HybridAdam
optimizer = HybridAdam(model.parameters(), nvme_offload_fraction=1.0, nvme_offload_dir="/nvme/run")
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument(
        "--directory",
        metavar="DIR",
        help="put the scratch files here (default: the first real disk among the usual places)",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        default=Path("tensorstow-demo"),
        help="write pictures, report and event log here (default: ./%(default)s)",
    )
    parser.add_argument(
        "--steps", metavar="N", type=int, default=3, help="training steps per row (default: 3)"
    )
    parser.add_argument(
        "--small", action="store_true", help="a toy model: seconds instead of minutes"
    )


def run(given: argparse.Namespace) -> int:
    """Run the command; return its exit status: 1 where our rows are not bitwise equal."""
    scale = SMALL if given.small else FULL
    _check(given)
    facts = _directory(given.directory, scale)
    console = Console()
    heading = (
        f"GPT-2, {scale.parameters / 1e6:.1f} M parameters, batch {scale.batch} x {scale.sequence},"
        f" {given.steps} steps, {usable_cores()} cores; scratch files in {facts.path}"
        f" ({facts.filesystem} on {facts.device}, {format_bytes(facts.free_bytes)} free)"
    )
    console.print(heading, style="dim", highlight=False, soft_wrap=True)
    results = _run_rows(given, str(facts.path), console)
    verdict = judge(results)
    written = write_files(given.out, results, heading, verdict)
    _print_outcome(console, results, verdict, written)
    return 0 if verdict.is_equal else 1


def run_row(row: Row, given: argparse.Namespace, directory: str, announce: Announce) -> RowResult:
    """Run one row in a fresh interpreter; raise StowError with its last words where it fails."""
    reader, writer = os.pipe()
    command = [
        # -P: what lies in the working directory must not be imported instead.
        *(sys.executable, "-P", "-m", "tensorstow.cli.demo.child", "--row", row.key),
        *("--steps", str(given.steps), "--directory", directory, "--descriptor", str(writer)),
        *(["--small"] if given.small else []),
    ]
    with tempfile.TemporaryFile() as output, os.fdopen(reader, encoding="utf-8") as lines:
        try:
            child = subprocess.Popen(  # noqa: S603  # ourselves
                command, pass_fds=[writer], stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        finally:
            os.close(writer)
        with _ended(child):
            last = ""
            for line in lines:
                last = line
                said: dict[str, Any] = json.loads(line)
                if "part" in said:
                    announce(said["step"], said["part"])
            status = child.wait()
        if status != 0:
            raise StowError(_last_words(row, status, output))
    return RowResult.from_json(last)


def write_files(
    out: Path, results: Sequence[RowResult], heading: str, verdict: Verdict
) -> dict[str, Path]:
    """Write everything that is kept; return what each file is, by its path."""
    paths = {
        "report": out / "report.html",
        "timeline": out / "timeline.png",
        "memory": out / "memory.png",
        "event log, for ui.perfetto.dev": out / "events.json",
    }
    log = events.trace(results)
    pictures = page.Pictures(timeline.draw(results), curve.draw(results))
    (out / "timeline.png").write_bytes(pictures.timeline)
    (out / "memory.png").write_bytes(pictures.memory)
    (out / "events.json").write_text(json.dumps(log, separators=(",", ":")), encoding="utf-8")
    html = page.compose(results, heading, verdict, pictures, LINES)
    (out / "report.html").write_text(html, encoding="utf-8")
    return paths


def _check(given: argparse.Namespace) -> None:
    if given.steps < 1:
        message = f"--steps {given.steps} was given: at least 1 step can be measured."
        raise OptionError(message)
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        message = (
            f"The demo needs {' and '.join(missing)}, not installed here:"
            ' pip install "tensorstow[demo]"'
        )
        raise StowError(message)
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


def _directory(asked: str | None, scale: Scale) -> DirectoryFacts:
    needed = scale.disk_bytes
    return choose_directory(needed) if asked is None else check_directory(asked, needed)


def _run_rows(given: argparse.Namespace, directory: str, console: Console) -> list[RowResult]:
    columns = (
        TextColumn("{task.fields[name]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("[dim]{task.fields[part]}"),
        TimeElapsedColumn(),
    )
    results = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(ROWS) * given.steps, name="", part="")
        for index, row in enumerate(ROWS):

            def announce(step: int, part: str, base: int = index * given.steps) -> None:
                doing = _PARTS.get(part, f"step {step + 1}, {part}")
                done = base + (step if step >= 0 else given.steps * (part == "last writes"))
                progress.update(task, part=doing, completed=done)

            progress.update(task, name=row.name, part="starting")
            results.append(run_row(row, given, directory, announce))
        progress.update(task, completed=len(ROWS) * given.steps, name="all rows", part="")
    return results


@contextmanager
def _ended(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Leave no child behind, whatever interrupts us."""
    try:
        yield
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()


def _last_words(row: Row, status: int, output: IO[bytes]) -> str:
    output.seek(0)
    words = output.read().decode(errors="replace").strip().splitlines()[-20:]
    ended = f"signal {-status}" if status < 0 else f"exit status {status}"
    hint = " (signal 9 is mostly the system's answer to too little memory)" * (status == -9)
    said = "\n  ".join(["It said last:", *words]) if words else "It said nothing."
    return f"The row {row.name!r} ended with {ended}{hint}. {said}"


def _print_outcome(
    console: Console, results: Sequence[RowResult], verdict: Verdict, written: dict[str, Path]
) -> None:
    console.print(table.render(results))
    console.print()
    style = "bold green" if verdict.is_equal else "bold red"
    console.print(str(verdict), style=style, highlight=False)
    console.print("\nIn your own script:\n", style="bold")
    for line in LINES.splitlines():
        console.print(f"    {line}", highlight=False, markup=False, soft_wrap=True)
    console.print("\nWritten:\n", style="bold")
    for name, path in written.items():
        console.print(f"    {path}  [dim]{name}[/]", highlight=False, soft_wrap=True)
