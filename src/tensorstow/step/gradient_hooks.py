"""Autograd hooks that are called when a parameter's gradient has been accumulated."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

OnGradient = Callable[[torch.Tensor], None]


class GradientHooks:
    """Hooks on parameters, removed with this object."""

    def __init__(self, on_gradient: OnGradient) -> None:
        """Begin with none; ``on_gradient`` is called with the parameter."""
        self._on_gradient = on_gradient
        self._handles: list[Any] = []
        self._frozen: list[torch.Tensor] = []
        weakref.finalize(self, _remove, self._handles)

    def add(self, parameter: torch.Tensor) -> None:
        """Register a hook on ``parameter``; if it is frozen, ``update`` does so once it is not."""
        self._frozen.append(parameter)
        self.update()

    def update(self) -> None:
        """Register hooks on parameters that have been unfrozen."""
        still: list[torch.Tensor] = []
        for parameter in self._frozen:
            if parameter.requires_grad:
                register: Any = parameter.register_post_accumulate_grad_hook
                self._handles.append(register(self._on_gradient))
            else:
                still.append(parameter)
        self._frozen = still

    def clear(self) -> None:
        """Remove all hooks. Idempotent."""
        _remove(self._handles)
        self._frozen.clear()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
