"""Checks what a step is given: parameters, gradients, hyper-parameters, saved states."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from tensorstow.base.errors import DTypeError, OptionError
from tensorstow.base.sizes import format_count
from tensorstow.base.update_on import Overlap, UpdateOn, keyword_of, reaches_device
from tensorstow.io import device_link
from tensorstow.states.layout import STATE_DTYPES, Family, refuse_dtype
from tensorstow.states.native_pipeline import PLAIN_TENSORS
from tensorstow.states.offload_policy import OffloadPolicy
from tensorstow.step.unpublished import Unpublished
from tensorstow.tensors.dtensor import layout_of
from tensorstow.tensors.placeholder import StateOnDisk

_NUMBERS = (int, float, np.integer, np.floating)


def refuse_beside(overlap: Overlap, why: str) -> None:
    """Raise OptionError, which begins with ``why``, where updates on the device cannot overlap."""
    if overlap == "forward":
        message = (
            f'{why}, and overlap="forward": updates on the device are not waited for module by'
            ' module. Use overlap="backward" or "none", or update_on="host".'
        )
        raise OptionError(message)


def refuse_host(parameter: torch.Tensor, name: str, where: UpdateOn | None) -> None:
    """Raise OptionError for a parameter in host memory, which no accelerator updates."""
    if reaches_device(where) and not device_link.is_remote(parameter):
        message = (
            f"{name} is on {parameter.device}, and {keyword_of(where)} was requested, which updates"
            " on the accelerator that has the parameters. Move the model there before the optimizer"
            ' is made, or use update_on="host".'
        )
        raise OptionError(message)


def refuse_disk(overlap: Overlap) -> None:
    """Raise OptionError where updates of parameters on disk would run beside the next forward."""
    if overlap == "forward":
        message = (
            'overlap="forward" was requested with parameters on disk: updates beside the next'
            ' forward would need weights that it has released. Use "backward" or "none".'
        )
        raise OptionError(message)


def refuse_sharded_since(new: Sequence[torch.Tensor], offload_policy: OffloadPolicy) -> None:
    """Raise OptionError where parameters became sharded, and more than states knew the old ones.

    A directory was taken by one rank for whole parameters, and hooks wait for tensors of before.
    """
    durable, overlap = offload_policy.placement.durable, offload_policy.overlap
    if not any(layout_of(p) is not None for p in new) or not (durable or overlap != "none"):
        return
    given = "dir=" if durable else f'overlap="{overlap}"'
    message = (
        f"{given} was given, and all parameters were exchanged for sharded ones since, as"
        " accelerate does with fsdp_version=2: it was for the parameters of before. Shard with"
        f" tensorstow.stow and pass prepared(model) to accelerate, or leave {given} out."
    )
    raise OptionError(message)


def check_overlap(overlap: Overlap, module: torch.nn.Module | None, steps: object) -> None:
    """Raise OptionError for a schedule whose requirements are not met, or that cannot be exact."""
    if overlap == "forward" and module is None:
        message = (
            'overlap="forward" was requested without module=: the model says where new weights'
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
            f" optimizer's {len(parameters)} is among them: names, buffers and hooks would be those"
            " of another model. Pass the model that owns the parameters, or leave module out."
        )
        raise OptionError(message)


def refuse_ranks(module: torch.nn.Module | None, parameters: Iterable[torch.Tensor]) -> None:
    """Raise OptionError where gradients are not final when autograd has them.

    FSDP2's are: it has reduced them before it calls the hooks of a sharded parameter.
    """
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if isinstance(module, torch.nn.parallel.DistributedDataParallel) or (
        several and any(layout_of(p) is None for p in parameters)
    ):
        message = (
            'overlap="backward" was requested in a run of several ranks: a gradient is not final'
            ' when this rank has it. Use overlap="forward" or "none", or fully_shard the model.'
        )
        raise OptionError(message)


def refuse_scaling(factor: float, *, may_skip: bool) -> None:
    """Raise OptionError where gradients were to be scaled or skipped that are used already."""
    if may_skip or factor != 1.0:
        message = (
            'A GradScaler (or div_scale) was used with overlap="backward": updates by the scaled'
            ' gradients have begun. Use overlap="forward" or "none", or bfloat16 without a scaler.'
        )
        raise OptionError(message)


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


def refuse_torch_keywords(options: Mapping[str, Any]) -> None:
    """Raise OptionError for keywords of torch's class that cannot be honoured.

    False is accepted: the bits are those of torch's plain loop in any case.
    """
    why = {
        "foreach": "the update is one fused pass over each chunk, never a pass per operation",
        "capturable": "the update runs on the host, outside any graph",
        "differentiable": "the update runs in native code that autograd does not see",
    }
    for name, reason in why.items():
        if options.get(name):
            message = f"{name}=True was requested: {reason}. Leave it out, or use torch.optim."
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
    if not (parameter.is_cpu or device_link.is_remote(parameter)):
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
    if issubclass(type(parameter), Unpublished):
        message = (
            f'{name} is being updated by another optimizer, which has overlap="forward". Give each'
            ' parameter to one optimizer; or make both with overlap="none", and close() the one'
            " that is not wanted."
        )
        raise OptionError(message)
    if type(parameter) not in PLAIN_TENSORS:
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


def refuse_change(
    parameter: torch.Tensor, group: Mapping[str, Any], family: Family, elements: int, name: str
) -> NoReturn:
    """Raise OptionError for a parameter that no longer matches its states."""
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
    if device_link.is_remote(parameter):
        message = (
            f"{name} is on {parameter.device}, and CPUAdam is for parameters in host memory. Use"
            " tensorstow.AdamW, which updates them on the host all the same, or HybridAdam, which"
            " leaves them to torch's fused Adam."
        )
        raise DTypeError(message)


def list_params(group: dict[str, Any]) -> None:
    """Make "params" of a new group a list; raise OptionError where it names a parameter twice."""
    given = group.get("params")
    if not isinstance(given, Iterable) or isinstance(given, torch.Tensor):
        return  # which torch takes, or refuses
    group["params"] = given = list(given)
    seen: set[int] = set()
    for index, item in enumerate(given):
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
    """Allow gradients of ``dtype`` for ``parameters`` of another dtype.

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
