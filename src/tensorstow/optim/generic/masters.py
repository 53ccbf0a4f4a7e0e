"""fp32 masters of 16-bit parameters: the class steps the master, and the weight is its rounding.

[Note: Masters] A master is one more state, ``"master"``, on the tier of the others: the class sees
an fp32 parameter with an fp32 gradient, and nothing of 16 bits. Where the weight is not what its
master rounds to, someone else has written it, and the element's master begins again from it. That
is decided element by element: neither cuts into pieces nor ranks change a bit.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tensorstow.base.errors import OptionError

MASTER = "master"
_SMALL_DTYPES = frozenset({torch.bfloat16, torch.float16})


def has_master(tensor: torch.Tensor) -> bool:
    """Return whether a parameter is stepped by an fp32 master, if masters are requested."""
    return tensor.dtype in _SMALL_DTYPES


def stand_ins(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return groups in which masters without memory are in place of 16-bit parameters."""
    return [{**group, "params": [_stand_in(p) for p in group["params"]]} for group in groups]


def _stand_in(parameter: torch.Tensor) -> torch.Tensor:
    if not has_master(parameter):
        return parameter
    empty = torch.empty(parameter.shape, dtype=torch.float32, device="meta")
    return empty.requires_grad_(parameter.requires_grad)


@torch.no_grad()
def take_master(
    weight: torch.Tensor, entry: Mapping[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the master of ``weight`` as a parameter with its gradient, and the other states."""
    states = dict(entry)
    master: torch.Tensor | None = states.pop(MASTER, None)
    if master is None:
        master = weight.detach().float()
    elif not torch.equal(rounded := master.to(weight.dtype), weight):
        master.copy_(torch.where(rounded == weight, master, weight.float()))
    parameter = master.detach().requires_grad_(weight.requires_grad)  # the same memory
    parameter.grad = None if weight.grad is None else weight.grad.detach().float()
    return parameter, states


@torch.no_grad()
def put_master(
    weight: torch.Tensor, master: torch.Tensor, entry: Mapping[str, Any]
) -> dict[str, Any]:
    """Round a stepped master to its weight; return the states with it."""
    if MASTER in entry:
        message = (
            f"The class keeps a state {MASTER!r} of its own, which is the name of fp32 masters:"
            " leave state_format out, or rename the state."
        )
        raise OptionError(message)
    weight.copy_(master)
    return {**entry, MASTER: master.detach()}
