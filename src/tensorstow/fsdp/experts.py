"""Reads of the routed experts alone, of modules that have the weights of all experts of a layer.

[Note: Routed experts] Of such a module in files on disk only the experts are read that tokens are
routed to. Which they are is known when the module is called, so they are not read ahead of that. In
training a backward has the gradients of the outputs of one call: it needs the experts of that call
again, which are read ahead of it if it is the last one. The rest of the buffer has no values.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr

from tensorstow.base.errors import OptionError
from tensorstow.fsdp.module_hooks import tensors_of
from tensorstow.fsdp.units import Unit
from tensorstow.memory.buffer_pool import PooledBuffer
from tensorstow.nn.routed_experts import ROUTED, is_of_experts, routed_experts


def take_experts(unit: Unit, names: Collection[str] | None = None) -> list[Unit]:
    """Take the modules of experts out of a unit, and return them as units of their own.

    ``names``: the parameters that may be taken; None: all of the unit. Parameters that another
    module uses too are not taken: a tied one, or peft's that adds an adapter to whole stacks.
    """
    modules = list(unit.module.modules())
    users = Counter(id(p) for m in modules for p in m._parameters.values())  # noqa: SLF001
    adapted = {id(getattr(module, "base_layer", None)) for module in modules}
    taken: list[Unit] = []
    for name, module in unit.module.named_modules():
        mine = {id(p) for p in module.parameters()}
        parameters = {n: p for n, p in unit.parameters.items() if id(p) in mine}
        is_apart = id(module) not in adapted and all(users[p] == 1 for p in mine)
        may_take = is_apart and (names is None or parameters.keys() <= set(names))
        if name and may_take and len(parameters) == len(mine) and is_of_experts(module):
            whole_name = f"{unit.name}.{name}" if unit.name else name
            taken.append(Unit(whole_name, module, parameters))
            for parameter in parameters:
                del unit.parameters[parameter]
    return taken


def validate_routing(module: nn.Module, used: Collection[int], read: Collection[int]) -> None:
    """Raise OptionError if a call ``used`` experts that were not ``read`` for it."""
    unread = sorted(set(used) - set(read))
    if unread:
        message = (
            f"{ROUTED} of a {type(module).__name__} has experts {unread} after the call, which it"
            " did not have when their weights were read: a hook of the module, or its forward, has"
            f" changed it. Change {ROUTED} before the module is called, such as in its router."
        )
        raise OptionError(message)


class RoutedReads:
    """Hooks of one module of frozen experts: each call, and its backward, reads what it uses."""

    def __init__(self, module: nn.Module, buffer: PooledBuffer) -> None:
        """Read into ``buffer``, which FSDP2 has pinned before: its hooks come first."""
        self._buffer = buffer
        self._called: frozenset[int] = frozenset()
        """The experts of the last call."""
        self._first_node = 0
        """Autograd's number of the first node that the last call may make."""
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after, with_kwargs=True)

    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001  # a graph has no reads
    def _before(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Read the experts of a call."""
        self._called, self._first_node = routed_experts(module, args, kwargs), _get_sequence_nr()
        self._read(self._called)

    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def _after(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        output: object,
    ) -> None:
        """Have the backward of the call read them too; a recomputed one is part of a backward.

        A tensor that is older than the call is only passed on: its gradient needs no experts.
        """
        # The hooks below need the experts of this call, and the next call replaces the attribute.
        experts = self._called
        validate_routing(module, routed_experts(module, args, kwargs), experts)
        is_recomputed = torch._C._current_graph_task_id() != -1  # noqa: SLF001
        outputs: Any = tensors_of(output) if torch.is_grad_enabled() and not is_recomputed else []
        for tensor in outputs:
            if tensor.grad_fn._sequence_nr() >= self._first_node:  # noqa: SLF001
                self._buffer.upcoming = experts
                tensor.register_hook(lambda _: self._read(experts))

    def _read(self, experts: frozenset[int]) -> None:
        self._buffer.read(experts)
        # This use has its experts, and those of the next use are not known yet.
        self._buffer.upcoming = frozenset()


def forget_experts_before_forward(model: nn.Module, buffers: Collection[PooledBuffer]) -> None:
    """Let a forward read no experts ahead that a backward of the last one would have used."""

    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def forget(*_: object) -> None:
        for buffer in buffers:
            buffer.upcoming = frozenset()

    # FSDP2's own hook gathers, and reads ahead for that: ``forget`` has to run before it.
    model.register_forward_pre_hook(forget, prepend=True)
