"""Traces of steps on an accelerator, for Perfetto and chrome://tracing: one file for each way.

    python -m benchmarks.accelerator.traces --out FOLDER [--size 1B] [--sequences 8]

Beside torch's profile of two steps stands what our pipeline did in the last one. A file that is
there is not made again.
"""

import argparse
import copy
import gzip
import importlib
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.accelerator.gpu import own_group, same_bits, ways_of
from benchmarks.accelerator.place import accelerator_here
from benchmarks.accelerator.rounds import batches_of
from benchmarks.accelerator.transformer import SHAPES, TINY, Decoder, made_by
from benchmarks.accelerator.ways import Site, Training, Way, let_go
from benchmarks.measure import Settings
from tensorstow.states.traffic import TraceEvent

_TESTS = Path(__file__).resolve().parents[2] / "tests"
_WARM_UP = 2
_STEPS = 2
_SCRATCH_BYTES = 1 << 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Trace every way that has no file yet; return 1 if one of ours could not be."""
    options = _parser().parse_args(arguments)
    if options.simulated:
        sys.path.append(str(_TESTS))
        importlib.import_module("simulated")
    place = accelerator_here()
    if place is None:
        sys.exit("torch.accelerator has no device here")
    first = made_by(place.device, TINY if options.quick else SHAPES[options.size])
    directory = Settings(1, options.quick).scratch(_SCRATCH_BYTES)
    site = Site(place, directory, 2 if options.quick else options.sequences)
    options.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    with ExitStack() as held:
        held.enter_context(same_bits())
        held.enter_context(own_group())
        for way in ways_of(options.size):
            path = options.out / f"{_file_name(way)}.json.gz"
            if way.disk_bytes or path.exists():
                continue
            try:
                _trace(way, site, first, path)
            except Exception as error:  # noqa: BLE001  # whatever an import or a compiler raises
                print(f"{way.name}: {type(error).__name__}: {error}", flush=True)
                failed += not way.may_fail
            let_go(place)
    return min(failed, 1)


def _trace(way: Way, site: Site, first: Decoder, path: Path) -> None:
    training = way.make(site, copy.deepcopy(first))
    try:
        seen, began = _profiled(training, site, first)
        ours = [] if training.trace is None else training.trace()
    finally:
        training.close()
    # Under its name when it is whole.
    part = path.with_name("part.json")
    seen.export_chrome_trace(str(part))
    document = json.loads(part.read_text(encoding="utf-8"))
    document["traceEvents"] += _events(ours, document["traceEvents"], began)
    with gzip.open(part, "wt", encoding="utf-8") as file:
        json.dump(document, file)
    part.replace(path)
    print(f"{way.name}: {path.name}, {path.stat().st_size} bytes", flush=True)


def _profiled(training: Training, site: Site, first: Decoder) -> tuple[profile, float]:
    """Return the profile of some steps, and ``time.monotonic()`` at the beginning of the first."""
    batches = iter(batches_of(site, first))
    for _ in range(_WARM_UP):
        training.step(next(batches))
    training.finish()
    activities = [ProfilerActivity.CPU]
    if site.place.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as seen:
        began = time.monotonic()
        for step in range(_STEPS):
            with record_function(_name_of(step)):
                training.step(next(batches))
        training.finish()
    return seen, began


def _events(
    ours: Sequence[TraceEvent], theirs: Sequence[dict[str, Any]], began: float
) -> Iterator[dict[str, Any]]:
    """Return our pipeline's events on torch's axis of time."""
    zero = min(float(event["ts"]) for event in theirs if event.get("name") == _name_of(0))
    for event in ours:
        yield {
            "name": f"{event.lane} {event.chunk}",
            "cat": "tensorstow",
            "ph": "X",
            "pid": "tensorstow",
            "tid": event.lane,
            "ts": zero + (event.start - began) * 1e6,
            "dur": (event.stop - event.start) * 1e6,
            "args": {"chunk": event.chunk, "bytes": event.nbytes},
        }


def _name_of(step: int) -> str:
    return f"step {step}"


def _file_name(way: Way) -> str:
    return re.sub(r"[^a-z0-9]+", "-", way.name.lower()).strip("-")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    parser.add_argument("--size", choices=[*SHAPES], default="1B", help="parameters (default 1B)")
    parser.add_argument("--sequences", type=int, default=8, help="of a batch (default 8)")
    parser.add_argument("--quick", action="store_true", help="a tiny model: does it run at all?")
    parser.add_argument("--simulated", action="store_true", help="the tests' accelerator")
    return parser


if __name__ == "__main__":
    sys.exit(main())
