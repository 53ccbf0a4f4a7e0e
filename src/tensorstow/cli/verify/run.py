"""`tensorstow verify`: compares training with states in RAM and on disk, bit for bit."""

import argparse
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tensorstow.base.directories import check_directory, choose_directory
from tensorstow.base.errors import OptionError, StowError
from tensorstow.base.sizes import format_count
from tensorstow.cli.output import make_console, make_progress, print_json, print_line, print_table
from tensorstow.cli.process import kill_in_an_update, started
from tensorstow.cli.verify.rows import COMMITTED, STEPS, VerifiedRun, runs_of
from tensorstow.cli.verify.subject import Subject, subject_of
from tensorstow.cli.verify.training import Announce, Outcome, differences, train
from tensorstow.fsdp.sharding import current_device

_NEEDED = 1 << 30
"""Bytes on disk: two commits of a model of 40 M parameters."""


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status: 1 if any bit differs."""
    subject = subject_of(options.model)
    facts = (
        choose_directory(_NEEDED)
        if options.directory is None
        else check_directory(options.directory, _NEEDED)
    )
    device = _device(options.device)
    console = make_console(to_stderr=options.json)
    model = f"{subject.name}, {subject.note}" if subject.note else subject.name
    heading = f"{model}; on {device}; states on disk in {facts.path} ({facts.mount.filesystem})"
    if not options.json:
        print_line(console, heading, "dim")
    with tempfile.TemporaryDirectory(prefix="tensorstow-verify-", dir=facts.path) as folder:
        outcomes = _run_all(options.model, subject, Path(folder), device, console)
    mismatches = differences(outcomes)
    _check_repeats(mismatches, device)
    summary = sentence(outcomes, mismatches, facts.path)
    if options.json:
        print_json(_as_json(heading, summary, outcomes, mismatches))
    else:
        _print(console, summary, outcomes, mismatches)
    return 1 if mismatches else 0


def sentence(
    outcomes: Mapping[VerifiedRun, Outcome], mismatches: Mapping[VerifiedRun, str], directory: Path
) -> str:
    """Return one sentence: all runs are equal, or the first difference."""
    if mismatches:
        run, description = next(iter(mismatches.items()))
        more = f" ({len(mismatches)} of {len(outcomes)} runs differ)" if len(mismatches) > 1 else ""
        return f"NOT EQUAL: {run.title}: {description}{more}."
    steps = format_count(STEPS, "step")
    return (
        f"All {len(outcomes)} runs are bitwise equal, each loss, and each parameter and state after"
        f" {steps}: states in RAM and in {directory}, every exact format, every overlap, killed"
        " and resumed."
    )


def _device(asked: str | None) -> torch.device:
    if asked is None:
        return current_device()
    try:
        device = torch.device(asked)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        message = f"--device {asked} was given: {error}"
        raise OptionError(message) from error
    return device


def _run_all(
    model: str | None, subject: Subject, folder: Path, device: torch.device, console: Console
) -> dict[VerifiedRun, Outcome]:
    runs = runs_of(subject.dtypes)
    outcomes = {}
    with make_progress(console) as progress:
        task = progress.add_task("", total=len(runs), name="", part="")
        for number, run in enumerate(runs):
            progress.update(task, name=run.title, completed=number, part="")

            def show_part(step: int, part: str) -> None:
                progress.update(task, part=f"step {step + 1}, {part}")

            if run.is_killed:
                directory = folder / f"killed-{run.dtype}"
                directory.mkdir()
                _kill(model, run, directory, device, show_part)
            else:
                directory = folder
            outcomes[run] = train(run, subject, directory, device, show_part)
        progress.update(task, name="done", completed=len(runs), part="")
    return outcomes


def _kill(
    model: str | None, run: VerifiedRun, directory: Path, device: torch.device, announce: Announce
) -> None:
    arguments = ["--directory", str(directory), "--dtype", run.dtype, "--format", run.state_format]
    arguments += ["--device", str(device), *(["--model", model] if model else [])]
    arguments += ["--search", *sys.path]  # module:function may be in any of these
    with started(run.title, "tensorstow.cli.verify.training", arguments) as process:
        kill_in_an_update(process, COMMITTED, announce)


def _check_repeats(mismatches: Mapping[VerifiedRun, str], device: torch.device) -> None:
    """Raise StowError if torch's own kernels are not deterministic."""
    for run, description in mismatches.items():
        if run.is_repeat:
            message = (
                f"Two runs with states in RAM differ: {description}. The model itself is"
                f" not deterministic on {device}, so nothing can be compared. Try --device cpu, or"
                " a model without operations that torch calls nondeterministic."
            )
            raise StowError(message)


def _as_json(
    heading: str,
    summary: str,
    outcomes: Mapping[VerifiedRun, Outcome],
    mismatches: Mapping[VerifiedRun, str],
) -> dict[str, Any]:
    return {
        "what": heading,
        "is_equal": not mismatches,
        "sentence": summary,
        "runs": [
            {
                "title": run.title,
                **asdict(run),
                "losses": outcome.losses,
                "sha256": outcome.checksum,
                "seconds": outcome.seconds,
                "differs": mismatches.get(run),
            }
            for run, outcome in outcomes.items()
        ],
    }


def _print(
    console: Console,
    summary: str,
    outcomes: Mapping[VerifiedRun, Outcome],
    mismatches: Mapping[VerifiedRun, str],
) -> None:
    rows = [
        (
            *run.cells,
            outcome.checksum[:8],
            f"{outcome.seconds:.1f} s",
            "differs" if run in mismatches else "equal",
        )
        for run, outcome in outcomes.items()
    ]
    print_table(
        console, ("weights", "states", "format", "overlap", "SHA-256", "took", "bits"), rows
    )
    print_line(console, summary, "bold red" if mismatches else "bold green")
    for run, description in list(mismatches.items())[1:]:
        print_line(console, f"  {run.title}: {description}")
