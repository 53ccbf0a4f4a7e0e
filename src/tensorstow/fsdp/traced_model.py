"""Traces a model as it is, with an example of what it is called with: for ``plan="auto"``."""

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from tensorstow.fsdp.traced_activations import Activations, loss_of, tracer_quiet, watch
from tensorstow.fsdp.traced_placement import TracedPlacement, count_of
from tensorstow.fsdp.units import ROOT, Unit, units_of

logger = logging.getLogger("tensorstow")


@dataclass(frozen=True, slots=True)
class ExampleBatch:
    """A micro-batch of one rank, as far as it is known."""

    model: nn.Module
    units: Sequence[Unit]
    batch: Any
    """The arguments of forward: a tuple, a mapping of keywords, or one; None: not known."""
    dtype: torch.dtype | None
    """The dtype of forward and backward; None: the parameters' own."""
    given_tokens: int | None
    """The ``tokens=`` of ``stow``; None: not set."""

    @property
    def tokens(self) -> int | None:
        """Return its tokens, or its samples if no tensor in it holds integers."""
        if self.given_tokens is not None or self.batch is None:
            return self.given_tokens
        return count_of(self.batch)[1]

    def trace(self, placed: TracedPlacement) -> Activations | None:
        """Return the activations and operations; None: the batch is not known.

        None, and a line in the log, if the model cannot be traced: it cannot be copied, or its
        operations depend on values.
        """
        if self.batch is None:
            return None
        try:
            with tracer_quiet(), FakeTensorMode():
                return self._trace(placed)
        except Exception as error:  # noqa: BLE001  # any that a model's own code raises
            reason = (str(error) or type(error).__name__).splitlines()[0]
            logger.warning(
                "activations=%r is not tried: batch= cannot be traced: %s", placed.placement, reason
            )
            return None

    def _trace(self, placed: TracedPlacement) -> Activations:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        # deepcopy skips tensors in the memo: this takes no memory, whatever the model's size.
        module = copy.deepcopy(self.model, {id(tensor): self._empty(tensor) for tensor in tensors})
        inputs = tree_map(
            lambda x: self._empty(x) if isinstance(x, torch.Tensor) else x, self.batch
        )
        units = units_of(
            module, [module.get_submodule(u.name) for u in self.units if u.name != ROOT]
        )

        def train() -> None:
            if isinstance(inputs, Mapping):
                output = module(**inputs)
            else:
                output = module(*inputs) if isinstance(inputs, tuple) else module(inputs)
            torch.autograd.backward(loss_of(output))

        return watch(module, placed, train, units)

    def _empty(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor without memory, in the dtype that is computed in."""
        floats = self.dtype is not None and tensor.is_floating_point()
        kept_as = self.dtype if floats else tensor.dtype
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kept_as, device="cpu")
        if not isinstance(tensor, nn.Parameter):
            return empty
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
