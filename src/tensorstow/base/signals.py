"""Defers Python's signal handlers while a block runs that must not be interrupted.

Python runs a handler between any two instructions of the main thread, and the handler may raise:
Ctrl-C does. Blocking a signal by its mask would not help, for the system then gives it to another
thread, and Python runs the handler in the main one all the same.
"""

import _signal  # type: ignore[import-not-found]  # signal.py wraps its results in enumerations
import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = sorted(
    {number for number in signal.valid_signals() if number < 32}
    - {signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE}
    - {signal.SIGILL, signal.SIGABRT, signal.SIGTRAP}
)


class SignalsDeferred:
    """A block in which no Python handler runs; handlers of signals that came run after it.

    What they raise is raised there. In other threads than the main one it is not needed and changes
    nothing. A handler that stays replaced, by an interrupt on the way in or out, passes signals on.
    """

    def __init__(self) -> None:
        """Begin with nothing replaced."""
        self._handlers: dict[int, Any] = {}
        self._came: list[int] = []
        self._deferring = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Stand in for a handler."""
        if self._deferring:
            self._came.append(number)
        else:
            self._handlers[number](number, frame)

    def __enter__(self) -> None:
        """Replace the handlers; one that is due runs before the block begins."""
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            # This runs in every step: most signals have no handler, and are looked at once.
            for number in [n for n in _SIGNALS if callable(_signal.getsignal(n))]:
                handler = _signal.getsignal(number)
                if isinstance(handler, SignalsDeferred):
                    if handler._deferring:  # noqa: SLF001  # its own: a block within a block
                        continue
                    handler = handler._handlers[number]  # noqa: SLF001
                if callable(handler):
                    self._handlers[number] = handler
                    _signal.signal(number, self)
        except BaseException:
            self._put_back()
            raise
        self._deferring = True

    def __exit__(self, *exc: object) -> None:
        """Restore the handlers, and run those whose signals were received."""
        self._deferring = False
        raised = self._put_back()
        for number in dict.fromkeys(self._came):
            try:
                signal.raise_signal(number)
            except BaseException as by_handler:  # noqa: BLE001  # raised below: the others run too
                raised = raised or by_handler
        if raised is not None:
            raise raised

    def _put_back(self) -> BaseException | None:
        """Restore the handlers; return the error that one of them raised, if any."""
        raised: BaseException | None = None
        for number, handler in self._handlers.items():
            for _ in range(2):  # a handler that is due runs, and may raise, before the exchange
                try:
                    _signal.signal(number, handler)
                    break
                except BaseException as by_handler:  # noqa: BLE001  # raised by the caller
                    raised = raised or by_handler
        return raised
