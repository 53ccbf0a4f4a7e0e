"""Pauses Python's garbage collector while many long-lived objects are created."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector inside the block.

    Importing torch and transformers creates a million objects, none of which is freed. Scanning
    them again and again would take a sixth of the time of `tensorstow plan`.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
