"""A step of transformers' Trainer with our optimizer against the same loop by hand.

Both train the seed example (GPT-2), one in the place of the other: the loop by hand takes its turns
inside the Trainer's run, when a step of it has ended, and each waits for its last writes before
the other goes on. A turn's first step is not counted, for it finds the disk at rest.
"""

import gc
import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import (
    Figure,
    Settings,
    at_most,
    exactly,
    not_available,
    ratio,
    use_all_cores,
)


def figures(settings: Settings) -> Iterator[Figure]:
    """Train by each way, the Trainer and the loop in turns, and compare."""
    missing = [n for n in ("transformers", "accelerate") if importlib.util.find_spec(n) is None]
    if missing:
        yield not_available("trainer", None, f"{missing[0]} is not installed")
        return
    from benchmarks.cpu.trainer_turns import WAYS, Race  # noqa: PLC0415  # imports transformers

    use_all_cores()
    for way in WAYS:
        with tempfile.TemporaryDirectory(dir=settings.scratch(4 << 30)) as folder:
            race = Race(way, Path(folder), quick=settings.quick)
            race.run(turns=max(1, settings.pairs // 3))
            title = f"GPT-2, {way.name}: a step of the Trainer / of the loop by hand"
            yield ratio(title, at_most(1.02), race.samples(), "Trainer", "loop")
            differ = race.parameters_that_differ()
            yield Figure(f"GPT-2, {way.name}: parameters that differ", exactly(0), differ, "")
            race.close()
        gc.collect()
