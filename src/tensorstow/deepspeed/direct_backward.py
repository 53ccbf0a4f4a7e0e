"""What ``loss.backward()`` lacks of ``engine.backward(loss)``: the division by micro-batches."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from tensorstow.base.errors import BackwardError
from tensorstow.fsdp.module_hooks import tensors_of


class DirectBackward:
    """Divides gradients of a backward that the engine does not run, where that is enough.

    Args:
        micro_batches: The micro-batches of a step.
        needs_scale: Whether losses are multiplied by a loss scale.
        beside_backward: Whether updates run during backward, with gradients that are final.
        times: What gradients are multiplied by: the number of ranks, for a sum over them.
    """

    def __init__(
        self,
        micro_batches: int,
        *,
        needs_scale: bool,
        beside_backward: bool = False,
        times: int = 1,
    ) -> None:
        self.micro_batches = micro_batches
        """Those of a step; the engine may change them."""
        self._needs_scale = needs_scale
        self._beside_backward = beside_backward
        self._times = times
        self._is_engines = False
        self.is_scaled = False
        """Whether ``engine.scale`` has scaled the loss that is to be gone through backward."""

    @contextmanager
    def engines_own(self) -> Iterator[None]:
        """Return a context for a backward of the engine's, whose loss is divided and scaled."""
        self._is_engines = True
        try:
            yield
        finally:
            self._is_engines = False

    def watch(self, output: object) -> None:
        """Watch the tensors that a forward with gradients returned."""
        self.is_scaled = False
        if self._keeps_gradients and not self._needs_scale:
            return
        tensors = tensors_of(output)
        if any(map(is_functorch_wrapped_tensor, tensors)):  # torch.func's gradients are the user's
            return
        for tensor in tensors:
            watch: Any = tensor.register_hook
            watch(self._divide if len(tensors) == 1 else self._refuse)

    @property
    def _keeps_gradients(self) -> bool:
        """Whether a step is one micro-batch, averaged over ranks."""
        return self.micro_batches == 1 and self._times == 1

    def _divide(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if self._is_engines:
            return None
        if self._needs_scale and not self.is_scaled:
            message = (
                "Loss scaling is required for this configuration, but backward() was called"
                " directly without scaling the loss. Use engine.backward(loss), or"
                " engine.scale(loss).backward()."
            )
            raise BackwardError(message)
        if self._keeps_gradients:
            return gradient
        if self._beside_backward and self.micro_batches > 1:
            message = (
                "backward() was called directly, with gradient_accumulation_steps="
                f'{self.micro_batches} and overlap="backward" or "speculative": which micro-batch'
                " is the last of a step is known to engine.backward(loss) alone. Use that."
            )
            raise BackwardError(message)
        return gradient * self._times / self.micro_batches

    def _refuse(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if self._is_engines or self._keeps_gradients:
            return self._divide(gradient)
        # A loss that is computed of another output passes both, and would be divided twice.
        message = (
            "backward() was called directly, with gradient_accumulation_steps="
            f"{self.micro_batches}, gradients that are multiplied by {self._times}, and a"
            " model that returns several tensors: which of them the gradients are to be multiplied"
            " at is not known. Use engine.backward(loss)."
        )
        raise BackwardError(message)
