"""An exception or a signal at the n-th place where Python looks for signals in tensorstow."""

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt(BaseException):
    """What a handler raises, as Ctrl-C raises KeyboardInterrupt."""


def raise_it() -> None:
    raise Interrupt


def by_signal() -> None:
    signal.raise_signal(signal.SIGUSR1)


@contextmanager
def handler(act: Callable[[], object]) -> Iterator[None]:
    """Let SIGUSR1 ``act`` inside."""
    before = signal.signal(signal.SIGUSR1, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def at_event(number: int, happen: Callable[[], None], act: Callable[[], object]) -> bool:
    """Run ``act``, and let something ``happen`` at the event of this number; return if there was.

    Events are the begins and ends of calls that tensorstow makes, in their order: that is where
    Python looks for signals. Raises what ``act`` does.
    """
    seen = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal seen
        file = frame.f_code.co_filename
        # Not between a call and its begin in C: a lock is given back whatever comes.
        if "/tensorstow/" not in file or file.endswith("signals.py") or event == "c_call":
            return
        seen += 1
        if seen == number:
            sys.setprofile(None)
            happen()

    # A finalizer that the collector runs meanwhile would swallow what is raised in it.
    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    return seen >= number
