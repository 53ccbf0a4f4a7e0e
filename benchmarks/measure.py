"""How figures are measured, judged, saved and printed.

[Note: Interleaving] A machine's memory and disk change speed from minute to minute, by a factor
of two where it is shared. So contenders take turns in one run (A B, B A, A B ...: who comes first
or after whom matters to a disk) and a figure is a ratio of medians; never compare seconds of two
runs. They rest in between: OpenMP's threads poll for some milliseconds after their work, on cores
that the next contender would use.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from rich.console import Console
from rich.table import Table

from tensorstow import _native
from tensorstow.base.directories import choose_directory, inspect_directory
from tensorstow.io.engine import choose_backend
from tensorstow.io.local_share import usable_cores

SCHEMA = 1
LEAST_PAIRS = 9
_REST_SECONDS = 0.01
_HOLDS_WHERE = {
    "accelerator_model": "Verdicts hold at break-even alone, as it is set here: with states in host"
    ' memory compute takes 3 times as long as the update (overlap "forward") or 1.5 times'
    ' ("backward"), or as long as link or disk where they take longer. Where the update takes as'
    " long as compute, neither can reach the bound (forward 1.67 of it, backward 1.33). Where the"
    ' device updates ("device", "hybrid"), the update is what its states take on the link. The host'
    " is not simulated: beside other work on the machine steps take longer.",
}
"""Of a subject: what its verdicts hold for, and what they say nothing of."""

_Run = TypeVar("_Run")
Contender = Callable[[], float | None]
"""Does its work once; returns the seconds it took, or None to be timed from outside."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line decided."""

    pairs: int
    quick: bool
    """Tiny sizes: does the code work? The figures mean nothing."""
    directory: Path | None = None
    """For scratch files; None takes the first real disk with room."""
    cpu_as_device: bool = False
    """Whether what needs an accelerator runs on the CPU in its place."""
    size: str = "1B"
    """Of a model on an accelerator: a key of ``transformer.SHAPES``."""
    journal: Path | None = None
    """Folder that keeps what was measured on an accelerator, for a second call to go on from."""
    judge_only: bool = False
    """Whether to judge what the journal has and measure nothing."""
    way_seconds: float | None = None
    """After which a way's turn on an accelerator hangs."""

    def saved_as(self, subject: str) -> str:
        """Return the name under which figures of a subject are saved."""
        has_size = subject == "gpu" and not self.quick and self.size != "1B"
        return f"{subject}-{self.size}" if has_size else subject

    def scratch(self, nbytes: int) -> Path:
        """Return a directory with room for ``nbytes``."""
        return self.directory or choose_directory(nbytes).path


@dataclass(frozen=True, slots=True)
class Sample:
    """The seconds that one contender took, in order."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Return the middle."""
        return statistics.median(self.seconds)

    def summary(self) -> dict[str, Any]:
        """Return what is saved."""
        return {
            "min": min(self.seconds),
            "median": self.median,
            "max": max(self.seconds),
            "count": len(self.seconds),
        }


@dataclass(frozen=True, slots=True)
class Limit:
    """What is asked of a figure."""

    kind: Literal["at most", "at least", "exactly"]
    value: float

    def holds(self, measured: float) -> bool:
        """Return whether ``measured`` is within the limit."""
        match self.kind:
            case "at most":
                return measured <= self.value
            case "at least":
                return measured >= self.value
            case "exactly":
                return measured == self.value


Verdict = Literal["passed", "falls short", "information", "not available"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number beside what was asked of it."""

    name: str
    limit: Limit | None
    """None: nothing was asked, the number informs."""
    measured: float | None
    """None: it cannot be measured here, and ``detail["why"]`` says why."""
    unit: str = "x"
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """Return how the figure did."""
        if self.measured is None:
            return "not available"
        if self.limit is None:
            return "information"
        return "passed" if self.limit.holds(self.measured) else "falls short"

    def as_json(self) -> dict[str, Any]:
        """Return what is saved."""
        return {**asdict(self), "verdict": self.verdict}

    @property
    def asked(self) -> str:
        """Return the limit for people."""
        return "" if self.limit is None else f"{self.limit.kind} {_number(self.limit.value)}"

    @property
    def found(self) -> str:
        """Return the measurement for people."""
        return "" if self.measured is None else f"{_number(self.measured)} {self.unit}"


def at_most(value: float) -> Limit:
    """Return the limit that smaller figures keep."""
    return Limit("at most", value)


def at_least(value: float) -> Limit:
    """Return the limit that larger figures keep."""
    return Limit("at least", value)


def exactly(value: float) -> Limit:
    """Return the limit that one figure keeps."""
    return Limit("exactly", value)


def not_available(name: str, limit: Limit | None, why: str) -> Figure:
    """Return the figure of something that is not here."""
    return Figure(name, limit, None, detail={"why": why})


def interleave(
    contenders: Mapping[str, Contender], pairs: int, *, warm_up: int = 1
) -> dict[str, Sample]:
    """Let every contender run ``pairs`` times, in turns; see [Note: Interleaving]."""

    def seconds_of(name: str) -> float:
        time.sleep(_REST_SECONDS)
        start = time.perf_counter()
        own = contenders[name]()
        elapsed = time.perf_counter() - start
        return elapsed if own is None else own

    seconds = in_turns(contenders, warm_up + pairs, seconds_of)
    return {name: Sample(tuple(values[warm_up:])) for name, values in seconds.items()}


def in_turns(names: Iterable[str], turns: int, run: Callable[[str], _Run]) -> dict[str, list[_Run]]:
    """Return what ``run`` returned for each name, in ``turns`` turns forth and back."""
    runs: dict[str, list[_Run]] = {name: [] for name in names}
    for turn in range(turns):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            runs[name].append(run(name))
    return runs


def ratio(
    name: str, limit: Limit | None, samples: Mapping[str, Sample], over: str, under: str
) -> Figure:
    """Return the median of ``over`` divided by that of ``under``; the detail has every sample."""
    top, bottom = samples[over], samples[under]
    each = [a / b for a, b in zip(top.seconds, bottom.seconds, strict=True)]
    detail = {
        "ratio_of": [over, under],
        "median_of_pair_ratios": statistics.median(each),
        "seconds": {key: sample.summary() for key, sample in samples.items()},
    }
    return Figure(name, limit, top.median / bottom.median, detail=detail)


def fastest(samples: Mapping[str, Sample], names: Iterable[str]) -> str:
    """Return which of ``names`` has the least median."""
    return min(names, key=lambda name: samples[name].median)


def use_all_cores() -> None:
    """Give torch and our pool the same number of threads."""
    torch.set_num_threads(usable_cores())
    _native.set_pool_threads(usable_cores())


def run_alone(
    module: str, *arguments: str, quick: bool, given: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a benchmark's module in a process of its own; return the JSON of its last line.

    ``given``: what its environment has besides this one's.
    """
    words = (module, *arguments, *(["--quick"] if quick else []))
    given = {"TRANSFORMERS_VERBOSITY": "error", **(given or {})}
    result: dict[str, Any] = json.loads(lines_of(*words, given=given)[-1])
    return result


def run_ways(
    module: str, ways: Iterable[str], turns: int, directory: Path | str, *, quick: bool
) -> dict[str, list[dict[str, Any]]]:
    """Run each way of a benchmark's module alone, in turns; return the results by way."""
    return in_turns(ways, turns, lambda way: run_alone(module, way, str(directory), quick=quick))


def as_child(measure: Callable[..., Mapping[str, Any]], ways: Iterable[str] | None = None) -> None:
    """Be the process that ``run_alone`` starts: print what ``measure`` returns as JSON.

    It is called on all cores with a way, a directory and ``quick``, as the command line has them.
    ``ways``: those that there are; None: any.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=ways)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    use_all_cores()
    print(json.dumps(measure(options.way, options.directory, quick=options.quick)))


def lines_of(
    *words: str,
    seconds: float | None = None,
    given: Mapping[str, str] | None = None,
    text: str | None = None,
) -> list[str]:
    """Run ``python -m`` with these words in the root of the tree; return the lines that it printed.

    ``given``: what its environment has besides this one's; ``text``: its standard input. Raises
    RuntimeError with what it wrote to standard error if it fails, TimeoutExpired after ``seconds``.
    """
    done = subprocess.run(
        [sys.executable, "-m", *words],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
        cwd=Path(__file__).resolve().parents[1],
        env={**os.environ, **(given or {})},
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.splitlines()


def process_io() -> tuple[int, int]:
    """Return the bytes that this process has read from disks and written to them."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    facts = dict(line.split(": ") for line in lines)
    return int(facts["read_bytes"]), int(facts["write_bytes"])


def digest_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return one number for the bits of fp32 tensors."""
    bits = [tensor.detach().reshape(-1).view(torch.int32).to(torch.int64) for tensor in tensors]
    return sum(int((each * torch.arange(1, len(each) + 1)).sum()) for each in bits)


def machine_facts(directory: Path | None) -> dict[str, Any]:
    """Return what a reader needs to judge the figures; nothing that names the machine."""
    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "memory_gib": round(_memory_bytes() / (1 << 30), 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accelerator": accelerator(),
        "isa": _native.best_isa(),
        "io_backend": str(choose_backend()),
        "filesystem": inspect_directory(directory or choose_directory().path).mount.filesystem,
    }


def save(
    out: Path, subject: str, settings: Settings, facts: Mapping[str, Any], figures: Sequence[Figure]
) -> Path:
    """Write the figures of one subject to ``out/<subject>.json``; return that path."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{settings.saved_as(subject)}.json"
    document = {
        "schema": SCHEMA,
        "subject": settings.saved_as(subject),
        "pairs": settings.pairs,
        "quick": settings.quick,
        "machine": dict(facts),
        "figures": [figure.as_json() for figure in figures],
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return path


def save_table(out: Path) -> Path:
    """Put every subject that is saved in ``out`` into ``out/table.md``, for people."""
    lines = [
        "# Figures",
        "",
        "`make bench`: ratios of medians of interleaved pairs of one run.",
        "",
    ]
    for path in sorted(out.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        machine = ", ".join(f"{key} {value}" for key, value in document["machine"].items())
        lines += [f"## {document['subject']}", "", f"{document['pairs']} pairs; {machine}.", ""]
        if document["subject"] in _HOLDS_WHERE:
            lines += [_HOLDS_WHERE[document["subject"]], ""]
        lines += ["| figure | asked | measured | |", "|---|---|---|---|"]
        for row in document["figures"]:
            limit, found = row["limit"], row["measured"]
            asked = "" if limit is None else f"{limit['kind']} {limit['value']:g}"
            measured = "" if found is None else f"{_number(found)} {row['unit']}"
            note = row["detail"].get("why") or row["detail"].get("note", "")
            verdict = f"{row['verdict']}: {note}" if note else row["verdict"]
            lines.append(f"| {row['name']} | {asked} | {measured} | {verdict} |")
        lines.append("")
    path = out / "table.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def print_table(figures: Sequence[Figure]) -> None:
    """Print what was asked beside what was measured."""
    table = Table("figure", "asked", "measured", "", box=None)
    styles = {"passed": "green", "falls short": "bold red"}
    for figure in figures:
        note = figure.detail.get("why") or figure.detail.get("note", "")
        verdict = f"{figure.verdict}: {note}" if note else figure.verdict
        style = styles.get(figure.verdict, "dim")
        table.add_row(figure.name, figure.asked, figure.found, verdict, style=style)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) >= 10 else f"{value:.3g}"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in {"model name", "Model"}:
            return value.strip()
    return platform.machine()


def accelerator() -> str:
    """Return the name of this machine's, for people."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return "none"
    return torch.cuda.get_device_name() if device.type == "cuda" else device.type


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
