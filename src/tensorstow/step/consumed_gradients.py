"""Takes gradients under ``overlap="backward"`` as they become final, and frees them.

[Note: Final] A parameter's gradient is final when autograd has accumulated it in the last backward
of the step. Which backward is the last is known by counting (``accumulation_steps``) or by the
context that the others run in. Gradients of parameters that took part in fewer of them are final
when ``step()`` is called.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tensorstow.base.errors import OptionError
from tensorstow.io.device_link import DeviceEvent
from tensorstow.tensors.consumed_gradient import WAYS_OUT, ConsumedGradient, refuse_used
from tensorstow.tensors.dtensor import gradient_in_order, gradient_on_its_way, order_of, shard_of

_WORTH_ASKING = 1 << 20
"""So many bytes of gradients, before it is asked which are still needed."""


@torch.inference_mode(mode=False)
@torch.enable_grad()
def newest_backward() -> int:
    """Return the number of a backward that begins now: those before it have lower ones."""
    numbers: list[int] = []
    one = torch.ones((), device="cpu", requires_grad=True)
    two = one + one
    register: Any = two.register_hook
    register(lambda _: numbers.append(torch._C._current_graph_task_id()))  # noqa: SLF001
    torch.autograd.grad(two, one)
    return numbers[0]


class ConsumedGradients:
    """Which gradients of the step were handed over, and the memory of those still needed."""

    def __init__(self, accumulation_steps: int, is_published: Callable[[int], bool]) -> None:
        """Hold a gradient until ``is_published`` of its parameter's number."""
        if accumulation_steps < 1:
            message = f"accumulation_steps={accumulation_steps} was given: it is at least 1."
            raise OptionError(message)
        self._accumulation_steps = accumulation_steps
        self._is_published = is_published
        self._counts: dict[int, int] = {}
        self._accumulating = 0
        self._backward: int | None = None
        self._held: list[tuple[int, torch.Tensor]] = []
        self._buffers: dict[int, int] = {}
        """Bytes of the memory behind ``_held``, by address: gradients may share a buffer."""
        self._bytes = 0
        """Their sum."""
        self._needed = 0
        """How many were still needed when that was last asked."""
        self._new_bytes = 0
        """Of those that came since."""
        self.most_bytes = 0
        """Of gradients that were handed over and still needed, at once."""
        self._placeholders: list[tuple[torch.Tensor, ConsumedGradient]] = []
        self.arrived: list[int] = []
        """Numbers of parameters, in the order in which their gradients became final."""

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Take no gradient inside for final: more will be added to it."""
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1

    def is_final(self, number: int) -> bool:
        """Count one more gradient of a parameter; return whether it was the last of the step.

        Raises OptionError where a second backward adds to a step whose updates have begun.
        """
        if self._accumulating:
            return False
        self._counts[number] = self._counts.get(number, 0) + 1
        if self._counts[number] < self._accumulation_steps:
            return False
        # What torch calls a graph task is one call of backward; a reentrant checkpoint has its own.
        task = torch._C._current_graph_task_id()  # noqa: SLF001
        if self._backward is None:
            self._backward = task
        elif self._backward != task:
            message = (
                "Gradients of one step came from two backward passes, and updates by the first have"
                ' begun. With overlap="backward" say accumulation_steps=, or run all but the last'
                " backward under `with optimizer.accumulate():`. Checkpointing with"
                " use_reentrant=True runs passes of its own: use use_reentrant=False, or"
                f' overlap="forward". {WAYS_OUT}'
            )
            raise OptionError(message)
        return True

    def hand_over(
        self,
        number: int,
        parameter: torch.Tensor,
        use: Callable[[torch.Tensor, DeviceEvent | None], None],
    ) -> None:
        """Take ``.grad`` away from ``parameter``, let ``use`` have it, and leave a placeholder."""
        gradient, copied = gradient_on_its_way(parameter)
        whole = parameter.grad
        if whole is None or gradient is None:
            return
        if isinstance(gradient, ConsumedGradient):
            refuse_used("A parameter")
        shard = shard_of(parameter)
        if copied is not None and order_of(shard) is not None:  # it may have to be copied
            copied.synchronize()
            copied = None
        # The tensor itself where it can be: while it lives, what it came down into is its own.
        plain = gradient.detach() if gradient.requires_grad else gradient
        contiguous = gradient_in_order(shard, plain)
        placeholder = ConsumedGradient(whole)
        parameter.grad = placeholder
        self._placeholders.append((parameter, placeholder))
        if self._is_worth_asking():
            self.let_go()
        self._hold(number, contiguous)
        self.most_bytes = max(self.most_bytes, self._bytes)
        self.arrived.append(number)
        use(contiguous, copied)

    def hold_back(self, window: int, wait_for_one: Callable[[Sequence[int]], bool]) -> None:
        """Return when gradients that are still needed have no more than ``window`` bytes.

        Or when ``wait_for_one``, given their parameters' numbers, the oldest first, cannot help it.
        """
        if self._bytes > window:
            self.let_go()
        while self._bytes > window and wait_for_one([n for n, _ in self._held]):
            self.let_go()

    def let_go(self) -> None:
        """Free gradients that nobody needs any more.

        Of any age: one may wait for another of its chunk, which comes at the end of backward.
        """
        held = [(n, g) for n, g in self._held if not self._is_published(n)]
        self._forget_held()
        for number, gradient in held:
            self._hold(number, gradient)
        self._needed, self._new_bytes = len(held), 0

    def _is_worth_asking(self) -> bool:
        """Return whether it is time to ask for all gradients which are still needed.

        To ask whenever one comes takes the square of their number, which would be most of backward
        where they are small and share a chunk.
        """
        is_grown = len(self._held) >= self._needed + self._needed // 4
        return is_grown or self._new_bytes >= _WORTH_ASKING

    def _hold(self, number: int, gradient: torch.Tensor) -> None:
        self._held.append((number, gradient))
        storage = gradient.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if address not in self._buffers:
            self._buffers[address] = nbytes
            self._bytes += nbytes
            self._new_bytes += nbytes

    def _forget_held(self) -> None:
        self._held, self._buffers = [], {}
        self._bytes = self._needed = self._new_bytes = 0

    @property
    def held(self) -> list[torch.Tensor]:
        """The gradients that were handed over and may still be read."""
        return [gradient for _, gradient in self._held]

    @property
    def untouched(self) -> bool:
        """Whether each gradient that was handed over still has its stand-in in ``.grad``."""
        return all(parameter.grad is placeholder for parameter, placeholder in self._placeholders)

    def take_back(self) -> None:
        """Take the stand-ins out of ``.grad``: their step has failed or is given up."""
        for parameter, placeholder in self._placeholders:
            if parameter.grad is placeholder:
                parameter.grad = None
        self._placeholders.clear()

    def restart(self) -> None:
        """Begin a new step: all gradients of the last one have been used."""
        self._counts.clear()
        self._forget_held()
        self._placeholders.clear()
        self._backward = None
        self.arrived = []
