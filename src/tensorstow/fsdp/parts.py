"""What users do with a stowed model besides its forward: parts called by themselves, copies, casts.

[Note: Parts] Parameters that are in no block (embeddings, the head) are gathered for the forward of
the whole model. A module that has some of them and is called by itself finds shards, which no
operation takes beside plain tensors. Without gradients they are gathered for the call here; with
gradients nobody would reduce what comes to them.

A unit that is called by itself before the model has ever been would be taken for the root by FSDP2,
and the model could not be called any more: so the root is told first.

A copy, a cast or a resize would leave the optimizer and the engine with tensors that are the
model's no more. Python and torch find ``__deepcopy__`` and ``_apply`` by the object, and there they
are refused by name, on every module that has some of them.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tensorstow.base.errors import OptionError


def watch_parts(model: nn.Module) -> None:
    """Let parts of ``model``, which FSDP2 has sharded, be called by themselves; refuse the rest."""
    if isinstance(model, FSDPModule):
        for name, part in _outside_of_units(model, ""):
            own = next(iter(part.named_parameters(recurse=False)), None)
            if own is not None and isinstance(own[1], DTensor):
                hook = partial(_before_part, weakref.ref(model), name, own[0])
                part.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    for module in model.modules():
        if isinstance(module, FSDPModule) and module is not model:
            _tell_root_before(module, model)
        if isinstance(module, FSDPModule) or _has_shards(module):
            known: weakref.ref[nn.Module] = weakref.ref(module)
            given: Any = module
            given.__deepcopy__ = _refuse_copy
            given._apply = partial(_apply, known)  # noqa: SLF001  # what to(), half() and their kin call
    if hasattr(model, "resize_token_embeddings"):
        given = model
        given.resize_token_embeddings = partial(_resize, weakref.ref(model))
    for which in ("input", "output"):
        if hasattr(model, f"set_{which}_embeddings") and hasattr(model, f"get_{which}_embeddings"):
            setattr(model, f"set_{which}_embeddings", partial(_set, weakref.ref(model), which))


def _has_shards(module: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in module.parameters(recurse=False))


def _tell_root_before(unit: nn.Module, model: nn.Module) -> None:
    """Let FSDP2 know the root when ``unit`` is called first, by itself or within ``model``."""
    if not isinstance(model, FSDPModule):
        return
    known: weakref.ref[FSDPModule] = weakref.ref(model)

    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def tell(*_: Any) -> None:  # noqa: ANN401  # torch's own
        handle.remove()
        root = known()
        if root is not None:
            root._get_fsdp_state()._lazy_init()  # noqa: SLF001  # nothing public does

    handle = unit.register_forward_pre_hook(tell, prepend=True)


def _outside_of_units(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if not isinstance(child, FSDPModule):
            yield prefix + name, child
            yield from _outside_of_units(child, f"{prefix}{name}.")


def _before_part(
    known: "weakref.ref[FSDPModule]",
    name: str,
    own: str,
    part: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Gather what ``part`` needs, where the model's forward has not done so."""
    if isinstance(getattr(part, own), DTensor):
        _gather_alone(known(), name, part, (*args, *kwargs.values()))


@torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
def _gather_alone(
    root: Any,  # noqa: ANN401  # an FSDPModule
    name: str,
    part: nn.Module,
    given: Sequence[Any],
) -> None:
    trained = any(p.requires_grad for p in part.parameters(recurse=False))
    through = any(isinstance(value, torch.Tensor) and value.requires_grad for value in given)
    if torch.is_grad_enabled() and (trained or through):
        message = (
            f"{name} was called by itself, outside of the model's forward, and with gradients: its"
            " weights are gathered for the model's forward alone. Call it under torch.no_grad(), or"
            " within the forward, or in a method of the model that is told to"
            " torch.distributed.fsdp.register_fsdp_forward_method(model, method)."
        )
        raise OptionError(message)
    with torch.inference_mode(mode=False), torch.no_grad():
        root._get_fsdp_state()._lazy_init()  # noqa: SLF001  # nothing public does
        root.unshard()

    def behind(*_: Any) -> None:  # noqa: ANN401  # torch's own
        handle.remove()
        root.reshard()

    handle = part.register_forward_hook(behind, always_call=True)


def _refuse_copy(_: dict[int, Any]) -> NoReturn:
    message = (
        "A stowed model, or a part of one, was to be copied (by copy.deepcopy, AveragedModel or an"
        " EMA), and its weights are shards that an optimizer and files belong to. Keep averages of"
        " p.full_tensor() by name; or copy a model that is not stowed, and load model.state_dict()"
        " into it."
    )
    raise OptionError(message)


def _apply(known: "weakref.ref[nn.Module]", fn: Callable[[Any], Any], *args: Any) -> Any:  # noqa: ANN401
    """Do what torch does where ``fn`` changes no parameter; else raise OptionError."""
    module: Any = known()
    for kind in {(p.dtype, p.device, p.dim()) for p in module.parameters()}:
        # Two in each dimension: a tensor of one element has every memory format.
        probe = torch.empty((2,) * kind[2], dtype=kind[0], device=kind[1])
        if fn(probe) is not probe or (probe.is_cpu and probe.is_shared()):
            message = (
                f"The {kind[0]} parameters of a stowed model on {kind[1]} were to be cast, moved,"
                " shared or laid out anew (by to(), half() or their kin), and the optimizer and the"
                " engine hold them as they are. Cast before stow(); compute_dtype= computes in"
                " another dtype."
            )
            raise OptionError(message)
    return type(module)._apply(module, fn, *args)  # noqa: SLF001


def _resize(
    known: "weakref.ref[nn.Module]",
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    **given: Any,  # noqa: ANN401  # transformers' own
) -> Any:  # noqa: ANN401
    """Do what transformers does where the size stays; else raise OptionError."""
    model: Any = known()
    size = model.get_input_embeddings().weight.shape[0]
    if pad_to_multiple_of is not None or new_num_tokens not in {None, size}:
        message = (
            f"resize_token_embeddings({new_num_tokens}) was called on a stowed model, whose"
            f" embeddings have {size} rows that the optimizer and the engine hold. Resize before"
            " stow()."
        )
        raise OptionError(message)
    return type(model).resize_token_embeddings(model, new_num_tokens, **given)


def _set(known: "weakref.ref[nn.Module]", which: str, value: object) -> None:
    """Do nothing where ``value`` is what the model has; else raise OptionError."""
    model: Any = known()
    if value is not getattr(model, f"get_{which}_embeddings")():
        message = (
            f"set_{which}_embeddings() was called on a stowed model with another module, whose"
            " weights the optimizer and the engine do not have: they would not be trained. Set it"
            " before stow()."
        )
        raise OptionError(message)
