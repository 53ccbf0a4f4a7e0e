"""One call of an optimizer at a time: other threads wait, calls from inside raise an error.

[Note: Calls] A call of another thread waits until the one under way is over. A call from within
one, which a signal handler makes, or a function that the optimizer calls (``extra``), cannot wait:
it raises an error before anything changes. It may come between any two instructions, so
locks, which are acquired and released atomically, record what is under way, and not a flag.

[Note: Hooks] Autograd calls hooks of parameters on an accelerator in that device's thread, and of
those in host memory in the thread that called backward: two hooks of one optimizer come at once, in
any order, and finalizers run in either. So:

* A hook that reads or changes Python state is a call from its first instruction on; hooks of other
  threads wait for it. A hook that only starts reading ahead is no call and waits for nothing.
* Inside, native code may be waited for: it needs neither the GIL nor the lock of a call. What waits
  for a gradient that is still to come waits for a hook, which waits for the call: never inside.
* The current stream and autograd's modes are per thread. A gradient's event is recorded in its own
  hook. A wait of one stream does not order another: each stream joins, even if one has before.
* ``_current_graph_task_id`` is one for all hooks of a backward, whichever thread they are in, and
  -1 outside. Callbacks of ``queue_callback`` run in the thread that ends it, when all hooks are
  over; not at all if one has raised.
* Signals: Python runs handlers in the main thread, so they never interrupt a hook in the device's
  thread. A hook in the main thread may be interrupted, and if it is not a call, a handler may
  commit during it: it holds a lock only while signals are deferred.
* If a hook raises, backward raises at once, while a hook in the other thread may still be
  running or about to. It runs after the caller's next call; the number of its backward shows
  whether its step was aborted (``BackwardOverlap.is_given_up``).
* A function of the user's that runs inside a call may call backward itself. Its hooks in the
  device's thread are part of that call, which waits for them: they raise the error that they would
  in its own thread; hooks that only wait for weights go on. Autograd gives its threads the local
  objects of the thread that called backward, among them the number of the call.
* Finalizers run in any thread, inside hooks too: they take only locks of objects that are freed
  with them.
"""

import ctypes
import itertools
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar, cast

import torch

from tensorstow.base.errors import CommitError, OptionError

_P = ParamSpec("_P")
_T = TypeVar("_T")
_COMMITS = frozenset({"commit", "snapshot"})
_READS = frozenset({"state_dict"})
"""Calls that a function of the user's may make: they change nothing."""
_AVERAGED = frozenset({"averaged", "zero_grad", "snapshots"})
"""Calls that are legal while weights are their averages."""
_ASLEEP = frozenset({"release", "wake", "close", "zero_grad", "snapshots"})
"""Calls that need nothing of what ``release()`` has given back, or take it again."""
_numbers = itertools.count(1)


class CallLock:
    """The lock of an optimizer's public calls: one at a time."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._thread = threading.RLock()
        """Held by the thread that is in a call."""
        self._call = threading.Lock()
        """Held by the call: a second one of that thread finds it taken."""
        self._name = ""
        self._number = 0
        """The number of the newest call, greater than those of all before."""
        self.allows_reads = False
        """True while a user's function runs inside a call: it may read."""
        self.is_averaged = False
        """True while the averages of weights are in their place, and calls would take them for
        weights."""
        self.is_released = False
        """True from ``release()`` to ``wake()``."""

    def alone(self) -> AbstractContextManager[object]:
        """Wait for the calls of other threads, and keep them out; within a call, be part of it."""
        if self._is_inside():
            return nullcontext()
        # In a fork a thread that no longer exists may hold the lock for ever.
        return self._thread if self._owner == os.getpid() else nullcontext()

    def run(self, name: str, act: Callable[[], _T]) -> _T:
        """Run ``act`` as the call ``name`` and return its result; wait for calls of other threads.

        If this thread is in a call already, raises CommitError for a commit, else OptionError.
        """
        # In a fork a thread that no longer exists may hold the locks.
        if self._owner != os.getpid():
            return act()
        # A hook in the device's thread is part of the call that waits for it: it must not wait too.
        if self._is_inside():
            return self._within(name, act)
        # Locks in `with` only: no instruction lies between acquiring one and entering the block.
        with self._thread:
            # This thread holds the lock of threads, so the call that is under way is its own.
            if self._call.locked():
                return self._within(name, act)
            if self.is_averaged and name not in _AVERAGED:
                raise _refusal_of_averages(name)
            if name not in _ASLEEP:
                self.check_awake(f"{name}()")
            with self._call:
                self._name = name
                self._number = next(_numbers)
                gradients, outer = torch.is_grad_enabled(), _calls_of_thread()
                try:
                    _tell_backward((*outer, self._number))
                    return act()
                finally:  # an interrupt in torch.no_grad() itself would leave them off for good
                    _tell_backward(outer)
                    torch.set_grad_enabled(gradients)

    def check_awake(self, call: str) -> None:
        """Raise OptionError between ``release()`` and ``wake()``."""
        if self.is_released:
            refuse_released(call)

    def _within(self, name: str, act: Callable[[], _T]) -> _T:
        if self.allows_reads and name in _READS:
            return act()
        raise _refusal(name, self._name)

    def _is_inside(self) -> bool:
        """Return whether this thread is in the call, or works on a backward that was called in it.

        An interrupt may leave a thread the number of a call that is over, so the lock counts too.
        """
        return self._call.locked() and self._number in _calls_of_thread()

    def allowing_reads(self, extra: Callable[[], _T]) -> Callable[[], _T]:
        """Return the user's function ``extra``, which may read the optimizer while it runs."""

        def ask() -> _T:
            self.allows_reads = True
            try:
                return extra()
            finally:
                self.allows_reads = False

        return ask


_KEY = "tensorstow: calls"
# torch has no public way to pass an object to autograd's threads.
_torch: Any = torch._C  # noqa: SLF001


def _calls_of_thread() -> tuple[int, ...]:
    """Return the numbers of the calls that this thread, or the caller of its backward, is in."""
    if not _torch._is_key_in_tls(_KEY):  # noqa: SLF001
        return ()
    numbers: tuple[int, ...] = _torch._get_obj_in_tls(_KEY)  # noqa: SLF001
    return numbers


def _tell_backward(numbers: tuple[int, ...]) -> None:
    """Pass the numbers of this thread's calls on to the threads of a backward that it starts."""
    if numbers or not hasattr(_torch, "_remove_obj_from_tls"):  # which torch 2.13 has
        # Such a torch drops a reference that it never took, so it is given one.
        if _STEALS:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(numbers))
        _torch._stash_obj_in_tls(_KEY, numbers)  # noqa: SLF001
    elif _torch._is_key_in_tls(_KEY):  # noqa: SLF001
        # A thread that ends while it holds a Python object could wait for the GIL for ever.
        _torch._remove_obj_from_tls(_KEY)  # noqa: SLF001


def _steals() -> bool:
    """Return whether torch keeps a thread's object without a reference, as 2.11 does.

    When another object takes its place, torch drops a reference all the same.
    """
    probe: list[None] = []
    before = sys.getrefcount(probe)
    _torch._stash_obj_in_tls(_KEY, probe)  # noqa: SLF001
    steals = sys.getrefcount(probe) == before
    if steals:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return steals


_STEALS = _steals()
# The probe is still in this thread's place for the numbers.
_tell_backward(())


class _HasCallLock(Protocol):
    _call_lock: CallLock


_Self = TypeVar("_Self", bound=_HasCallLock)


def exclusive_call(
    name: str,
) -> Callable[[Callable[Concatenate[_Self, _P], _T]], Callable[Concatenate[_Self, _P], _T]]:
    """Make a method the call ``name`` ([Note: Calls])."""

    def decorate(
        method: Callable[Concatenate[_Self, _P], _T],
    ) -> Callable[Concatenate[_Self, _P], _T]:
        @wraps(method)
        def call(self: _Self, *args: _P.args, **kwargs: _P.kwargs) -> _T:
            return self._call_lock.run(name, lambda: method(self, *args, **kwargs))

        return cast("Callable[Concatenate[_Self, _P], _T]", call)

    return decorate


def _refusal_of_averages(name: str) -> OptionError | CommitError:
    kind = CommitError if name in _COMMITS else OptionError
    return kind(
        f"{name}() was called inside `with optimizer.averaged(model):`, where the weights are their"
        " averages: nothing was done. Call it after the block; tensorstow.save_safetensors(model,"
        " directory) and model.state_dict() inside it save the averages."
    )


def refuse_released(call: str, *_: object) -> NoReturn:
    """Raise OptionError for a call between ``release()`` and ``wake()``."""
    message = (
        f"{call} was called between optimizer.release() and optimizer.wake(): the memory that it"
        " needs was given back. Call wake() first."
    )
    raise OptionError(message)


def _refusal(name: str, outer: str) -> OptionError | CommitError:
    reason = f"{name}() was called inside {outer}() by the same thread, as by a signal handler"
    if name in _COMMITS:
        return CommitError(
            f"{reason}: nothing was committed. Call optimizer.request_commit() instead, which sets"
            " a flag: the commit is made when the step is over."
        )
    return OptionError(
        f"{reason} or a function that the optimizer calls, and it needs the optimizer at rest. Set"
        " a flag instead and make the call in the training loop (for commits: request_commit())."
    )
