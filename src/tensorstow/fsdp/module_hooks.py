"""Hooks on a sharded model's modules: for their outputs, and calls that FSDP2 does not expect.

[Note: Outputs] FSDP2 looks for tensors in lists, tuples, dicts and dataclasses that a unit returns,
and unshards the unit's weights when a gradient comes to one. It does not see a tensor in any other
object: backward would go through the unit without its weights. Such tensors are searched for here
and shown to it.

Weights are resharded after a unit's backward, so a graph that autograd records in a backward with
``create_graph=True`` cannot be differentiated: that is refused when such a backward begins.

[Note: Submodules] Parameters that are in no block (embeddings, the head) are unsharded for the
forward of the whole model. A module that has some of them and is called by itself would see shards,
which no operation accepts beside plain tensors. Without gradients they are unsharded here for the
call; with gradients the call is refused, as no hook would reduce them.

FSDP2 takes the first unit that is called for its root. If that is not the model, the model could
not be called afterwards: so the root is initialized first.

After a copy, a cast or a resize the optimizer would have tensors that are no longer the model's.
Python and torch look up ``__deepcopy__`` and ``_apply`` on the object, so both are refused by name
on every module with sharded parameters.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, ValuesView
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from tensorstow.base.errors import OptionError

_MAX_DEPTH = 8
"""How deep in objects within objects tensors are searched for."""
_SEEN_BY_FSDP = (dict, list, tuple)
"""What FSDP2 looks into, and in subclasses not at attributes."""
_CONTAINERS = (list, tuple, set, frozenset, deque, ValuesView)
_WITHOUT_TENSORS = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    nn.Module,
    torch.dtype,
    torch.device,
)


def register_output_hooks(model: nn.Module) -> None:
    """Search the outputs of a sharded model's units for tensors that FSDP2 would not see."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.register_forward_hook(_post_forward, prepend=True)


def tensors_of(output: object) -> list[torch.Tensor]:
    """Return the tensors with gradients in what a module returned.

    Args:
        output: Tensors, in containers and objects or not.
    """
    return [tensor for tensor, _ in _tensors(output, _MAX_DEPTH, set())]


def guard_modules(model: nn.Module) -> None:
    """Support calls of a sharded model's submodules; refuse copies, casts and resizes.

    Args:
        model: What FSDP2 has sharded. A refused call raises OptionError.
    """
    if isinstance(model, FSDPModule):
        for name, submodule in _outside_units(model, ""):
            own = next(iter(submodule.named_parameters(recurse=False)), None)
            if own is not None and isinstance(own[1], DTensor):
                hook = partial(_pre_forward_of_submodule, weakref.ref(model), name, own[0])
                submodule.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    for module in model.modules():
        if isinstance(module, FSDPModule) and module is not model:
            _init_root_first(module, model)
        if isinstance(module, FSDPModule) or _has_shards(module):
            refuse_copies(module)
    if hasattr(model, "resize_token_embeddings"):
        given: Any = model
        given.resize_token_embeddings = partial(_resize_embeddings, weakref.ref(model))
    for which in ("input", "output"):
        if hasattr(model, f"set_{which}_embeddings") and hasattr(model, f"get_{which}_embeddings"):
            setattr(
                model,
                f"set_{which}_embeddings",
                partial(_set_embeddings, weakref.ref(model), which),
            )


def refuse_copies(module: nn.Module) -> None:
    """Have a copy, cast or move of a placed module raise OptionError.

    Args:
        module: A module with parameters, or that has some below it.
    """
    known: weakref.ref[nn.Module] = weakref.ref(module)
    given: Any = module
    given.__deepcopy__ = _refuse_copy
    given._apply = partial(_apply_if_unchanged, known)  # noqa: SLF001  # what to(), half() and their kin call


# --- what units return ---


# A compiled graph would treat these queries as constants.
@torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
def _post_forward(module: nn.Module, _: Any, output: Any) -> None:  # noqa: ANN401  # torch's own
    if not torch.is_grad_enabled() or not isinstance(module, FSDPModule):
        return
    # Transforms of torch.func record a graph of every backward, also without create_graph.
    named = not torch._C._are_functorch_transforms_active()  # noqa: SLF001
    hidden = []
    for tensor, is_hidden in _tensors(output, _MAX_DEPTH, set()):
        if named:
            tensor.register_hook(_refuse_create_graph)
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
    """Yield tensors that need gradients, each with whether FSDP2 may miss it."""
    if isinstance(value, torch.Tensor):
        if value.grad_fn is not None and id(value) not in known:
            known.add(id(value))
            yield value, is_hidden
        return
    if isinstance(value, _WITHOUT_TENSORS) or not depth or id(value) in known:
        return
    known.add(id(value))
    is_seen = isinstance(value, dict | list | tuple)
    for part in _items(value):
        yield from _tensors(part, depth - 1, known, is_hidden or not is_seen)
    if type(value) not in _SEEN_BY_FSDP:
        for part in list(_attributes(value)):
            yield from _tensors(part, depth - 1, known, is_hidden=True)


def _items(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, _CONTAINERS) else []


def _attributes(value: object) -> Iterator[object]:
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in {"__dict__", "__weakref__"}:
                yield getattr(value, name, None)


def _refuse_create_graph(_: torch.Tensor) -> None:
    """Raise OptionError in a backward that autograd records."""
    if torch.is_grad_enabled():
        message = (
            "A backward with create_graph=True (a gradient penalty, say) was begun through a stowed"
            " model, and FSDP2 frees the weights behind it that the graph would need: gradients of"
            " gradients would be lost. Leave create_graph out; or train this model by"
            " tensorstow.AdamW without stow(), which leaves weights where they are."
        )
        raise OptionError(message)


# --- calls of submodules, copies, casts ---


def _has_shards(module: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in module.parameters(recurse=False))


def _init_root_first(unit: nn.Module, model: nn.Module) -> None:
    """Initialize FSDP2's root before the first call of ``unit``, by itself or in ``model``."""
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


def _outside_units(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if not isinstance(child, FSDPModule):
            yield prefix + name, child
            yield from _outside_units(child, f"{prefix}{name}.")


def _pre_forward_of_submodule(
    known: "weakref.ref[FSDPModule]",
    name: str,
    own: str,
    submodule: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Unshard the parameters of ``submodule`` if it is called outside of the model's forward."""
    if isinstance(getattr(submodule, own), DTensor):
        _unshard_for_call(known(), name, submodule, (*args, *kwargs.values()))


@torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
def _unshard_for_call(
    root: Any,  # noqa: ANN401  # an FSDPModule
    name: str,
    submodule: nn.Module,
    given: Sequence[Any],
) -> None:
    trained = any(p.requires_grad for p in submodule.parameters(recurse=False))
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

    handle = submodule.register_forward_hook(behind, always_call=True)


def _refuse_copy(_: dict[int, Any]) -> NoReturn:
    message = (
        "A stowed model, or a part of one, cannot be copied (by copy.deepcopy, AveragedModel or an"
        " EMA): its weights belong to an optimizer or to files. Keep averages of"
        " p.full_tensor() by name; or copy a model that is not stowed, and load model.state_dict()"
        " into it."
    )
    raise OptionError(message)


def _apply_if_unchanged(
    known: "weakref.ref[nn.Module]",
    fn: Callable[[Any], Any],
    *args: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Apply ``fn`` like torch if it changes no parameter; else raise OptionError."""
    module: Any = known()
    for kind in {(p.dtype, p.device, p.dim()) for p in module.parameters()}:
        # Two in each dimension: a tensor of one element has every memory format.
        probe = torch.empty((2,) * kind[2], dtype=kind[0], device=kind[1])
        if fn(probe) is not probe or (probe.is_cpu and probe.is_shared()):
            message = (
                f"The {kind[0]} parameters of a stowed model on {kind[1]} cannot be cast, moved,"
                " shared or given another memory format (by to(), half() and the like): the"
                " optimizer, the engine or a file has them. Cast before stow();"
                " compute_dtype= computes in another dtype."
            )
            raise OptionError(message)
    return type(module)._apply(module, fn, *args)  # noqa: SLF001


def _resize_embeddings(
    known: "weakref.ref[nn.Module]",
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    **given: Any,  # noqa: ANN401  # transformers' own
) -> Any:  # noqa: ANN401
    """Act like transformers if the size does not change; else raise OptionError."""
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


def _set_embeddings(known: "weakref.ref[nn.Module]", which: str, value: object) -> None:
    """Do nothing if ``value`` is the model's own module; else raise OptionError."""
    model: Any = known()
    if value is not getattr(model, f"get_{which}_embeddings")():
        message = (
            f"set_{which}_embeddings() was called on a stowed model with another module, whose"
            " weights the optimizer and the engine do not have: they would not be trained. Set it"
            " before stow()."
        )
        raise OptionError(message)
