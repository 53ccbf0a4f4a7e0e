"""What users write in an optimizer's constructor, read and checked before anything is allocated."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from tensorstow.base.errors import DTypeError, OptionError
from tensorstow.base.sizes import parse_size
from tensorstow.optim.layout import STATE_DTYPES, Family, refuse_dtype
from tensorstow.optim.states import Placement

States = Literal["ram", "disk"] | float
Directory = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None


def placement(states: States, directory: Directory, ram_budget: str | int | None) -> Placement:
    """Read ``states=``, ``dir=`` and ``ram_budget=``; raise OptionError for what makes no sense."""
    fraction = _fraction(states)
    if fraction == 0.0 and (directory is not None or ram_budget is not None):
        name = "dir" if directory is not None else "ram_budget"
        message = (
            f"{name}= was given with states={states!r}, which puts nothing on disk. Leave {name}"
            ' out, or ask for states="disk" or a fraction.'
        )
        raise OptionError(message)
    budget = None if ram_budget is None else parse_size(ram_budget, "ram_budget")
    return Placement(fraction, directories(directory), budget)


def directories(directory: Directory) -> tuple[Path, ...]:
    """Return one path or several as a tuple; empty for None."""
    if directory is None:
        return ()
    given = [directory] if isinstance(directory, str | os.PathLike) else list(directory)
    if not given:
        message = "dir= is an empty list: name at least one directory, or leave dir out."
        raise OptionError(message)
    return tuple(Path(d) for d in given)


def check_hyper(options: Mapping[str, Any]) -> None:
    """Raise OptionError for a learning rate, beta, epsilon or weight decay out of its range."""
    lr = options["lr"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        message = f"lr is a tensor of {lr.numel()} elements: it must have one."
        raise OptionError(message)
    for name, value in (
        ("lr", lr),
        ("eps", options["eps"]),
        ("weight_decay", options["weight_decay"]),
    ):
        if not float(value) >= 0.0:
            message = f"{name}={value} was given: it must not be negative."
            raise OptionError(message)
    for index, beta in enumerate(options["betas"]):
        if not 0.0 <= float(beta) < 1.0:
            message = f"betas[{index}]={beta} was given: it must be at least 0 and below 1."
            raise OptionError(message)


def refuse_torch_keywords(options: Mapping[str, Any]) -> None:
    """Raise OptionError for the keywords of torch's class that mean something we cannot do."""
    why = {
        "foreach": "the update is one fused pass over each chunk, never a pass per operation",
        "capturable": "the update runs on the host, outside any graph",
        "differentiable": "the update runs in native code that autograd does not see",
    }
    for name, reason in why.items():
        if options.get(name):
            message = f"{name}=True was asked for: {reason}. Leave it out, or use torch.optim."
            raise OptionError(message)
    if options.get("fused") is False:
        message = (
            "fused=False was asked for: there is no unfused update here. Leave it out (or True),"
            " or use torch.optim."
        )
        raise OptionError(message)


def check_parameter(parameter: torch.Tensor, name: str) -> None:
    """Raise DTypeError unless the kernels can update ``parameter`` in place."""
    if parameter.dtype not in STATE_DTYPES:
        refuse_dtype(parameter.dtype, name)
    if parameter.device.type != "cpu":
        message = (
            f"{name} is on {parameter.device}: states in RAM or on disk are updated on the CPU."
            + (" Give it memory first: model.to_empty(device='cpu')." if parameter.is_meta else "")
            + " Move it to the CPU, or use tensorstow.colossalai.HybridAdam, which leaves"
            " accelerator parameters to torch's fused Adam."
        )
        raise DTypeError(message)
    if parameter.layout != torch.strided or not parameter.is_contiguous():
        message = (
            f"{name} (shape {tuple(parameter.shape)}, strides {parameter.stride()}) is not"
            " contiguous: the update runs over one run of bytes. Give it a contiguous copy:"
            " param.data = param.data.contiguous()."
        )
        raise DTypeError(message)
    if type(parameter) not in {torch.Tensor, torch.nn.Parameter}:
        message = (
            f"{name} is a {type(parameter).__name__}: tensor subclasses (DTensor among them) are"
            " not taken yet."
        )
        raise DTypeError(message)


def check_gradient(parameter: torch.Tensor, gradient: torch.Tensor, name: str) -> None:
    """Raise DTypeError unless the kernels can read ``gradient``."""
    if gradient.layout != torch.strided:
        message = f"The gradient of {name} is sparse: use torch.optim.SparseAdam for it."
        raise DTypeError(message)
    if gradient.dtype not in STATE_DTYPES:
        message = (
            f"The gradient of {name} has dtype {gradient.dtype}: float32, bfloat16 and float16"
            " are taken."
        )
        raise DTypeError(message)
    if gradient.device != parameter.device:
        message = (
            f"The gradient of {name} is on {gradient.device} and the parameter on"
            f" {parameter.device}: both must be on one device."
        )
        raise DTypeError(message)


def refuse_family(
    parameter: torch.Tensor, group: Mapping[str, Any], family: Family, name: str
) -> NoReturn:
    """Raise OptionError for a parameter that is not of the ``family`` that its states are of."""
    if parameter.dtype != family.dtype:
        message = (
            f"{name} was {family.dtype} when the optimizer was made and is {parameter.dtype} now."
            " Cast the model first, then make the optimizer."
        )
        raise OptionError(message)
    message = (
        f"amsgrad of {name} was {family.amsgrad} when the optimizer was made and is"
        f" {group['amsgrad']} now: it decides which states exist. Make a new optimizer."
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
        parameter.grad_dtype = dtype


def _fraction(states: object) -> float:
    if isinstance(states, str):
        if states not in {"ram", "disk"}:
            message = f'states={states!r} was given: use "ram", "disk", or the fraction on disk.'
            raise OptionError(message)
        return 0.0 if states == "ram" else 1.0
    if isinstance(states, bool) or not isinstance(states, int | float) or not 0.0 <= states <= 1.0:
        message = (
            f'states={states!r} was given: use "ram", "disk", or the fraction on disk, a number'
            " between 0 and 1."
        )
        raise OptionError(message)
    return float(states)
