"""``release`` and ``wake``: memory is given back between steps, and taken again.

[Note: Released] A server that generates on the same device, or in the same host memory, needs what
training holds between two phases of it. Weights and states stay where they are, on a lower tier:
what passes them on to computing goes, and comes again when it is used. So what cannot leave is
refused before anything changes, and weights can be read all the time. A step, a forward or anything
else that would take memory again raises an error until ``wake``.
"""

from collections.abc import Iterable
from typing import Any

import torch

from tensorstow.base.errors import OptionError
from tensorstow.base.sizes import format_bytes
from tensorstow.io.allocator import empty_cache
from tensorstow.memory.released_part import ReleasedPart
from tensorstow.optim.step_runner import StepRunner
from tensorstow.step.call_lock import CallLock
from tensorstow.step.param_table import ParamTable
from tensorstow.tensors.dtensor import computes_on_accelerator


class StateBuffers:
    """The memory that an optimizer's states pass through."""

    def __init__(self, params: ParamTable) -> None:
        self._params = params

    def check_release(self, *, host: bool) -> None:
        """Raise OptionError if states, or copies of weights, stay in ``host`` memory."""
        memory = self._params.memory()
        held = memory.ram_bytes + memory.host_weight_bytes
        if host and held:
            message = (
                f"release(host=True) was called, and {format_bytes(held)} of optimizer states and"
                ' copies of weights stay in CPU memory: create the optimizer with states="disk" and'
                " without ram_budget=; or call release(), for the device alone."
            )
            raise OptionError(message)
        if host and any(computes_on_accelerator(param.owner) for param in self._params.all()):
            message = (
                "release(host=True) was called for a model on an accelerator, for whose copies host"
                " memory stays pinned until close(): call release(), which gives the device's back."
            )
            raise OptionError(message)

    def release(self, *, host: bool) -> None:
        """Free the slots of an updater on the device, and the pages of the ring."""
        store = self._params.store
        for updater in self._params.update_router.updaters:
            updater.free_slots()
        if host:
            with store.pipeline.lock:  # no read ahead of a step begins in between
                store.pipeline.wait_idle(drop_ring=True)

    def wake(self) -> None:
        """Take the slots again; the ring's pages come when they are touched."""
        for updater in self._params.update_router.updaters:
            updater.take_slots()


class MemoryRelease:
    """Whether an optimizer and its model have given memory back, and what has."""

    def __init__(self, steps: StepRunner, params: ParamTable, call_lock: CallLock) -> None:
        """Begin awake, with the optimizer's own part."""
        self._steps = steps
        self._params = params
        self._call_lock = call_lock
        self.parts: list[ReleasedPart] = [StateBuffers(params)]
        """What gives memory back: a model comes later."""

    def release(self, *, host: bool) -> None:
        """Settle all work, then give memory back; repeated calls give back what is left."""
        _refuse_gradients(self._steps.contents.parameters())
        for part in self.parts:
            part.check_release(host=host)
        self._steps.wait_idle()
        self._params.store.pipeline.wait_idle()
        # From here on no call may take memory again, also if a part fails to give its own back.
        self._call_lock.is_released = True
        for part in self.parts:
            part.release(host=host)
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        if host:
            empty_cache()

    def wake(self) -> None:
        """Take memory again; no-op if nothing is released."""
        if self._call_lock.is_released:
            for part in self.parts:
                part.wake()
            # Last: after an error the optimizer is still released, and ``wake()`` can be repeated.
            self._call_lock.is_released = False


def _refuse_gradients(parameters: Iterable[Any]) -> None:
    """Raise OptionError in a backward, or while gradients wait for a step."""
    reason = None
    if torch._C._current_graph_task_id() != -1:  # noqa: SLF001
        reason = "while backward runs: let it end, call step() and zero_grad()"
    elif any(p.grad is not None for p in parameters):
        reason = (
            "while gradients wait for a step, or are those of the last one: call step() after all"
            " micro-batches, and zero_grad()"
        )
    if reason is not None:
        message = f"release() was called {reason} first."
        raise OptionError(message)
