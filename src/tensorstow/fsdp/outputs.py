"""What modules return: the tensors in it are where FSDP2's backward of a unit begins.

[Note: Outputs] FSDP2 looks for tensors in lists, tuples, dicts and dataclasses that a unit returns,
and gathers the unit's weights when a gradient comes to one. It does not see a tensor in any other
object: backward would go through the unit without its weights. Such tensors are searched for here
and shown to it.

Weights are let go of behind a unit's backward, so what autograd records in a backward by
``create_graph=True`` cannot be gone through: that is refused where such a backward begins.
"""

from collections import deque
from collections.abc import Iterator, Mapping, ValuesView
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from tensorstow.base.errors import OptionError

_DEPTH = 8
"""How deep in objects within objects tensors are searched for."""
_SEEN = (dict, list, tuple)
"""What FSDP2 looks into, and in subclasses not at attributes."""
_HOLDERS = (list, tuple, set, frozenset, deque, ValuesView)
_PLAIN = (str, bytes, int, float, complex, type(None), type, nn.Module, torch.dtype, torch.device)


def watch_outputs(module: nn.Module) -> None:
    """Look at what ``module``, a unit, returns; before FSDP2 does."""
    module.register_forward_hook(_behind_forward, prepend=True)


# A graph would take what is asked here for constants.
@torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
def _behind_forward(module: nn.Module, _: Any, output: Any) -> None:  # noqa: ANN401  # torch's own
    if not torch.is_grad_enabled() or not isinstance(module, FSDPModule):
        return
    # Transforms of torch.func record a graph of every backward, also where none is asked for.
    named = not torch._C._are_functorch_transforms_active()  # noqa: SLF001
    hidden = []
    for tensor, is_hidden in _tensors(output, _DEPTH, set()):
        if named:
            tensor.register_hook(_refuse_double)
        if is_hidden:
            hidden.append(tensor)
    if hidden:
        state = module._get_fsdp_state()  # noqa: SLF001  # nothing public does
        if state._training_state != TrainingState.PRE_BACKWARD:  # noqa: SLF001  # a checkpoint's
            state._register_pre_backward_hook(hidden)  # noqa: SLF001


def _tensors(
    value: Any,  # noqa: ANN401
    depth: int,
    known: set[int],
    is_hidden: bool = False,  # noqa: FBT001, FBT002
) -> Iterator[tuple[Any, bool]]:
    """Yield tensors that gradients come to, each with whether FSDP2 may not see it."""
    if isinstance(value, torch.Tensor):
        if value.grad_fn is not None and id(value) not in known:
            known.add(id(value))
            yield value, is_hidden
        return
    if isinstance(value, _PLAIN) or not depth or id(value) in known:
        return
    known.add(id(value))
    is_seen = isinstance(value, dict | list | tuple)
    for part in _items(value):
        yield from _tensors(part, depth - 1, known, is_hidden or not is_seen)
    if type(value) not in _SEEN:
        for part in list(_attributes(value)):
            yield from _tensors(part, depth - 1, known, is_hidden=True)


def _items(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, _HOLDERS) else []


def _attributes(value: object) -> Iterator[object]:
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in {"__dict__", "__weakref__"}:
                yield getattr(value, name, None)


def _refuse_double(_: torch.Tensor) -> None:
    """Raise OptionError in a backward that autograd records."""
    if torch.is_grad_enabled():
        message = (
            "A backward with create_graph=True (a gradient penalty, say) was begun through a stowed"
            " model, and FSDP2 frees the weights behind it that the graph would need: gradients of"
            " gradients would be lost. Leave create_graph out; or train this model by"
            " tensorstow.AdamW without stow(), which leaves weights where they are."
        )
        raise OptionError(message)
