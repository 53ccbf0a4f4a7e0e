"""What FSDP2 cannot shard, by name, before anything is placed."""

from collections.abc import Iterable

import torch

from tensorstow.base.errors import OptionError
from tensorstow.fsdp.units import Unit

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def check_shardable(units: Iterable[Unit]) -> None:
    """Raise OptionError for parameters that FSDP2 refuses, or only at the first step."""
    for unit in units:
        for name, parameter in unit.parameters.items():
            if parameter.ndim == 0:
                message = (
                    f"{name} is a scalar, which FSDP2 cannot shard: make it one of shape (1,)."
                )
                raise OptionError(message)
            if parameter.numel() == 0:
                message = (
                    f"{name} has no elements (shape {tuple(parameter.shape)}), and FSDP2 cannot"
                    " reduce a gradient of none: leave the parameter out."
                )
                raise OptionError(message)
            if type(parameter) not in _PLAIN and not hasattr(parameter, "fsdp_pre_all_gather"):
                message = (
                    f"{name} is a {type(parameter).__name__}, and FSDP2 makes a DTensor of it, that"
                    " lacks what the class knows (how to unpack its bytes, say). Place the model"
                    " whole, on one rank with its parameters where they are computed with."
                )
                raise OptionError(message)
            if not parameter.is_contiguous():
                message = (
                    f"{name} (shape {tuple(parameter.shape)}, strides {parameter.stride()}) is not"
                    " contiguous, which FSDP2 does not shard: model.to(memory_format="
                    "torch.contiguous_format), or param.data = param.data.contiguous()."
                )
                raise OptionError(message)
            check_hooks(parameter, name)
        _check_dtypes(unit)


def check_hooks(parameter: torch.Tensor, name: str) -> None:
    """Raise OptionError for a parameter with a hook of the user's: FSDP2 would never call it."""
    if parameter._backward_hooks:  # noqa: SLF001  # what register_hook fills
        message = (
            f"{name} has a hook (register_hook), and FSDP2 sets gradients of what it shards without"
            " calling any: take it away, and change gradients between backward and step()."
        )
        raise OptionError(message)


def _check_dtypes(unit: Unit) -> None:
    """FSDP2 reduces the gradients of a unit as one run of bytes."""
    trained = {n: p for n, p in unit.parameters.items() if p.requires_grad}
    examples: dict[torch.dtype, str] = {}
    for name, parameter in trained.items():
        examples.setdefault(parameter.dtype, name)
    if len(examples) > 1:
        found = ", ".join(f"{name} is {dtype}" for dtype, name in examples.items())
        message = (
            f"What is trained in unit {unit.name!r} has several dtypes ({found}), and FSDP2"
            " reduces a unit's gradients in one. Cast it to one dtype (with compute_dtype= fp32"
            " parameters compute in 16 bits), or name modules of one dtype each by units=."
        )
        raise OptionError(message)
