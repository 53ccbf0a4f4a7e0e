"""Defers Python's signal handlers while a block must not be interrupted; stops runs at signals.

Python runs a handler between any two instructions of the main thread, and the handler may raise:
Ctrl-C does. Blocking a signal by its mask would not help, for the system then gives it to another
thread, and Python runs the handler in the main one all the same.
"""

import _signal  # type: ignore[import-not-found]  # signal.py wraps its results in enumerations
import os
import signal
import threading
import weakref
from collections.abc import Mapping
from types import FrameType
from typing import Any, Protocol

from tensorstow.base.errors import OptionError, abbreviated

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
        # Last: until all are replaced, a signal goes to its handler.
        self._deferring = True

    def __exit__(self, *exc: object) -> None:
        """Restore the handlers, and run those whose signals were received."""
        # First: a signal that comes from here on goes to its handler at once.
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


StopSignals = str | Mapping[str, int] | None
"""The name of a signal, or exit statuses by the names of signals."""


def read_stop_signals(value: object) -> dict[int, int]:
    """Return exit statuses by the numbers of signals; raise OptionError for other values."""
    status_of: object = {value: 0} if isinstance(value, str) else value
    if isinstance(status_of, Mapping) and all(
        type(status) is int and 0 <= status <= 255 and _number(name) is not None
        for name, status in status_of.items()
    ):
        statuses = {int(_number(name) or 0): status for name, status in status_of.items()}
        if len(statuses) == len(status_of):  # else two names are of one signal
            return statuses
    message = (
        f'stop_signals={abbreviated(value)} was given: use the name of a signal ("SIGTERM"), or a'
        ' dict of exit statuses by names ({"SIGTERM": 0, "SIGUSR1": 75}), of signals that others'
        " send: not SIGKILL, nor those of faults or children."
    )
    raise OptionError(message)


def _number(name: object) -> int | None:
    number = getattr(signal, name, None) if isinstance(name, str) else None
    if not isinstance(number, signal.Signals) or number not in _SIGNALS:
        return None
    return None if number in {signal.SIGCHLD, signal.SIGPIPE} else int(number)


class CommitRequests(Protocol):
    """An object whose flag requests a commit at the end of the current step."""

    requested: bool


class StopHandlers:
    """The handlers of one run, which request its last commit and raise nothing."""

    def __init__(self, statuses: Mapping[int, int], commits: CommitRequests) -> None:
        """Install a handler for each signal; ``statuses`` has the exit statuses."""
        self.status: int | None = None
        """The exit status of a signal that came."""
        self.ends_with: int | None = None
        """The exit status of all ranks, which end with the step that is being taken."""
        self._statuses = dict(statuses)
        self._commits = weakref.ref(commits)  # a handler stays as long as the process
        self._before: dict[int, Any] = {}
        self._is_closed = False
        self._process = os.getpid()
        if statuses and threading.current_thread() is not threading.main_thread():
            message = (
                "stop_signals= was given outside of the main thread, and Python handles signals"
                " there alone. Begin the run in the main thread, or leave it out; a loop of your"
                " own may call optimizer.request_commit() instead."
            )
            raise OptionError(message)
        for number in statuses:
            self._before[number] = signal.signal(number, self)

    @property
    def is_asked(self) -> bool:
        """Return whether a signal came, and the run has not ended yet."""
        return self.status is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Request a commit; after ``close``, do what was done before."""
        if self._ask(number):
            return
        before = self._before[number]
        while isinstance(before, StopHandlers):
            before = before._before[number]  # noqa: SLF001  # its own: of another run
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _ask(self, number: int) -> bool:
        """Request a commit of this run and of those whose handlers were there before."""
        before, commits = self._before[number], self._commits()
        is_alive = commits is not None and not self._is_closed and self._process == os.getpid()
        if commits is not None and is_alive:
            commits.requested, self.status = True, self._statuses[number]
        return (isinstance(before, StopHandlers) and before._ask(number)) or is_alive  # noqa: SLF001

    def end(self) -> None:
        """Raise SystemExit if the step that was just taken is the last one."""
        ends_with, self.ends_with = self.ends_with, None
        if ends_with is not None:
            self.status = None
            if (commits := self._commits()) is not None:
                commits.requested = False
            raise SystemExit(ends_with)

    def close(self) -> None:
        """Restore the handlers that were there, unless others have replaced these. Idempotent.

        In another thread than the main one they stay, and do what was done before.
        """
        self._is_closed = True
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            # Runs may end in any order: handlers of those that have ended are not put back.
            while isinstance(before, StopHandlers) and before._is_closed:  # noqa: SLF001
                before = before._before[number]  # noqa: SLF001, PLW2901
            if signal.getsignal(number) is self:
                # None: a handler that was not set from Python, which Python cannot put back.
                signal.signal(number, signal.SIG_DFL if before is None else before)
