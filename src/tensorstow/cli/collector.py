"""Python's garbage collector, kept off while what is made is kept."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Let no garbage be collected inside.

    Importing torch and transformers makes a million objects, none of which goes: the collector
    would look at all of them again and again, which is a sixth of what `tensorstow plan` takes.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
