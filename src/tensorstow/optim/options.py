"""What users write in an optimizer's constructor, read and checked before anything is allocated."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeGuard

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from tensorstow.base.errors import DTypeError, OptionError
from tensorstow.base.sizes import format_count, parse_size
from tensorstow.base.update_on import CHOICES, UpdateOn, is_update_on, reaches_device, told
from tensorstow.optim.accelerator import device
from tensorstow.optim.formats.state_format import StateFormat
from tensorstow.optim.run import Interval, Run
from tensorstow.optim.shards import is_sharded
from tensorstow.optim.states.layout import STATE_DTYPES, Family, refuse_dtype
from tensorstow.optim.states.on_disk import StateOnDisk
from tensorstow.optim.states.policy import Overlap, PipelinePolicy
from tensorstow.optim.states.state_store import Placement
from tensorstow.optim.states.stowage import Stowage

States = Literal["host", "ram", "disk"] | float
_NUMBERS = (int, float, np.integer, np.floating)
_FRACTIONS = {"host": 0.0, "ram": 0.0, "disk": 1.0}
Durability = Literal["commit", "none"] | None
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
Directory = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None


def placement(
    states: States,
    directory: Directory,
    ram_budget: str | int | None,
    durability: Durability = "none",
) -> Placement:
    """Read ``states=``, ``dir=``, ``ram_budget=`` and ``durability=``.

    Raises OptionError for what makes no sense.
    """
    if durability not in {None, "commit", "none"}:
        message = f'durability={durability!r} was given: use "commit" or "none" (scratch).'
        raise OptionError(message)
    fraction = _fraction(states)
    durable = durability == "commit" or (durability is None and directory is not None)
    if durable and directory is None:
        message = (
            'durability="commit" was asked for without dir=: name a directory, for a run that'
            " nobody can find cannot be resumed."
        )
        raise OptionError(message)
    if fraction == 0.0 and not durable and (directory is not None or ram_budget is not None):
        name = "dir" if directory is not None else "ram_budget"
        message = (
            f"{name}= was given with states={states!r}, which puts nothing on disk. Leave {name}"
            ' out, or ask for states="disk" or a fraction.'
        )
        raise OptionError(message)
    budget = None if ram_budget is None else parse_size(ram_budget, "ram_budget")
    return Placement(fraction, directories(directory), budget, durable)


def stowage(given: Mapping[str, Any]) -> Stowage:
    """Read the keywords of our own in an optimizer's constructor."""
    where = placement(given["states"], given["dir"], given["ram_budget"], given["durability"])
    overlap = given["overlap"]
    if overlap not in {"none", "forward", "backward"}:
        message = f'overlap={overlap!r} was given: it is "none", "forward" or "backward".'
        raise OptionError(message)
    return Stowage(
        where,
        given["policy"] or PipelinePolicy(),
        overlap,
        _state_format(given["state_format"], given["amsgrad"]),
        update_on(given["update_on"], overlap),
    )


def run(given: Mapping[str, Any]) -> Run:
    """Read what the constructor is told of the run that the optimizer is a part of."""
    module, extra = given["module"], given["extra"]
    if module is not None and not isinstance(module, torch.nn.Module):
        message = f"module={module!r} was given: pass the model, a torch.nn.Module."
        raise OptionError(message)
    if extra is not None and not callable(extra):
        message = (
            f"extra={extra!r} was given: pass a function that returns a dict; it is called at each"
            " commit."
        )
        raise OptionError(message)
    return Run(
        module=module,
        accumulation_steps=given["accumulation_steps"],
        commit_every=Interval.parse(given["commit_every"]),
        extra=extra,
    )


def update_on(where: UpdateOn | None, overlap: Overlap) -> UpdateOn | None:
    """Return what was said of where updates run, checked."""
    if where is not None and not is_update_on(where):
        message = f"update_on={where!r} was given: it is {CHOICES}."
        raise OptionError(message)
    if reaches_device(where):
        refuse_beside(overlap, f"{told(where)} was asked for")
    return where


def refuse_beside(overlap: Overlap, why: str) -> None:
    """Raise OptionError, which begins with ``why``, where updates on the device cannot overlap."""
    if overlap != "none":
        message = (
            f'{why}, and overlap="{overlap}": updates on the device run inside step(), on the'
            " stream that computes, so there is nothing for them to run beside. Leave overlap out,"
            ' or use update_on="host".'
        )
        raise OptionError(message)


def refuse_host(parameter: torch.Tensor, name: str, where: UpdateOn | None) -> None:
    """Raise OptionError for a parameter in host memory, which no accelerator updates."""
    if reaches_device(where) and not device.is_remote(parameter):
        message = (
            f"{name} is on {parameter.device}, and {told(where)} was asked for, which updates"
            " on the accelerator that has the parameters. Move the model there before the optimizer"
            ' is made, or use update_on="host".'
        )
        raise OptionError(message)


def _state_format(name: str | None, amsgrad: object) -> StateFormat | None:
    if name is None:
        return None
    if name not in set(StateFormat):
        known = ", ".join(f'"{f.value}"' for f in StateFormat)
        message = f"state_format={name!r} was given: it is one of {known}."
        raise OptionError(message)
    chosen = StateFormat(name)
    if chosen in {StateFormat.BF16, StateFormat.INT8} and amsgrad:
        message = (
            f"state_format={name!r} was given with amsgrad=True: it has no running maximum. Use"
            ' "split" or "fp32".'
        )
        raise OptionError(message)
    return chosen


def check_overlap(overlap: Overlap, module: torch.nn.Module | None, steps: int) -> None:
    """Raise OptionError for a schedule that lacks what it needs or cannot be exact."""
    if overlap == "forward" and module is None:
        message = (
            'overlap="forward" was asked for without module=: the model says where new weights'
            " must be waited for. Pass module=model."
        )
        raise OptionError(message)
    if overlap != "backward":
        if steps != 1:
            message = (
                f'accumulation_steps={steps} was given with overlap="{overlap}", which needs not'
                " know: a step is whatever lies between two calls of step(). Leave it out."
            )
            raise OptionError(message)
        return
    refuse_ranks(module, ())


def refuse_foreign(module: torch.nn.Module | None, parameters: Sequence[torch.Tensor]) -> None:
    """Raise OptionError where ``module`` has none of the optimizer's ``parameters``.

    Some may be outside of it: they have no names, and are new when ``step()`` returns.
    """
    if module is None or not parameters:
        return
    own = {id(p) for p in module.parameters()}
    if own.isdisjoint(id(p) for p in parameters):
        count = format_count(len(own), "parameter")
        message = (
            f"module= is a {type(module).__name__} with {count}, and none of the"
            f" optimizer's {len(parameters)} is among them: names, buffers and the places where new"
            " weights are waited for would be another model's. Pass the model that owns the"
            " parameters, or leave module out."
        )
        raise OptionError(message)


def refuse_ranks(module: torch.nn.Module | None, parameters: Iterable[torch.Tensor]) -> None:
    """Raise OptionError where gradients are not final when autograd has them.

    FSDP2's are: it has reduced them before it calls the hooks of a sharded parameter.
    """
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if isinstance(module, torch.nn.parallel.DistributedDataParallel) or (
        several and not all(is_sharded(p) for p in parameters)
    ):
        message = (
            'overlap="backward" was asked for in a run of several ranks: a gradient is not final'
            ' when this rank has it. Use overlap="forward" or "none", or fully_shard the model.'
        )
        raise OptionError(message)


def refuse_scaling(found_inf: object, factor: float) -> None:
    """Raise OptionError where gradients were to be scaled or skipped that are used already."""
    if found_inf is not None or factor != 1.0:
        message = (
            'A GradScaler (or div_scale) was used with overlap="backward": updates by the scaled'
            ' gradients have begun. Use overlap="forward" or "none", or bfloat16 without a scaler.'
        )
        raise OptionError(message)


def directories(directory: Directory, keyword: str = "dir") -> tuple[Path, ...]:
    """Return one path or several as a tuple; empty for None."""
    if directory is None:
        return ()
    given = [directory] if isinstance(directory, str | os.PathLike) else list(directory)
    if not given:
        message = f"{keyword}= is an empty list: name at least one directory, or leave it out."
        raise OptionError(message)
    if any(os.fspath(d) == "" for d in given):
        message = f'{keyword}="" was given: name a directory ("." for this one), or leave it out.'
        raise OptionError(message)
    return tuple(Path(d).expanduser() for d in given)


def check_hyper(options: Mapping[str, Any]) -> None:
    """Raise OptionError for a learning rate, beta, epsilon or weight decay out of its range."""
    for name in ("lr", "eps", "weight_decay"):
        value = _number(options[name], name)
        if not math.isfinite(value):
            message = f"{name}={value} was given: it must be finite, every weight would be NaN."
            raise OptionError(message)
        if value < 0.0:
            message = f"{name}={value} was given: it must not be negative."
            raise OptionError(message)
    betas = options["betas"]
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
        message = f"betas={betas!r} was given: it is a pair of numbers."
        raise OptionError(message)
    for index, beta in enumerate(betas):
        if not 0.0 <= _number(beta, f"betas[{index}]") < 1.0:
            message = f"betas[{index}]={beta} was given: it must be at least 0 and below 1."
            raise OptionError(message)


def _number(value: object, name: str) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.item()
    if isinstance(value, _NUMBERS):
        return float(value)
    message = f"{name}={value!r} was given: it is a number, or a tensor of one element."
    raise OptionError(message)


_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


def with_own_flags(
    saved: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return saved groups with the flags of ``own`` that choose among torch's implementations.

    ``foreach``, ``fused``, ``capturable`` and ``differentiable`` say how the saving process took
    its steps, and no number of the rule: they are not a checkpoint's to decide here.
    """
    groups = []
    for index, group in enumerate(saved):
        mine = own[index] if index < len(own) else {}  # torch refuses another number of groups
        kept = {k: v for k, v in group.items() if k not in _IMPLEMENTATION}
        groups.append({**kept, **{k: mine[k] for k in _IMPLEMENTATION if k in mine}})
    return groups


def refuse_torch_keywords(options: Mapping[str, Any]) -> None:
    """Raise OptionError for the keywords of torch's class that mean something we cannot do.

    False asks for nothing: the bits are those of torch's plain loop whatever ``fused`` says.
    """
    why = {
        "foreach": "the update is one fused pass over each chunk, never a pass per operation",
        "capturable": "the update runs on the host, outside any graph",
        "differentiable": "the update runs in native code that autograd does not see",
    }
    for name, reason in why.items():
        if options.get(name):
            message = f"{name}=True was asked for: {reason}. Leave it out, or use torch.optim."
            raise OptionError(message)


def is_to_be_trained(parameter: torch.Tensor) -> bool:
    """Return whether states are made for ``parameter`` now, so that it must be of a kind we update.

    A frozen one may be of any kind as long as it gets no gradient; a lazy module's has no values
    before the first forward. Both are looked at again when they have a gradient.
    """
    return parameter.requires_grad and not is_lazy(parameter)


def check_parameter(parameter: torch.Tensor, name: str) -> None:
    """Raise DTypeError unless the kernels can update ``parameter`` in place."""
    if parameter.dtype not in STATE_DTYPES:
        refuse_dtype(parameter.dtype, name)
    if not (parameter.is_cpu or device.is_remote(parameter)):
        message = (
            f"{name} is on {parameter.device}: parameters on the CPU and on torch's current"
            " accelerator are taken."
            + (" Give it memory first: model.to_empty(device='cpu')." if parameter.is_meta else "")
        )
        raise DTypeError(message)
    if parameter.layout != torch.strided:
        message = f"{name} has layout {parameter.layout}: only dense parameters are trained."
        raise DTypeError(message)
    if not parameter.is_contiguous():
        message = (
            f"{name} (shape {tuple(parameter.shape)}, strides {parameter.stride()}) does not fill"
            " one run of memory, over which the update runs, or not in the order it had when the"
            " optimizer was made. Choose its memory format (channels_last is taken) before that,"
            " or give it a contiguous copy: param.data = param.data.contiguous()."
        )
        raise DTypeError(message)
    if hasattr(type(parameter), "own"):  # [Note: Unpublished], of which this layer knows no more
        message = (
            f'{name} is being updated by another optimizer, which has overlap="forward". Give each'
            ' parameter to one optimizer; or make both with overlap="none", and close() the one'
            " that is not wanted."
        )
        raise OptionError(message)
    if type(parameter) not in _PLAIN:
        message = (
            f"{name} is a {type(parameter).__name__}: of tensor subclasses only DTensor over plain"
            " shards (FSDP2's fully_shard) is taken."
        )
        raise DTypeError(message)


def check_gradient(parameter: torch.Tensor, gradient: torch.Tensor, name: str) -> None:
    """Raise DTypeError unless the kernels can read ``gradient``."""
    if gradient.layout != torch.strided:
        message = (
            f"The gradient of {name} is sparse, and updates run over all elements. Make its module"
            " with sparse=False, or leave it to torch.optim.SparseAdam."
        )
        raise DTypeError(message)
    if gradient.dtype not in STATE_DTYPES:
        message = (
            f"The gradient of {name} has dtype {gradient.dtype}: float32, bfloat16 and float16"
            " are taken."
        )
        raise DTypeError(message)
    if gradient.numel() != parameter.numel():
        message = (
            f"The gradient of {name} has {gradient.numel()} elements and the parameter"
            f" {parameter.numel()}: its data was exchanged since. Take the gradient anew."
        )
        raise DTypeError(message)
    if gradient.device != parameter.device and not gradient.is_cpu:  # those that came down
        message = (
            f"The gradient of {name} is on {gradient.device} and the parameter on"
            f" {parameter.device}: both must be on one device."
        )
        raise DTypeError(message)


def fits(parameter: torch.Tensor, gradient: torch.Tensor | None) -> bool:
    """Return whether the kernels can update ``parameter`` by ``gradient``: the quick answer."""
    return (
        gradient is not None
        and (gradient.device == parameter.device or gradient.is_cpu)
        and (parameter.is_cpu or device.is_remote(parameter))
        and parameter.is_contiguous()
        and gradient.layout == torch.strided
        and gradient.dtype in STATE_DTYPES
        and parameter.dtype in STATE_DTYPES
        and gradient.numel() == parameter.numel()
        and type(parameter) in _PLAIN
    )


def refuse_change(
    parameter: torch.Tensor, group: Mapping[str, Any], family: Family, elements: int, name: str
) -> NoReturn:
    """Raise OptionError for a parameter that is no longer what its states were made for."""
    if parameter.dtype != family.dtype:
        message = (
            f"{name} was {family.dtype} when the optimizer was made and is {parameter.dtype} now."
            " Cast the model first, then make the optimizer."
        )
    elif bool(group["amsgrad"]) != family.amsgrad:
        message = (
            f"amsgrad of {name} was {family.amsgrad} when the optimizer was made and is"
            f" {group['amsgrad']} now: it decides which states exist. Make a new optimizer."
        )
    elif parameter.numel() == elements:
        message = (
            f"{name} is on {parameter.device} now and was elsewhere when the optimizer was made."
            " Move the model first, then make the optimizer."
        )
    else:
        message = (
            f"{name} has {parameter.numel()} elements now, another number than when the optimizer"
            " was made: its data was exchanged. Make a new optimizer."
        )
    raise OptionError(message)


def refuse_accelerator(parameter: torch.Tensor, name: str) -> None:
    """Raise DTypeError for a parameter on an accelerator, which ``CPUAdam`` is not for."""
    if device.is_remote(parameter):
        message = (
            f"{name} is on {parameter.device}, and CPUAdam is for parameters in host memory. Use"
            " tensorstow.AdamW, which updates them on the host all the same, or HybridAdam, which"
            " leaves them to torch's fused Adam."
        )
        raise DTypeError(message)


def refuse_duplicates(parameters: Iterable[Any]) -> None:
    """Raise OptionError where a group names a parameter twice."""
    seen: set[int] = set()
    for index, item in enumerate(parameters):
        parameter = item[1] if isinstance(item, tuple) else item
        if id(parameter) in seen:
            message = f"Parameter {index} of a group is in it twice. Name each parameter once."
            raise OptionError(message)
        seen.add(id(parameter))


def check_saved(
    entry: Mapping[str, Any], parameter: torch.Tensor, name: str, *, amsgrad: bool
) -> None:
    """Raise OptionError unless a saved state has Adam's tensors in the parameter's size."""
    for key in ("step", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])):
        if key not in entry:
            message = (
                f"The saved state of {name} has no {key!r} (it has {sorted(entry)}): it is not"
                " Adam's. Load the state_dict of an Adam or AdamW."
            )
            raise OptionError(message)
    for key, value in entry.items():
        if key == "step":
            continue
        if isinstance(value, StateOnDisk):
            message = (
                f"The saved {key!r} of {name} stands for a state on disk and has no values: load"
                " what state_dict() returns, not optimizer.state."
            )
            raise OptionError(message)
        if not isinstance(value, torch.Tensor) or value.numel() != parameter.numel():
            found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            message = (
                f"The saved {key!r} of {name} is {found}, and the parameter is"
                f" {tuple(parameter.shape)}: they are of different models."
            )
            raise OptionError(message)


def accept_grad_dtype(parameters: Iterable[torch.Tensor], dtype: torch.dtype) -> None:
    """Let ``parameters`` have gradients of ``dtype``, other than their own.

    Autograd then accumulates ``.grad`` in that dtype: 16-bit gradients of fp32 parameters take
    half the memory. torch refuses such a ``.grad`` otherwise.
    """
    if dtype not in STATE_DTYPES:
        message = f"grad_dtype={dtype} was given: float32, bfloat16 and float16 are taken."
        raise DTypeError(message)
    for parameter in parameters:
        if is_lazy(parameter):
            message = (
                "grad_dtype= was given with parameters of a lazy module, which have no dtype yet."
                " Run a forward of the model before the optimizer is made."
            )
            raise DTypeError(message)
        if parameter.dtype in STATE_DTYPES:  # a frozen one may be of any
            parameter.grad_dtype = dtype


def _fraction(states: object) -> float:
    if isinstance(states, str) and states in _FRACTIONS:
        return _FRACTIONS[states]
    if isinstance(states, str) or not _is_fraction(states):
        message = (
            f'states={states!r} was given: use "host" (or "ram"), "disk", or the fraction on disk,'
            " a number between 0 and 1."
        )
        raise OptionError(message)
    return float(states)


def fraction_of(value: object, keyword: str) -> float:
    """Return the fraction of the states that ``keyword`` puts on disk."""
    if not _is_fraction(value):
        message = f"{keyword}={value!r} was given: it is a number between 0 and 1."
        raise OptionError(message)
    return float(value)


def _is_fraction(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        return False
    return 0.0 <= float(value) <= 1.0
