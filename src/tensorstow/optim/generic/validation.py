"""Checks the arguments of ``StowedOptimizer``."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from tensorstow.base.errors import DTypeError, OptionError
from tensorstow.base.fields import read_value
from tensorstow.base.keywords import keyword_only, keywords_of, refuse_unknown_keywords
from tensorstow.formats.state_format import StateFormat
from tensorstow.io.device_link import is_remote
from tensorstow.optim.generic.leaves import leaf_of
from tensorstow.optim.generic.masters import MASTER, has_master
from tensorstow.optim.generic.pieces import PartitionedParam
from tensorstow.states.policy import PipelinePolicy

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_REFUSED = {
    "foreach": "parameters are stepped one after the other, as their states arrive",
    "fused": "its results differ from those of the loop over tensors, which is the reference",
    "capturable": "the step reads and writes files, outside any graph",
    "differentiable": "states that went to disk and back are not part of a graph",
}
_BESIDE = "a stowed class steps in step(), never during forward or backward"
_SCRATCH = "a stowed class keeps its states in scratch files and makes no commits"
_OF_ADAM = {
    "overlap": _BESIDE,
    "accumulation_steps": _BESIDE,
    "durability": _SCRATCH,
    "commit_every": _SCRATCH,
    "checkpoints": _SCRATCH,
    "extra": _SCRATCH,
    "grad_dtype": "a stowed class takes gradients of the parameter's dtype, as torch does",
}


def refuse_keywords(keywords: Mapping[str, Any]) -> None:
    """Raise OptionError for options of torch's classes that would have no effect."""
    for name, reason in _REFUSED.items():
        if keywords.get(name):
            message = f"{name}=True was requested: {reason}. Leave it out (or None)."
            raise OptionError(message)


def refuse_misspelt(stowed: type, optimizer_class: type, keywords: Mapping[str, Any]) -> None:
    """Raise KeywordError for keywords that neither the stowing class nor the stowed one has."""
    own_keywords = keywords_of(optimizer_class)
    if own_keywords is not None:
        accepted = [*own_keywords, *keyword_only(stowed)]
        refuse_unknown_keywords(optimizer_class.__name__, keywords, accepted)


def refuse_adams_keywords(optimizer_class: type, keywords: Mapping[str, Any]) -> None:
    """Raise OptionError for keywords of tensorstow's AdamW that a stowed class does not take.

    They are passed on to a class that has an option of that name.
    """
    taken = inspect.signature(optimizer_class).parameters
    if any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        return
    for name, reason in _OF_ADAM.items():
        if name in keywords and name not in taken:
            message = (
                f"{name}= was given for {optimizer_class.__name__}: {reason}. Leave it out, or use"
                " tensorstow.AdamW or Adam, which take it."
            )
            raise OptionError(message)


def refused(call: str) -> Callable[..., NoReturn]:
    """Return the method for ``call``, which needs durable states: it raises OptionError."""

    def method(*_: object, **__: object) -> NoReturn:
        """Refuse it.

        Raises:
            OptionError: Always: the states are in scratch files.
        """
        message = (
            f"{call} was requested, and StowedOptimizer keeps its states in scratch files, which"
            " end with the process. Save state_dict(), or use tensorstow.AdamW or Adam with"
            ' dir="...", which commit.'
        )
        raise OptionError(message)

    return method


def read_masters(state_format: str | None) -> bool:
    """Return whether 16-bit parameters have fp32 masters; raise OptionError for other formats."""
    if read_value(str | None, state_format, "state_format") not in {None, StateFormat.FP32.value}:
        message = (
            f"state_format={state_format!r} was given: a stowed class's states have the format that"
            " the class creates (leave it out), or are fp32 with fp32 masters of 16-bit parameters:"
            ' state_format="fp32". AdamW and Adam have other formats.'
        )
        raise OptionError(message)
    return state_format is not None


def check_policy(policy: PipelinePolicy | None) -> PipelinePolicy:
    """Return the policy; raise OptionError for options of kernels that no stowed class uses."""
    policy = read_value(PipelinePolicy | None, policy, "policy")
    if policy is not None and policy.isa is not None:
        message = (
            f"PipelinePolicy(isa={policy.isa!r}) was given: torch's own step runs here, and torch"
            " chooses its kernels (ATEN_CPU_CAPABILITY). Leave isa out."
        )
        raise OptionError(message)
    if policy is not None and policy.threads is not None:
        message = (
            f"PipelinePolicy(threads={policy.threads}) was given: torch's own step runs here, on as"
            " many threads as torch.set_num_threads() says. Leave threads out."
        )
        raise OptionError(message)
    return policy or PipelinePolicy()


def check_parameter(parameter: torch.Tensor, name: str) -> None:
    """Raise DTypeError for a parameter, or this rank's part of one, that cannot be stepped here."""
    parameter = leaf_of(parameter)
    if not (parameter.is_cpu or is_remote(parameter)):
        message = (
            f"{name} is on {parameter.device}: parameters must be on the CPU or on torch's current"
            " accelerator."
            + (" Give it memory first: model.to_empty(device='cpu')." if parameter.is_meta else "")
            + " Move it there, or leave it to torch.optim."
        )
        raise DTypeError(message)
    if parameter.layout != torch.strided:
        message = f"{name} has layout {parameter.layout}: only dense parameters are taken."
        raise DTypeError(message)
    if type(parameter) not in _PLAIN:
        message = (
            f"{name} is a {type(parameter).__name__}: of tensor subclasses DTensors alone are"
            " taken."
        )
        raise DTypeError(message)


def check_gradient(
    parameter: torch.Tensor, param: PartitionedParam | None, name: str, *, masters: bool = False
) -> None:
    """Raise for a leaf's gradient, or a leaf, that does not match the states.

    ``masters``: 16-bit parameters may have fp32 gradients.
    """
    check_parameter(parameter, name)
    gradient = parameter.grad
    if gradient is None:
        return
    if gradient.layout != torch.strided:
        message = f"The gradient of {name} is sparse: use the optimizer itself, un-stowed, for it."
        raise DTypeError(message)
    is_wide = masters and has_master(parameter) and gradient.dtype == torch.float32
    if gradient.dtype != parameter.dtype and not is_wide:
        message = (
            f"The gradient of {name} is {gradient.dtype} (micro-batches are summed in fp32), and"
            f" the parameter is {parameter.dtype}: a class of torch's steps by gradients of the"
            ' parameter\'s dtype. Use state_format="fp32", which keeps fp32 masters of 16-bit'
            " parameters, or train fp32 parameters."
        )
        raise DTypeError(message)
    if gradient.device != parameter.device:
        message = (
            f"The gradient of {name} is on {gradient.device}, and the parameter on"
            f" {parameter.device}: it was moved since. Compute the gradient again."
        )
        raise DTypeError(message)
    if gradient.shape != parameter.shape:
        message = (
            f"The gradient of {name} has shape {tuple(gradient.shape)} and the parameter"
            f" {tuple(parameter.shape)}: its data was replaced since. Compute the gradient again."
        )
        raise DTypeError(message)
    if param is None:
        return
    if parameter.numel() != param.numel or parameter.dtype != param.dtype:
        message = (
            f"{name} had {param.numel} elements of {param.dtype} when it was taken up, and has"
            f" {parameter.numel()} of {parameter.dtype} now. Cast or exchange the model's weights"
            " first, then make the optimizer."
        )
        raise OptionError(message)
    if param.how == "chunks" and not (gradient.is_contiguous() and parameter.is_contiguous()):
        message = (
            f"{name} is stepped in chunks, and it or its gradient (strides {gradient.stride()}) is"
            " not contiguous: a chunk would not be torch's own result. Assign"
            " param.grad.contiguous()."
        )
        raise DTypeError(message)


def check_saved(
    entry: Mapping[str, Any],
    expected: Mapping[str, Any],
    parameter: torch.Tensor,
    name: str,
    *,
    chunked: bool,
) -> None:
    """Raise OptionError unless saved states have the shapes that the class keeps."""
    for key, value in entry.items():
        if not isinstance(value, torch.Tensor):
            continue
        wanted = expected.get(key)
        if isinstance(wanted, torch.Tensor) and wanted.dim():
            fits = value.shape == wanted.shape
        else:
            fits = not chunked or not value.dim() or value.numel() == parameter.numel()
        if not fits:
            message = (
                f"The saved {key!r} of {name} is {tuple(value.shape)}, and the parameter is"
                f" {tuple(parameter.shape)}: they are of different models."
            )
            raise OptionError(message)
    names = {k for k, v in expected.items() if isinstance(v, torch.Tensor)} - {MASTER}
    missing = sorted(names - entry.keys())  # a master begins from its weight
    if entry and missing:
        message = (
            f"The saved state of {name} has no {missing[0]!r} (it has {sorted(entry)}): it is"
            " another optimizer's. Load a state_dict of the same class and options."
        )
        raise OptionError(message)


def cast_as_kept(entry: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``entry`` on the CPU, each state in the dtype and order in which the class keeps it.

    States that were not predicted stay as they were saved.
    """
    cast = {}
    for key, value in entry.items():
        wanted = expected.get(key)
        if isinstance(value, torch.Tensor):
            dtype = wanted.dtype if isinstance(wanted, torch.Tensor) else value.dtype
            cast[key] = value.detach().to("cpu", dtype)
            if isinstance(wanted, torch.Tensor) and cast[key].stride() != wanted.stride():
                ordered = torch.empty_strided(wanted.shape, wanted.stride(), dtype=dtype)
                cast[key] = ordered.copy_(cast[key])
        else:
            cast[key] = value
    return cast
