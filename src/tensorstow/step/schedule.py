"""The interface of schedules, and the plain one: updates inside ``step()``.

[Note: Schedules] All of them take the same steps by the same path ([Note: Feeds]). They differ only
in when a weight is published. The first three publish it before it is read.

none      ``step()`` returns when every weight is new (``Synchronous``).
forward   ``step()`` returns at once; a read of a weight waits for it (``ForwardOverlap``, and
          [Note: Unpublished]).
backward  a step is open while backward runs; each gradient is offered when it is final, and
          ``step()`` closes it and waits for the rest (``BackwardOverlap``).
delayed   ``step()`` returns at once; the next forward and backward read the old weights, and the
          next ``step()`` publishes the new ones (``DelayedOverlap``).
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch

from tensorstow.base.errors import OptionError
from tensorstow.states.memory import StateMemory
from tensorstow.states.native_pipeline import poisoning
from tensorstow.step.legal_calls import Phase
from tensorstow.step.managed_param import ManagedParam, StepPlan, publish_weight
from tensorstow.step.norms import KeptNorms
from tensorstow.step.param_table import ParamTable
from tensorstow.step.step_plan import States, record_step


class Schedule:
    """Decides when the updates of one optimizer run. Most begin a step in ``step()``."""

    begins_early: ClassVar[bool] = False
    """Whether a step begins with its first final gradient, by ``begin`` and ``on_gradient``."""

    def __init__(self, params: ParamTable) -> None:
        """Schedule the updates of ``params``."""
        self._params = params
        self.norms: KeptNorms | None = None
        """Norms of gradients that are used before ``step()``; None: they are not needed."""
        self.beside_backward: Callable[[], None] | None = None
        """Called with each gradient that autograd has accumulated, if none begins the step."""

    # --- state of a step ---

    @property
    def phase(self) -> Phase:
        """Where the optimizer is in its step ([Note: Legal calls]); never USED."""
        return Phase.BETWEEN  # updates under way can be waited for

    @property
    def why_broken(self) -> str | None:
        """Why the open step cannot be completed; None if it can."""
        return None

    @property
    def is_open(self) -> bool:
        """Whether updates of a step have begun that ``step()`` has not ended."""
        return False

    @property
    def held(self) -> Sequence[torch.Tensor]:
        """Gradients that were taken out of ``.grad`` and may still be read."""
        return ()

    def counted_in(self, memory: StateMemory) -> StateMemory:
        """Return ``memory`` with what the schedule holds: gradients at their peak, and weights."""
        return memory

    # --- a step ---

    def is_final(self, number: int) -> bool:
        """Count one more gradient of a parameter; return whether it is used before ``step()``."""
        del number
        return False

    def is_given_up(self) -> bool:
        """Return whether the step of the backward that calls this hook was aborted."""
        return False

    def break_off(self) -> None:
        """Mark the open step as broken: a gradient was not taken."""

    def begin(self, plan: StepPlan) -> None:
        """Begin a step without gradients."""
        del plan
        raise _only_early(self)

    def on_gradient(self, param: ManagedParam) -> None:
        """Take a final gradient of the open step."""
        del param
        raise _only_early(self)

    def step(self, plan: StepPlan, states: States) -> None:
        """Take the step of ``plan``, or end the one that is open with the gradients of ``plan``.

        Args:
            plan: The updates, with their gradients and scalars.
            states: ``optimizer.state``, in which steps are counted.
        """
        raise NotImplementedError

    def wait(self, ids: Iterable[int] | None = None) -> None:
        """Return once the parameters with these ids, or all, may be read."""

    def finish(self) -> None:
        """End the step under way: it is the last one."""

    def abort(self) -> None:
        """Drop the step that is open or under way: its store is closed, or has failed."""
        self._params.update_router.step_path.abort()

    # --- what users do with gradients ---

    def accumulate(self) -> AbstractContextManager[None]:
        """Return a context in which no gradient is final."""
        return nullcontext()

    def drop_gradients(self, parameters: Iterable[torch.Tensor], *, to_zero: bool) -> None:
        """Stop tracking gradients that are about to be dropped, or set ``to_zero``."""
        del parameters
        if to_zero:
            self.wait()  # updates may still read them

    def check_clipping(self) -> None:
        """Raise OptionError if gradients are used before their norm is known."""

    def check_scaling(self, factor: float, *, may_skip: bool) -> None:
        """Raise OptionError if gradients would have to be scaled or skipped after their use."""

    def check_unchanged(self) -> None:
        """Raise OptionError if hyper-parameters or gradients changed since the step began."""


def _only_early(schedule: Schedule) -> OptionError:
    return OptionError(f"{type(schedule).__name__} got a gradient before step().")


class Synchronous(Schedule):
    """``overlap="none"``: updates run inside ``step()``."""

    def step(self, plan: StepPlan, states: States) -> None:
        """Return when every weight is new."""
        path = self._params.update_router.step_path
        path.begin(plan)
        with poisoning(self._params.store.pipeline):
            path.close()
            path.wait()
        params = [update.param for update in plan.updates]
        record_step(params, plan.counts, states, commits=plan.commits)
        for param in params:
            publish_weight(param)
