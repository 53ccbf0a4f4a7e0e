"""``Recompute``: blocks that keep only their inputs, and run forward again in backward."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tensorstow.base.errors import OptionError

_CACHES = ("past_key_values", "past_key_value", "layer_past")
"""Keywords by which models of transformers pass a block its cache of keys and values."""


class Recompute:
    """Runs the forwards of some modules through ``torch.utils.checkpoint``.

    Only a module's ``forward`` is wrapped: its hooks, such as FSDP2's, run once for each forward.
    When backward reaches a unit of FSDP2, its weights are unsharded before forward runs again. None
    of its gradients exists then, so no update during backward has begun.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Wrap the forwards of ``modules``, none of which is inside another one."""
        self._wrapped: list[tuple[nn.Module, partial[Any], bool]] = []
        self._switch = _Switch()
        for module in modules:
            was_set = "forward" in vars(module)  # on the object, by another wrapper
            untyped: Any = module  # mypy rejects an assignment to a method
            wrapper: Any = partial(_run, self._switch, module.forward)
            # Callers look at the names of forward's arguments; a partial shows those of ``_run``.
            wrapper.__signature__ = inspect.signature(module.forward)
            untyped.forward = wrapper
            self._wrapped.append((module, wrapper, was_set))

    def close(self) -> None:
        """Remove the wrappers. Idempotent; the backward of existing graphs still works."""
        self._switch.is_on = False
        for module, wrapper, was_set in self._wrapped:
            if vars(module).get("forward") is not wrapper:
                continue  # another wrapper was set later, and calls this one
            untyped: Any = module
            del untyped.forward
            if was_set:
                untyped.forward = wrapper.args[1]
        self._wrapped = []


@dataclass(slots=True)
class _Switch:
    is_on: bool = True


def _run(
    switch: _Switch,
    forward: Callable[..., Any],
    *args: Any,  # noqa: ANN401
    **keywords: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    if not switch.is_on:
        return forward(*args, **keywords)
    if torch.is_grad_enabled() and any(keywords.get(name) is not None for name in _CACHES):
        message = (
            'activations="recompute": a block was given a cache of keys and values, which it would'
            " fill twice. Set model.config.use_cache = False for training."
        )
        raise OptionError(message)
    return checkpoint(forward, *args, use_reentrant=False, **keywords)
