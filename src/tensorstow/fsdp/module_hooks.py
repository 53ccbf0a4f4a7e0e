"""Hooks on a sharded model's modules, for their outputs and for calls that FSDP2 does not expect.

[Note: Sums of gradients] A tensor that is used several times gets the sum of as many gradients.
Autograd adds them one by one, in the order in which it runs the nodes of the uses. FSDP2 puts a
node of its own in front of a unit's inputs, which reshards the unit's weights when its backward has
ended. That node adds the gradients of the uses in the unit first. Plain autograd computes
((a + b) + c) + d and such a graph computes (a + b) + (c + d), which has other bits. Inputs with
uses in several places are common: an encoder's output, a position bias, a skip connection.

So units get no such node. Autograd numbers nodes in the order of forward, and one thread runs them
in the reverse order in backward (gradients of parameters are added at once). When a node runs that
is older than a unit's forward, the unit's backward has ended. Hooks on inputs and outputs of units
compare these numbers. The end of the call of backward ends those that are left.

[Note: Outputs] FSDP2 looks for tensors in lists, tuples, dicts and dataclasses that a unit returns,
and unshards the unit's weights when a gradient comes to one. It does not see a tensor in any other
object: backward would go through the unit without its weights. Such tensors are searched for here
and passed to it. A tensor that is older than the unit's forward is not passed: the unit only
returns it, and its gradient comes when the unit's backward has ended.

Weights are resharded after a unit's backward, so a graph that autograd records in a backward with
``create_graph=True`` cannot be differentiated. An error is raised when such a backward begins.

[Note: Submodules] Parameters that are in no block (embeddings, the head) are unsharded for the
forward of the whole model. A module that has some of them and is called by itself would see shards,
which no operation accepts together with plain tensors. Without gradients they are unsharded here
for the call; with gradients the call raises an error, because no hook would reduce them.

FSDP2 makes the first unit that is called its root. If that is not the model, the model cannot be
called afterwards: so the root is initialized first.

After a copy, a cast or a resize the optimizer would have tensors that the model no longer has. A
pickled model would have FSDP2's classes, which no other process has, and a pickled parameter is one
rank's shard. Python and torch look up ``__deepcopy__``, ``__reduce_ex__`` and ``_apply`` on the
object, so each of them raises an error on every module and parameter that is sharded.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from tensorstow.base.errors import OptionError

_MAX_DEPTH = 8
"""The depth of nested objects to which tensors are searched for."""
_CONTAINERS = (list, tuple, set, frozenset, deque, ValuesView)
_WITHOUT_ATTRIBUTES = (dict, list, tuple)
"""Instances of exactly these classes have items and no attributes."""
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


def watch_backwards(model: nn.Module) -> None:
    """Replace FSDP2's hooks on the inputs and outputs of a model's units, before its first call."""
    open_backwards = _OpenBackwards()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _WatchedUnit(module._get_fsdp_state(), open_backwards)  # noqa: SLF001  # nothing public does


def tensors_of(output: object) -> list[torch.Tensor]:
    """Return the tensors with gradients in what a module returned, which may be any object."""
    return list(_tensors(output, _MAX_DEPTH, set()))


def guard_modules(model: nn.Module) -> None:
    """Support calls of a sharded model's submodules; refuse copies, casts and resizes."""
    if isinstance(model, FSDPModule):
        for name, submodule in _outside_units(model, ""):
            first = next(iter(submodule.named_parameters(recurse=False)), None)
            if first is not None and isinstance(first[1], DTensor):
                hook = partial(_pre_forward_of_submodule, weakref.ref(model), name, first[0])
                submodule.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    for module in model.modules():
        if isinstance(module, FSDPModule) and module is not model:
            _init_root_first(module, model)
        has_shards = any(isinstance(p, DTensor) for p in module.parameters(recurse=False))
        if isinstance(module, FSDPModule) or has_shards:
            refuse_copies(module)
    if hasattr(model, "resize_token_embeddings"):
        # The model holds the functions that are set here, so they refer to it weakly.
        pretrained: Any = model
        pretrained.resize_token_embeddings = partial(_resize_embeddings, weakref.ref(model))
    for which in ("input", "output"):
        if hasattr(model, f"set_{which}_embeddings") and hasattr(model, f"get_{which}_embeddings"):
            setattr(
                model,
                f"set_{which}_embeddings",
                partial(_set_embeddings, weakref.ref(model), which),
            )


class ModelHook:
    """A hook that belongs to a model: a copy of the model shares it, and it cannot be pickled."""

    def __init__(self, function: Callable[..., Any], model: nn.Module | None = None) -> None:
        """Wrap a function; with a model, it is called for that one alone, and not for copies."""
        self._function = function
        self._model = None if model is None else weakref.ref(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # torch's own
        """Call the function."""
        if self._model is None or args[0] is self._model():
            return self._function(*args, **kwargs)
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelHook":
        """Return the hook itself, as for a function."""
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise OptionError."""
        _refuse(_PICKLED, protocol)


def refuse_copies(module: nn.Module) -> None:
    """Make copies, casts, moves and pickling of a placed module raise OptionError."""
    reference: weakref.ref[nn.Module] = weakref.ref(module)
    patched: Any = module
    patched.__deepcopy__ = partial(_refuse, _COPIED)
    patched.__reduce_ex__ = partial(_refuse, _PICKLED)
    patched._apply = partial(_apply_if_unchanged, reference)  # noqa: SLF001  # to(), half() and the like call it
    _refuse_files_of_parameters(module)


# --- backward through units ---


class _Moment(NamedTuple):
    """A position in the order in which forward creates autograd nodes."""

    thread: int
    """Each thread numbers nodes by itself."""
    number: int

    def is_before(self, other: "_Moment") -> bool:
        return self.thread == other.thread and self.number < other.number


class _Open(NamedTuple):
    """A backward of a unit that has begun and not ended."""

    start: _Moment
    """When the unit's forward began."""
    task: int
    """The call of backward: a checkpoint with ``use_reentrant=True`` begins another one."""


class _OpenBackwards:
    """The units of one model whose backward has begun and not ended."""

    def __init__(self) -> None:
        self._open: dict[_WatchedUnit, _Open] = {}

    def begin(self, unit: "_WatchedUnit", start: _Moment, node: _Moment) -> None:
        """Begin a unit's backward, at a node that its forward created."""
        self.reach(node)
        task = torch._C._current_graph_task_id()  # noqa: SLF001
        # One callback ends all units that are still open when this call of backward ends.
        if all(backward.task != task for backward in self._open.values()):
            engine: Any = torch.autograd.Variable._execution_engine  # noqa: SLF001  # as FSDP2 does
            engine.queue_callback(lambda: self._end_if(lambda backward: backward.task == task))
        self._open[unit] = _Open(start, task)

    def reach(self, node: _Moment) -> None:
        """End the backwards of units whose forward began after a node was created."""
        self._end_if(lambda backward: node.is_before(backward.start))

    def _end_if(self, has_ended: Callable[[_Open], bool]) -> None:
        ended = [unit for unit, backward in self._open.items() if has_ended(backward)]
        # In the order of backward: the unit whose forward began last ends first.
        for unit in sorted(ended, key=lambda unit: self._open[unit].start, reverse=True):
            del self._open[unit]
            unit.end_backward()


def param_groups_of(state: Any) -> Sequence[Any]:  # noqa: ANN401  # FSDP2's state of a module
    """Return FSDP2's groups of a module's parameters; torch 2.11 has one or None."""
    if hasattr(state, "_fsdp_param_groups"):
        groups: Sequence[Any] = state._fsdp_param_groups  # noqa: SLF001
        return groups
    group = state._fsdp_param_group  # noqa: SLF001
    return [] if group is None else [group]


def records_of(modules: Iterable[object]) -> Iterator[tuple[Any, Any]]:
    """Yield FSDP2's records of the parameters of those modules that are units, and their groups."""
    for module in modules:
        if isinstance(module, FSDPModule):
            for group in param_groups_of(module._get_fsdp_state()):  # noqa: SLF001  # not public
                yield from ((group, record) for record in group.fsdp_params)


def is_unsharded(module: nn.Module, parameter: torch.Tensor) -> bool:
    """Return whether a tensor is the unsharded parameter of a forward, until its backward."""
    unsharded = (getattr(r, "_unsharded_param", None) for _, r in records_of(module.modules()))
    return any(candidate is parameter for candidate in unsharded)


class _WatchedUnit:
    """One unit, with its hooks in place of FSDP2's."""

    def __init__(self, state: Any, open_backwards: _OpenBackwards) -> None:  # noqa: ANN401  # FSDP2's state of a module
        self._groups = param_groups_of(state)
        self._open = open_backwards
        self._start = _Moment(0, 0)
        self._begin_by_fsdp = state._register_pre_backward_hook  # noqa: SLF001
        state._register_pre_backward_hook = self._watch_outputs  # noqa: SLF001
        for group in self._groups:
            end_by_fsdp = group._register_post_backward_hook  # noqa: SLF001
            group._register_post_backward_hook = partial(self._watch_inputs, end_by_fsdp)  # noqa: SLF001

    def end_backward(self) -> None:
        """Reduce the gradients and reshard the weights, unless FSDP2 has done so."""
        for group in reversed(self._groups):
            if group._training_state == TrainingState.PRE_BACKWARD:  # noqa: SLF001
                group.post_backward()

    def _watch_inputs(self, end_by_fsdp: Any, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        """Note the beginning of a forward, and return its arguments."""
        if torch._C._are_functorch_transforms_active():  # noqa: SLF001
            return end_by_fsdp(args, kwargs)
        self._start = _Moment(threading.get_ident(), _get_sequence_nr())
        for tensor in tree_leaves((args, kwargs)) if torch.is_grad_enabled() else ():
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                self._on_gradient(tensor, self._open.reach)
        return args, kwargs

    def _watch_outputs(self, output: Any) -> Any:  # noqa: ANN401
        """Unshard the weights when a gradient reaches one of the outputs; return the outputs."""
        if not torch.is_grad_enabled():
            return output
        tensors = tensors_of(output)
        # Transforms of torch.func record a graph of every backward, also without create_graph.
        if torch._C._are_functorch_transforms_active():  # noqa: SLF001
            self._begin_by_fsdp(tensors)
            return self._begin_by_fsdp(output)
        new = [tensor for tensor in tensors if not _creation_of(tensor).is_before(self._start)]
        for tensor in tensors:
            tensor.register_hook(_refuse_create_graph)  # type: ignore[no-untyped-call]
        for tensor in new:
            self._on_gradient(tensor, partial(self._open.begin, self, self._start))
        self._begin_by_fsdp(new)  # after ours, which ends the backwards of other units
        return output

    @staticmethod
    def _on_gradient(tensor: Any, act: Callable[[_Moment], None]) -> None:  # noqa: ANN401
        """Call ``act`` with a tensor's creation when a gradient reaches the tensor."""
        creation = _creation_of(tensor)
        tensor.register_hook(lambda _: act(creation))


def _creation_of(tensor: Any) -> _Moment:  # noqa: ANN401  # a tensor with grad_fn
    """Return when the node of a tensor was created."""
    return _Moment(threading.get_ident(), tensor.grad_fn._sequence_nr())  # noqa: SLF001


def _tensors(
    value: Any,  # noqa: ANN401
    depth: int,
    seen: set[int],
) -> Iterator[torch.Tensor]:
    """Yield tensors that need gradients, each once."""
    if isinstance(value, torch.Tensor):
        if value.grad_fn is not None and id(value) not in seen:
            seen.add(id(value))
            yield value
        return
    if isinstance(value, _WITHOUT_TENSORS) or not depth or id(value) in seen:
        return
    seen.add(id(value))
    for part in _items(value):
        yield from _tensors(part, depth - 1, seen)
    if type(value) not in _WITHOUT_ATTRIBUTES:
        for part in list(_attributes(value)):
            yield from _tensors(part, depth - 1, seen)


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
            "A backward with create_graph=True (such as a gradient penalty) was begun through a"
            " stowed model, and FSDP2 then frees weights that the graph would need: gradients of"
            " gradients would be lost. Leave create_graph out; or train this model by"
            " tensorstow.AdamW without stow(), which leaves weights where they are."
        )
        raise OptionError(message)


# --- calls of submodules, embeddings ---


def _init_root_first(unit: nn.Module, model: nn.Module) -> None:
    """Initialize FSDP2's root before the first call of ``unit``, by itself or in ``model``."""
    if not isinstance(model, FSDPModule):
        return
    reference: weakref.ref[FSDPModule] = weakref.ref(model)

    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def initialize(*_: Any) -> None:  # noqa: ANN401  # torch's own
        handle.remove()
        root = reference()
        if root is not None:
            root._get_fsdp_state()._lazy_init()  # noqa: SLF001  # nothing public does

    handle = unit.register_forward_pre_hook(initialize, prepend=True)


def _outside_units(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if not isinstance(child, FSDPModule):
            yield prefix + name, child
            yield from _outside_units(child, f"{prefix}{name}.")


def _pre_forward_of_submodule(
    reference: "weakref.ref[FSDPModule]",
    name: str,
    first: str,
    submodule: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Unshard the parameters of ``submodule`` if it is called outside the model's forward.

    ``first``: the name of one of its parameters.
    """
    # Within the model's forward FSDP2 has put the unsharded parameter in place.
    if isinstance(getattr(submodule, first), DTensor):
        _unshard_for_call(reference(), name, submodule, (*args, *kwargs.values()))


@torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
def _unshard_for_call(
    root: Any,  # noqa: ANN401  # an FSDPModule
    name: str,
    submodule: nn.Module,
    arguments: Sequence[Any],
) -> None:
    trained = any(p.requires_grad for p in submodule.parameters(recurse=False))
    through = any(isinstance(value, torch.Tensor) and value.requires_grad for value in arguments)
    if torch.is_grad_enabled() and (trained or through):
        message = (
            f"{name} was called by itself, outside of the model's forward, and with gradients: its"
            " weights are gathered for the model's forward alone. Call it under torch.no_grad(), or"
            " within the forward, or in a method of the model that you registered with"
            " torch.distributed.fsdp.register_fsdp_forward_method(model, method)."
        )
        raise OptionError(message)
    # Weights that FSDP2 allocates under inference_mode could never be trained with.
    with torch.inference_mode(mode=False), torch.no_grad():
        root._get_fsdp_state()._lazy_init()  # noqa: SLF001  # nothing public does
        root.unshard()

    def reshard(*_: Any) -> None:  # noqa: ANN401  # torch's own
        handle.remove()
        root.reshard()

    handle = submodule.register_forward_hook(reshard, always_call=True)


def _resize_embeddings(
    reference: "weakref.ref[nn.Module]",
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    **options: Any,  # noqa: ANN401  # transformers' own
) -> Any:  # noqa: ANN401
    """Call transformers' method if the size does not change; else raise OptionError."""
    model: Any = reference()
    size = model.get_input_embeddings().weight.shape[0]
    if pad_to_multiple_of is not None or new_num_tokens not in {None, size}:
        message = (
            f"resize_token_embeddings({new_num_tokens}) was called on a stowed model, whose"
            f" embeddings have {size} rows that the optimizer and the engine hold. Resize before"
            " stow()."
        )
        raise OptionError(message)
    return type(model).resize_token_embeddings(model, new_num_tokens, **options)


def _set_embeddings(reference: "weakref.ref[nn.Module]", which: str, value: object) -> None:
    """Do nothing if ``value`` is the model's own module; else raise OptionError."""
    model: Any = reference()
    if value is not getattr(model, f"get_{which}_embeddings")():
        message = (
            f"set_{which}_embeddings() was called on a stowed model with another module, whose"
            " weights the optimizer and the engine do not have: they would not be trained. Set it"
            " before stow()."
        )
        raise OptionError(message)


# --- copies, casts, files ---


def _refuse_files_of_parameters(module: nn.Module) -> None:
    """Make pickling of a module's own sharded parameters, or of copies of them, raise OptionError.

    Tensors that replace a parameter for a while can be pickled.
    """
    for parameter in module.parameters(recurse=False):
        if isinstance(parameter, DTensor):
            patched: Any = parameter
            patched.__reduce_ex__ = partial(_refuse, _PICKLED_PARAMETER)


_COPIED = (
    "A stowed model, or a part of one, cannot be copied (by copy.deepcopy, AveragedModel or an"
    " EMA): its weights belong to an optimizer or to files. Keep averages by name, of"
    " p.full_tensor() if p is a DTensor and of p if not; or copy a model that is not stowed,"
    " and load model.state_dict() into it."
)
_PICKLED = (
    "A stowed model, or a part of one, cannot be pickled (by torch.save(model), pickle or a"
    " process that is spawned): its weights belong to an optimizer or to files. Save"
    " model.state_dict(); or call tensorstow.save_safetensors(model, directory), on every rank"
    " if there are several. optimizer.state_dict() has the states."
)
_PICKLED_PARAMETER = (
    "A parameter of a stowed model, or a copy of one, was to be pickled, as in"
    " torch.save(dict(model.named_parameters())): it is this rank's shard, and the file would"
    " have no whole tensor. Save model.state_dict(); or call"
    " tensorstow.save_safetensors(model, directory), on every rank if there are several."
    " p.full_tensor(), on every rank, returns one whole parameter."
)


def _refuse(message: str, *_: object) -> NoReturn:
    raise OptionError(message)


def _apply_if_unchanged(
    reference: "weakref.ref[nn.Module]",
    fn: Callable[[Any], Any],
    *args: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Apply ``fn`` like torch if it changes no parameter; else raise OptionError."""
    module: Any = reference()
    for kind in {(p.dtype, p.device, p.dim()) for p in module.parameters()}:
        # Two elements in each dimension: a tensor of one element has every memory format.
        probe = torch.empty((2,) * kind[2], dtype=kind[0], device=kind[1])
        # share_memory_() returns the same tensor, over shared memory.
        if fn(probe) is not probe or (probe.is_cpu and probe.is_shared()):
            message = (
                f"The {kind[0]} parameters of a stowed model on {kind[1]} cannot be cast, moved,"
                " shared or given another memory format (by to(), half() and the like): the"
                " optimizer, the engine or a file has them. Cast before stow();"
                " compute_dtype= computes in another dtype."
            )
            raise OptionError(message)
    # The method of the class: the attribute of the module leads back here.
    applied = type(module)._apply(module, fn, *args)  # noqa: SLF001
    _refuse_files_of_parameters(module)  # torch has replaced their attributes
    return applied
