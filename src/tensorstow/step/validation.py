"""Checks the input of a step: parameters, gradients, hyper-parameters, saved states."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from tensorstow.base.errors import DTypeError, OptionError, abbreviated
from tensorstow.base.fields import number_of, read_value
from tensorstow.base.sizes import format_count
from tensorstow.base.update_on import (
    UpdateOn,
    UpdateTiming,
    keyword_of,
    reaches_device,
)
from tensorstow.io import device_link
from tensorstow.states.layout import STATE_DTYPES, Family, OptionalStates, refuse_dtype
from tensorstow.states.offload_policy import OffloadPolicy
from tensorstow.step.unpublished import Unpublished
from tensorstow.tensors.dtensor import PLAIN_TENSORS, layout_of
from tensorstow.tensors.placeholder import StateOnDisk

_HELD = ("lr", "eps", "weight_decay")
_FLAGS = (
    *("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused"),
    *("decoupled_weight_decay", "bias_correction"),
)
KEYS_OF_STEPS = ("betas", *_HELD, *_FLAGS, "ema")
"""Keys of a group that a step reads."""
_MOST_STEPS = 2.0**63
_NUMBERS = (int, float, np.integer, np.floating)
_STORED_FLAGS = frozenset({"amsgrad", "maximize", "decoupled_weight_decay"})
_KEYS = _STORED_FLAGS | {"lr", "betas", "eps", "weight_decay"}
"""Keys of every group that has been stepped."""


def refuse_beside(timing: UpdateTiming, why: str) -> None:
    """Raise OptionError, which begins with ``why``, if updates on the device cannot overlap."""
    if timing.in_forward:
        message = (
            f"{why}, and {timing.keyword}: a forward cannot wait for updates on the"
            ' device module by module. Use overlap="none", or update_on="host".'
        )
        raise OptionError(message)


def refuse_host(parameter: torch.Tensor, name: str, update_on: UpdateOn | None) -> None:
    """Raise OptionError for a parameter in host memory, which no accelerator updates."""
    if reaches_device(update_on) and not device_link.is_remote(parameter):
        message = (
            f"{name} is on {parameter.device}, and {keyword_of(update_on)} was requested, which"
            " updates parameters on an accelerator. Move the model to it before you create the"
            ' optimizer, or use update_on="host".'
        )
        raise OptionError(message)


def refuse_sharded_since(new: Sequence[torch.Tensor], offload_policy: OffloadPolicy) -> None:
    """Raise OptionError if parameters became sharded, and a directory or hooks use the old ones.

    One rank has taken the directory for whole parameters; hooks wait for the old tensors.
    """
    durable, timing = offload_policy.placement.durable, offload_policy.timing
    if not any(layout_of(p) is not None for p in new) or not (durable or timing.is_overlapped):
        return
    # An overlap that nobody asked for needs a module.
    overlap = "module=" if offload_policy.is_overlap_chosen else timing.keyword
    keyword = "dir=" if durable else overlap
    message = (
        f"{keyword} was given, and all parameters were replaced by sharded ones after that, as"
        " accelerate does with fsdp_version=2: it was for the old parameters. Shard with"
        f" tensorstow.stow and pass prepared(model) to accelerate, or leave {keyword} out."
    )
    raise OptionError(message)


def check_overlap(timing: UpdateTiming, module: torch.nn.Module | None, steps: object) -> None:
    """Raise OptionError for a schedule whose requirements are not met, or that cannot be exact."""
    if timing.in_forward and module is None:
        message = (
            f"{timing.keyword} was requested without module=: hooks on the model wait"
            " for new weights. Pass module=model."
        )
        raise OptionError(message)
    if timing.begins_early:
        refuse_ranks(module, ())
    elif steps != 1:
        message = (
            f"accumulation_steps={steps} was given with {timing.keyword}, which does not need it:"
            " all backwards between two calls of step() are one step. Leave it out."
        )
        raise OptionError(message)


def refuse_foreign(module: torch.nn.Module | None, parameters: Sequence[torch.Tensor]) -> None:
    """Raise OptionError if ``module`` has none of the optimizer's ``parameters``.

    Some may be outside of it: they have no names, and are new when ``step()`` returns.
    """
    if module is None or not parameters:
        return
    module_ids = {id(p) for p in module.parameters()}
    if module_ids.isdisjoint(id(p) for p in parameters):
        count = format_count(len(module_ids), "parameter")
        message = (
            f"module= is a {type(module).__name__} with {count}, and none of the"
            f" optimizer's {len(parameters)} is among them: names, buffers and hooks would be those"
            " of another model. Pass the model that owns the parameters, or leave module out."
        )
        raise OptionError(message)


def refuse_ranks(module: torch.nn.Module | None, parameters: Iterable[torch.Tensor]) -> None:
    """Raise OptionError if gradients are not final when autograd has accumulated them.

    FSDP2's are: it reduces them before it calls the hooks of a sharded parameter.
    """
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if isinstance(module, torch.nn.parallel.DistributedDataParallel) or (
        several and any(layout_of(p) is None for p in parameters)
    ):
        message = (
            'overlap="backward" or "speculative" was requested in a run of several ranks: a'
            ' gradient is not final when this rank has it. Use overlap="none", or fully_shard the'
            " model."
        )
        raise OptionError(message)


def check_hyper(options: Mapping[str, Any]) -> None:
    """Raise OptionError for a learning rate, beta, epsilon or weight decay out of its range.

    Updates compute in fp32, so a value or a product that fp32 cannot hold is out of range.
    """
    refuse_unheld(options)
    rate, _, decay = [_option(options, name) for name in _HELD]
    betas = options["betas"]
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
        message = f"betas={abbreviated(betas)} was given: it must be a pair of numbers."
        raise OptionError(message)
    for index, beta in enumerate(betas):
        number = number_of(_item(beta))
        if number is None or not 0.0 <= number < 1.0:
            message = (
                f"betas[{index}]={abbreviated(beta)} was given: it must be at least 0 and below 1."
            )
            raise OptionError(message)
    if options.get("ema") is not None:
        average = number_of(_item(options["ema"]))
        if average is None or not 0.0 <= average <= 1.0:
            message = (
                f"ema={abbreviated(options['ema'])} was given: it is the decay of the average, a"
                " number from 0 to 1, such as 0.9999, or None."
            )
            raise OptionError(message)
    for product, name in (
        (rate * decay, "lr * weight_decay"),
        (rate / (1.0 - float(betas[0])), "lr / (1 - betas[0])"),
    ):
        if number_of(product) is None:
            message = (
                f"lr={rate:g}, betas={betas} and weight_decay={decay:g} were given: {name} is more"
                " than fp32 holds, every weight would be infinite or NaN. Use smaller values."
            )
            raise OptionError(message)


def refuse_unheld(options: Mapping[str, Any]) -> None:
    """Raise OptionError for a learning rate, epsilon or weight decay that fp32 cannot hold."""
    for name in _HELD:
        value = _item(options.get(name))
        if isinstance(value, _NUMBERS) and not isinstance(value, bool) and number_of(value) is None:
            message = (
                f"{name}={abbreviated(value)} was given: it must be finite in fp32, or every"
                " weight would be NaN."
            )
            raise OptionError(message)


def check_group(group: object) -> None:
    """Raise OptionError for a stored group that no optimizer of ours can have written."""
    if not isinstance(group, Mapping) or not group.keys() >= _KEYS or "params" in group:
        message = f"{repr(group)[:200]} was found: a group has {', '.join(sorted(_KEYS))}."
        raise OptionError(message)
    check_hyper(group)
    for name in _STORED_FLAGS:
        if not isinstance(group[name], bool | int | np.bool_) or group[name] not in {0, 1}:
            message = f"{name}={group[name]!r} was found: it must be True or False."
            raise OptionError(message)
    refuse_torch_keywords(group)


def _option(options: Mapping[str, Any], name: str) -> float:
    """Return an option that must be a number, 0 or greater."""
    number = number_of(_item(options[name]))
    if number is None:
        text = abbreviated(options[name])
        message = f"{name}={text} was given: it must be a number, or a tensor of one element."
        raise OptionError(message)
    if number < 0.0:
        message = f"{name}={number} was given: it must not be negative."
        raise OptionError(message)
    return number


def _item(value: Any) -> Any:  # noqa: ANN401  # a tensor of one number, or anything else
    """Return the number in a tensor of one element, and anything else as it is."""
    is_one = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()
    return value.item() if is_one else value


def refuse_torch_keywords(options: Mapping[str, Any]) -> None:
    """Raise OptionError for keywords of torch's class that have no effect, or are not flags.

    False is accepted: the bits are those of torch's plain loop in any case.
    """
    why = {
        "foreach": "the update is one fused pass over each chunk, never a pass per operation",
        "capturable": "the update runs on the host, outside any graph",
        "differentiable": "the update runs in native code that autograd does not see",
    }
    for name in _FLAGS:
        value = options.get(name)
        if value is not None and type(value) is not bool:
            read_value(bool | None, value, name)
    for name, reason in why.items():
        if options.get(name):
            message = f"{name}=True was requested: {reason}. Leave it out, or use torch.optim."
            raise OptionError(message)


def is_to_be_trained(parameter: torch.Tensor) -> bool:
    """Return whether ``parameter`` gets states now, so that we must be able to update it.

    A frozen one may be of any kind as long as it gets no gradient; a lazy module's has no values
    before the first forward. Both are checked when they have a gradient.
    """
    return parameter.requires_grad and not is_lazy(parameter)


def check_parameter(parameter: torch.Tensor, name: str) -> None:
    """Raise DTypeError unless the kernels can update ``parameter`` in place."""
    if parameter.dtype not in STATE_DTYPES:
        refuse_dtype(parameter.dtype, name)
    if not (parameter.is_cpu or device_link.is_remote(parameter)):
        message = (
            f"{name} is on {parameter.device}: parameters must be on the CPU or on torch's current"
            " accelerator."
            + (" Allocate it first: model.to_empty(device='cpu')." if parameter.is_meta else "")
        )
        raise DTypeError(message)
    if parameter.layout != torch.strided:
        message = f"{name} has layout {parameter.layout}: parameters must be dense."
        raise DTypeError(message)
    if not parameter.is_contiguous():
        message = (
            f"{name} (shape {tuple(parameter.shape)}, strides {parameter.stride()}) does not fill"
            " one run of memory, which the update needs, or its memory format has changed since the"
            " optimizer was made. Choose its format (such as channels_last) before that,"
            " or make it contiguous: param.data = param.data.contiguous()."
        )
        raise DTypeError(message)
    # Before the check of classes: such a parameter has a class of ours for now.
    if issubclass(type(parameter), Unpublished):
        message = (
            f'{name} is being updated by another optimizer, which has overlap="forward" or'
            " defer_untouched=True. Pass each parameter to one optimizer; or create both with"
            ' overlap="none", without defer_untouched, and close() the one that you do not need.'
        )
        raise OptionError(message)
    if type(parameter) not in PLAIN_TENSORS:
        message = (
            f"{name} is a {type(parameter).__name__}: the only supported tensor subclass is DTensor"
            " over plain shards (FSDP2's fully_shard)."
        )
        raise DTypeError(message)


def check_gradient(parameter: torch.Tensor, gradient: torch.Tensor, name: str) -> None:
    """Raise DTypeError unless the kernels can read ``gradient``."""
    if gradient.layout != torch.strided:
        message = (
            f"The gradient of {name} is sparse, and updates run over all elements. Create its"
            " module with sparse=False, or use torch.optim.SparseAdam for it."
        )
        raise DTypeError(message)
    if gradient.dtype not in STATE_DTYPES:
        message = (
            f"The gradient of {name} has dtype {gradient.dtype}: it must be float32, bfloat16 or"
            " float16."
        )
        raise DTypeError(message)
    if gradient.numel() != parameter.numel():
        message = (
            f"The gradient of {name} has {gradient.numel()} elements and the parameter"
            f" {parameter.numel()}: its data was replaced since. Compute the gradient again."
        )
        raise DTypeError(message)
    if gradient.device != parameter.device and not gradient.is_cpu:  # offloaded ones are
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
    elif OptionalStates.of(group) != family.optional:
        was = "a number" if family.ema else "None"
        message = (
            f"ema of {name} was {was} when the optimizer was made and is {group.get('ema')} now: it"
            " decides which states exist. Keep it a number (0 makes the average the weight), or"
            " make a new optimizer."
        )
    elif parameter.numel() == elements:
        message = (
            f"{name} is on {parameter.device} now and was elsewhere when the optimizer was made."
            " Move the model first, then make the optimizer."
        )
    else:
        message = (
            f"{name} has {parameter.numel()} elements now, another number than when the optimizer"
            " was made: its data was replaced. Make a new optimizer."
        )
    raise OptionError(message)


def refuse_average(group: Mapping[str, Any]) -> None:
    """Raise OptionError for an average of a parameter that torch's own Adam updates."""
    if group.get("ema") is not None:
        message = (
            f"ema={group['ema']} is set in a parameter group, and a parameter of it is on an"
            " accelerator, where torch's fused Adam updates it without an average. Use"
            ' tensorstow.AdamW, with update_on="device" to update there, or remove the key.'
        )
        raise OptionError(message)


def refuse_accelerator(parameter: torch.Tensor, name: str) -> None:
    """Raise DTypeError for a parameter on an accelerator: ``CPUAdam`` does not support it."""
    if device_link.is_remote(parameter):
        message = (
            f"{name} is on {parameter.device}, and CPUAdam is for parameters in host memory. Use"
            " tensorstow.AdamW, which also updates them on the host, or HybridAdam, which"
            " leaves them to torch's fused Adam."
        )
        raise DTypeError(message)


def list_params(group: dict[str, Any]) -> None:
    """Make "params" of a new group a list; raise OptionError if it has a parameter twice."""
    items = group.get("params")
    if not isinstance(items, Iterable) or isinstance(items, torch.Tensor):
        return  # torch checks it
    group["params"] = items = list(items)
    seen: set[int] = set()
    for index, item in enumerate(items):
        parameter = item[1] if isinstance(item, tuple) else item
        if id(parameter) in seen:
            message = f"Parameter {index} of a group is in it twice. Pass each parameter once."
            raise OptionError(message)
        seen.add(id(parameter))


def check_saved(
    entry: Mapping[str, Any], parameter: torch.Tensor, name: str, optional: OptionalStates
) -> None:
    """Raise OptionError unless a saved state has Adam's tensors of the parameter's size."""
    if optional.ema and "ema" not in entry:
        message = (
            f"The saved state of {name} has no 'ema' (it has {sorted(entry)}), the average of its"
            " weights: it was saved without ema=. Add 'ema' to each parameter's state, such as a"
            " copy of its weight in fp32, which begins the average there."
        )
        raise OptionError(message)
    amsgrad = optional.amsgrad
    for key in ("step", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])):
        if key not in entry:
            message = (
                f"The saved state of {name} has no {key!r} (it has {sorted(entry)}): it is not"
                " Adam's. Load the state_dict of an Adam or AdamW."
            )
            raise OptionError(message)
    check_step(entry["step"], name)
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
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            message = (
                f"The saved {key!r} of {name} is {shape}, and the parameter is"
                f" {tuple(parameter.shape)}: they are of different models."
            )
            raise OptionError(message)
        if not value.is_floating_point():
            message = (
                f"The saved {key!r} of {name} is {value.dtype}: Adam's states are numbers of"
                " floating point. The file is damaged, or something else wrote it."
            )
            raise OptionError(message)


def check_step(step: object, name: str) -> None:
    """Raise OptionError unless ``step`` is a count of steps, or a tensor with one."""
    count = number_of(_item(step))
    if count is None or not 0.0 <= count < _MOST_STEPS or count % 1.0:
        message = (
            f"The saved 'step' of {name} is {abbreviated(_item(step))}: it must be a whole number,"
            " at least 0 and below 2**63. The file is damaged, or something else wrote it."
        )
        raise OptionError(message)


def accept_grad_dtype(parameters: Iterable[torch.Tensor], dtype: torch.dtype) -> None:
    """Allow gradients of ``dtype`` for ``parameters`` of another dtype.

    Autograd then accumulates ``.grad`` in that dtype: 16-bit gradients of fp32 parameters take
    half the memory. torch refuses such a ``.grad`` otherwise.
    """
    read_value(torch.dtype, dtype, "grad_dtype")
    if dtype not in STATE_DTYPES:
        message = f"grad_dtype={dtype} was given: it must be float32, bfloat16 or float16."
        raise DTypeError(message)
    for parameter in parameters:
        if is_lazy(parameter):
            message = (
                "grad_dtype= was given with parameters of a lazy module, which have no dtype yet."
                " Run a forward of the model before you create the optimizer."
            )
            raise DTypeError(message)
        if parameter.dtype in STATE_DTYPES:  # a frozen one may be of any
            parameter.grad_dtype = dtype
