"""Checks everything that ``stow`` refuses, before anything is placed.

Arguments of a wrong kind, devices and meshes that do not fit the plan, parameters that FSDP2 cannot
shard, optimizers that contradict the plan, and ranks that were called with different arguments,
which would wait for each other for ever.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from tensorstow.base.activation_placement import ActivationPlacement
from tensorstow.base.budget import Budget
from tensorstow.base.errors import OptionError, abbreviated
from tensorstow.base.fields import read_value
from tensorstow.base.keywords import (
    keyword_only,
    keywords_of,
    refuse_unknown_keywords,
    with_new_names,
)
from tensorstow.base.plan import Plan
from tensorstow.base.sizes import parse_size
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import (
    OverlapOption,
    is_auto,
    keyword_of,
    reaches_device,
    refuse_delayed,
)
from tensorstow.fsdp.sharding import from_every_rank
from tensorstow.fsdp.units import Unit, is_read_only
from tensorstow.io import device_link
from tensorstow.optim.generic.stowed_optimizer import StowedOptimizer
from tensorstow.optim.placed import PlacedOptimizer
from tensorstow.tensors.shares import share_of

OptimizerFactory = Callable[..., PlacedOptimizer]
"""Called with named parameters and the keywords that place the states."""


@runtime_checkable
class TranslatesPlacement(Protocol):
    """An optimizer factory with keywords of its own for the placement of states."""

    def translate_placement(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``keywords``, with those of a plan that they stand for."""


@runtime_checkable
class KeepsOnDevice(Protocol):
    """An optimizer factory that has torch update some parameters on the device."""

    def stays_on_device(self, name: str) -> bool:
        """Return whether the parameter ``name`` is updated on the device, if it is there.

        Its gradients and states then stay on the device too.
        """


_COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
DEFAULTS: dict[str, Any] = {
    "states": "host",
    "overlap": "auto",
    "update_on": None,
    "accumulation_steps": 1,
    "ram_budget": None,
    "dir": None,
}
"""The keywords that a plan decides, with their values if it leaves them unset."""
_FREE = frozenset({"ram_budget", "dir", "update_on"})
"""Keywords that the user may pass to the optimizer if the plan leaves them unset."""
_TYPES: Mapping[str, Any] = {"overlap": OverlapOption}
"""Types of keywords that are checked before they are compared with the plan's."""
_LEAVE_OUT = "Leave it out: the plan has an overlap= of its own, which is exact."


# --- arguments ---


_ARGUMENTS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "plan": (
        # A str first: comparing an array gives no bool.
        lambda plan: isinstance(plan, Plan) or (isinstance(plan, str) and plan == "auto"),
        'a tensorstow.Plan, or "auto"',
    ),
    "compute_dtype": (
        lambda dtype: any(dtype is usable for usable in (None, *_COMPUTE_DTYPES)),
        f"one of {', '.join(map(str, _COMPUTE_DTYPES))}, or None for the parameters' own",
    ),
    "mesh": (
        lambda mesh: isinstance(mesh, DeviceMesh | None),
        "a DeviceMesh, by init_device_mesh(...)",
    ),
    "budget": (
        lambda budget: isinstance(budget, Budget | None),
        'a tensorstow.Budget, as Budget(device="20GiB", host="48GiB", disk="500GiB")',
    ),
    "tokens": (
        lambda n: n is None or (isinstance(n, int) and not isinstance(n, bool) and n > 0),
        "a number of tokens of a micro-batch, at least 1",
    ),
    "init": (
        lambda init: init is None or callable(init),
        "a function that is called with a module, as model._init_weights of transformers is",
    ),
}
"""For each argument of ``stow``, whether a value can be used, and what values it takes."""


def validate_arguments(model: object, optimizer: object, **arguments: object) -> None:
    """Check the types of the arguments of ``stow``, and that the model is new."""
    if not isinstance(model, nn.Module):
        message = f"stow() was given a {type(model).__name__} for a model: give it a torch module."
        raise OptionError(message)
    if optimizer is not None and not callable(optimizer):
        message = (
            f"stow() was given a {type(optimizer).__name__} for an optimizer: give it a"
            " class or a function, as in stow(model, tensorstow.AdamW, lr=1e-5), because stow()"
            " replaces the parameters; or None for a model that is only read."
        )
        raise OptionError(message)
    for name, value in arguments.items():
        is_usable, kind = _ARGUMENTS[name]
        if not is_usable(value):
            message = f"{name}={abbreviated(value)} was given: it is {kind}."
            raise OptionError(message)
    if torch.is_inference_mode_enabled():
        message = (
            "stow() was called under inference_mode: what is made there is never trained, and has"
            " no versions. Call it before, and compute with the model under inference_mode."
        )
        raise OptionError(message)
    _validate_new(model)


WITHOUT_OPTIMIZER = (
    "{name}={value} was given without an optimizer: a model that is only read has neither states"
    " nor commits, and each rank has its own. Leave it out."
)
WITH_PLAN = '{name}= only applies to plan="auto"; leave it out or omit plan=.'


def refuse_given(reason: str, **arguments: object) -> None:
    """Raise OptionError with a reason of the two above if an argument is not None."""
    for name, value in arguments.items():
        if value is not None:
            raise OptionError(reason.format(name=name, value=abbreviated(value)))


def _validate_new(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            message = (
                f"{name or type(model).__name__} was sharded before (by stow() or fully_shard):"
                " give stow() the model as its class makes it."
            )
            raise OptionError(message)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            message = (
                f"{name or 'The model'} is an {type(module).__name__} with sparse=True: its"
                " gradients are sparse tensors, which neither FSDP2 reduces nor these optimizers"
                " take. Make it with sparse=False."
            )
            raise OptionError(message)
    if is_read_only(model):
        message = (
            "The model was placed before, by stow(model, None): its weights may be in their files"
            " alone. Give stow() the model as its class makes it."
        )
        raise OptionError(message)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            message = (
                f"{name} is of a lazy module and has no shape yet: run a forward of the model"
                " before stow()."
            )
            raise OptionError(message)
        if isinstance(parameter, DTensor):
            message = f"{name} is a DTensor: give stow() a model whose parameters are whole."
            raise OptionError(message)
        if share_of(parameter) is not None:
            message = (
                f"{name} was placed before, by stow(): give it the model as its class makes it."
            )
            raise OptionError(message)


# --- the plan, the device and the mesh ---


def validate_units(plan: Plan, names: Sequence[str]) -> None:
    """Check that every unit that the plan places is among those of the model."""
    unknown = sorted({*plan.parameter_units, *plan.unsharded} - set(names))
    if unknown:
        message = f"The plan names units that the model does not have ({unknown}): it has {names}."
        raise OptionError(message)


def validate_device(plan: Plan, device: torch.device) -> None:
    """Check that this rank has an accelerator if the plan needs one."""
    if device_link.is_remote(torch.empty(0, device=device)):
        return
    if reaches_device(plan.update_on):
        message = (
            f"{keyword_of(plan.update_on)} was given, and this rank computes on {device}: there is"
            ' no accelerator to update on. Leave update_on out, or say "host".'
        )
        raise OptionError(message)
    if plan.device_budget is not None:
        message = (
            f"device_budget={plan.device_budget} was given, and this rank computes on {device}:"
            " there is no accelerator for copies of units to stay on. Leave it out."
        )
        raise OptionError(message)
    if ActivationPlacement.HOST in plan.activation_placements:
        message = (
            f'activations="host" was given, and this rank computes on {device}: they are in host'
            ' memory as they are. Say "keep", "recompute" or "disk".'
        )
        raise OptionError(message)


def validate_mesh(mesh: DeviceMesh, plan: Plan, device: torch.device) -> None:
    """Check that FSDP2 can shard over ``mesh``, and that the plan agrees with it."""
    names, shape = mesh.mesh_dim_names, tuple(mesh.shape)
    if mesh.ndim not in {1, 2} or (mesh.ndim == 2 and names is None):
        message = (
            f"A mesh of shape {shape} with the names {names} was given: it is one row of ranks, or"
            ' two dimensions with names, ("replicate", "shard").'
        )
        raise OptionError(message)
    if mesh.device_type != device.type:
        message = f"A mesh of {mesh.device_type!r} was given, and this rank computes on {device}."
        raise OptionError(message)
    copies = shape[0] if mesh.ndim == 2 else 1
    if plan.ordered_reduce is not None and copies > 1:
        message = (
            f"ordered_reduce={plan.ordered_reduce!r} was given with a mesh of {copies} replicas"
            f" (its shape is {shape}): give one of shape ({mesh.size()},)."
        )
        raise OptionError(message)
    if plan.stage == 0 and shape[-1] != 1:
        message = (
            f"stage=0 was given, which shares nothing, with a mesh that cuts parameters in"
            f" {shape[-1]}: leave mesh out, or give one of shape ({mesh.size()}, 1)."
        )
        raise OptionError(message)
    if plan.stage > 0 and plan.replicas not in {1, copies}:
        message = (
            f"replicas={plan.replicas} was given with a mesh of {copies} (its shape is {shape}):"
            " say it in one place."
        )
        raise OptionError(message)


# --- parameters ---


def validate_parameters(units: Iterable[Unit], *, scalars: bool = False) -> None:
    """Check that FSDP2 can shard every parameter, also at the first step."""
    for unit in units:
        for name, parameter in unit.parameters.items():
            if parameter.ndim == 0 and not (scalars and not parameter.is_meta):
                message = (
                    f"{name} is a scalar, which FSDP2 cannot shard, and which stays plain on the"
                    ' CPU alone, with values, without compute_dtype= and overlap="backward": make'
                    " it one of shape (1,)."
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
                    " whole, on one rank with its parameters where they are computed with. For a"
                    " base of bitsandbytes, make the plain model on the meta device instead, and"
                    " pass weights= with the folder."
                )
                raise OptionError(message)
            if not parameter.is_contiguous():
                message = (
                    f"{name} (shape {tuple(parameter.shape)}, strides {parameter.stride()}) is not"
                    " contiguous, which FSDP2 does not shard: model.to(memory_format="
                    "torch.contiguous_format), or param.data = param.data.contiguous()."
                )
                raise OptionError(message)
            validate_no_hooks(parameter, name)
        _validate_one_dtype(unit)


def validate_no_hooks(parameter: torch.Tensor, name: str) -> None:
    """Check that a parameter has no hook of the user's, which FSDP2 would never call."""
    if parameter._backward_hooks:  # noqa: SLF001  # what register_hook fills
        message = (
            f"{name} has a hook (register_hook), which sees gradients that are not reduced yet,"
            " or none: take it away, and change gradients between backward and step()."
        )
        raise OptionError(message)


def _validate_one_dtype(unit: Unit) -> None:
    """FSDP2 reduces the gradients of a unit as one run of bytes."""
    trained = {n: p for n, p in unit.parameters.items() if p.requires_grad}
    examples: dict[torch.dtype, str] = {}
    for name, parameter in trained.items():
        examples.setdefault(parameter.dtype, name)
    if len(examples) > 1:
        dtypes = ", ".join(f"{name} is {dtype}" for dtype, name in examples.items())
        message = (
            f"What is trained in unit {unit.name!r} has several dtypes ({dtypes}), and FSDP2"
            " reduces a unit's gradients in one. Cast it to one dtype (with compute_dtype= fp32"
            " parameters compute in 16 bits), or name modules of one dtype each by units=."
        )
        raise OptionError(message)


# --- the optimizer ---


def with_options(
    optimizer: OptimizerFactory | None, options: Mapping[str, Any], of_stow: Sequence[str]
) -> OptimizerFactory | None:
    """Return a factory that passes on the options which are not keywords of ``stow``.

    Raises KeywordError for one that the factory does not have either.
    """
    if not options:
        return optimizer
    options = with_new_names("stow", options, stacklevel=4)
    accepted = None if optimizer is None else _options_of(optimizer)
    if optimizer is None or accepted is not None:
        refuse_unknown_keywords("stow", options, dict.fromkeys([*of_stow, *(accepted or ())]))
    return None if optimizer is None else partial(optimizer, **options)


def _options_of(optimizer: OptimizerFactory) -> list[str] | None:
    """Return the keywords that an optimizer's factory takes; None: it takes any."""
    if isinstance(optimizer, partial) and is_of_class(optimizer) and optimizer.args:
        of_class = _options_of(optimizer.args[0])
        return None if of_class is None else [*keyword_only(optimizer.func), *of_class]
    names = keywords_of(optimizer.func if isinstance(optimizer, partial) else optimizer)
    return None if names is None else [name for name in names if name != "params"]


def given_keywords(optimizer: OptimizerFactory) -> dict[str, Any]:
    """Return the keywords that the user has given with ``functools.partial``."""
    if not isinstance(optimizer, partial):
        return {}
    factory: object = optimizer.func
    if isinstance(factory, TranslatesPlacement):
        return factory.translate_placement(optimizer.keywords)
    return dict(optimizer.keywords)


def stays_on_device(optimizer: OptimizerFactory) -> Callable[[str], bool]:
    """Return a test of names: whether torch updates that parameter on the device."""
    factory: object = optimizer.func if isinstance(optimizer, partial) else optimizer
    return factory.stays_on_device if isinstance(factory, KeepsOnDevice) else lambda _: False


def accepts(optimizer: OptimizerFactory, name: str, *, by_name: bool = False) -> bool:
    """Return whether the optimizer's function takes a keyword, ``by_name`` or by ``**``."""
    try:
        taken = inspect.signature(optimizer).parameters
    except ValueError:  # ``validate_factory`` raises the error
        return False
    takes_any = any(p.kind == inspect.Parameter.VAR_KEYWORD for p in taken.values())
    return name in taken or (takes_any and not by_name)


def is_of_class(optimizer: OptimizerFactory) -> bool:
    """Return whether the factory makes a StowedOptimizer, which takes no model."""
    factory = optimizer.func if isinstance(optimizer, partial) else optimizer
    return isinstance(factory, type) and issubclass(factory, StowedOptimizer)


def validate_factory(
    optimizer: OptimizerFactory, placed: Mapping[str, Any], plan: Plan, device: torch.device
) -> None:
    """Check that the optimizer's function takes the plan's keywords and contradicts none."""
    if is_of_class(optimizer):
        _validate_has_class(optimizer)
        validate_class(plan, device)
    for name, value in given_keywords(optimizer).items():
        if name in _FREE and name not in placed:
            continue
        refuse_delayed(value, "to the optimizer of stow()", _LEAVE_OUT)
        if name in _TYPES:
            read_value(_TYPES[name], value, name)
        if is_auto(value, name):
            continue  # what the plan means by it
        # Users may call a tier by another of its names, such as "cpu" or "nvme".
        said = (Tier.named(value) or value) if name == "states" else value
        if name in DEFAULTS and placed.get(name, DEFAULTS[name]) != said:
            written, meaning = _as_written(optimizer, name, value)
            message = (
                f"{written} was given to the optimizer{meaning}, and the plan says"
                f" {placed.get(name, DEFAULTS[name])!r}. Say it in one place: leave it out"
                f"{_or_in_plan(plan, device, name, said)}."
            )
            raise OptionError(message)
    try:
        inspect.signature(optimizer)
    except ValueError as error:  # a partial with a keyword that its function does not take
        if isinstance(optimizer, partial) and (names := keywords_of(optimizer.func)) is not None:
            refuse_unknown_keywords(optimizer.func.__name__, optimizer.keywords, names)
        message = f"The optimizer refuses its arguments: {error.__cause__ or error}."
        raise OptionError(message) from error
    _validate_accepted(optimizer, placed, plan, device)


def _validate_has_class(optimizer: OptimizerFactory) -> None:
    """Check that a StowedOptimizer was given with its class of torch."""
    taken = inspect.signature(optimizer).parameters.values()
    needed = [p for p in taken if p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD]
    if len(needed) > 1:
        message = (
            "StowedOptimizer was given without a class of torch. Use"
            " stow(model, partial(tensorstow.StowedOptimizer, torch.optim.SGD), ...)."
        )
        raise OptionError(message)


def _validate_accepted(
    optimizer: OptimizerFactory, placed: Mapping[str, Any], plan: Plan, device: torch.device
) -> None:
    """Check that the optimizer's function takes the plan's keywords."""
    missing = sorted(name for name in placed if not accepts(optimizer, name))
    factory = optimizer.func if isinstance(optimizer, partial) else optimizer
    if missing and isinstance(factory, type) and issubclass(factory, torch.optim.Optimizer):
        of_torch = f"torch.optim.{factory.__name__}"
        stowed = f"partial(tensorstow.StowedOptimizer, {of_torch})"
        options = optimizer.keywords if isinstance(optimizer, partial) else {}
        obstacle = _class_obstacle(plan, device)
        if factory in {torch.optim.Adam, torch.optim.AdamW}:
            stowed = f"tensorstow.{factory.__name__}"
        elif obstacle is not None:
            stowed, options = "tensorstow.AdamW", {}
        cause = f", with {obstacle} ({_OF_TORCH})" if obstacle else ""
        call = ", ".join(["model", stowed, *(f"{k}={v!r}" for k, v in options.items())])
        message = (
            f"{factory.__name__} of torch was given{cause}, which keeps states in memory. Use"
            f" stow({call})."
        )
        raise OptionError(message)
    if missing:
        message = (
            f"The optimizer's function does not accept {', '.join(missing)}, which say where states"
            " are kept. Let it accept **placement and pass that on:"
            " def make(named, **placement): return tensorstow.AdamW(groups, **placement)."
        )
        raise OptionError(message)


def _or_in_plan(plan: Plan, device: torch.device, name: str, value: object) -> str:
    """Return the advice to say an option in the plan, if the plan can be used then."""
    if name == "dir":
        return ", or leave dir= of stow out"
    try:
        # A plan with this value may be invalid, or may need an accelerator.
        validate_device(plan.but(**{name: value}), device)
    except OptionError:
        return ", for the plan cannot say it"
    return f", or say {name}={json.dumps(value)} in the plan instead"


def _as_written(optimizer: OptimizerFactory, name: str, value: object) -> tuple[str, str]:
    """Return the keyword that a user wrote with its value, and its meaning if that differs."""
    said = f"{name}={value!r}"
    if not isinstance(optimizer, partial) or name in optimizer.keywords:
        return said, ""
    # One of the factory's own keywords may stand for ``name``.
    for keyword, setting in optimizer.keywords.items():
        if name in given_keywords(partial(optimizer.func, **{keyword: setting})):
            return f"{keyword}={setting!r}", f", which means {said}"
    return said, ""


def validate_optimizer(optimizer: object, placed: Mapping[str, Any]) -> PlacedOptimizer:
    """Return the optimizer that the user's function made, if it is one of ours and placed so.

    One that lacks a keyword that it was given is closed.
    """
    if not isinstance(optimizer, PlacedOptimizer):
        message = (
            f"The optimizer's function returned a {type(optimizer).__name__}: it is to return a"
            " tensorstow.AdamW, tensorstow.Adam or tensorstow.StowedOptimizer."
        )
        raise OptionError(message)
    try:
        refuse_delayed(optimizer.offload_policy.overlap, "to the optimizer of stow()", _LEAVE_OUT)
    except OptionError:
        optimizer.close()
        raise
    placement = optimizer.offload_policy.placement
    actual = {
        "states": optimizer.placement_of_states,
        "overlap": optimizer.offload_policy.overlap,
        "update_on": optimizer.offload_policy.update_on,
        "dir": bool(placement.directories),
        "ram_budget": placement.ram_budget,
    }
    for name, value in actual.items():
        if name in _FREE and name not in placed:
            continue
        wanted = placed.get(name, DEFAULTS[name])
        if is_auto(wanted, name):
            wanted = value if optimizer.offload_policy.is_overlap_chosen else "none"
        if (name, wanted, value) == ("states", "disk", "shared"):
            continue  # a class that takes its share apart from the plan
        if name == "ram_budget" and wanted is not None:
            wanted = parse_size(wanted, name)
        if value != (wanted is not None if name == "dir" else wanted):
            optimizer.close()
            message = (
                "The optimizer's function did not pass on the keywords it was given: the plan has"
                f" {name}={wanted!r} and the optimizer has not. Pass **placement on to it."
            )
            raise OptionError(message)
    return optimizer


_OF_TORCH = "classes of torch's step in step(), parameters in the memory that computes"


def validate_class(
    plan: Plan, device: torch.device, optimizer: StowedOptimizer | None = None
) -> None:
    """Check that a class of torch's can update by a plan; an optimizer that cannot is closed."""
    obstacle = _class_obstacle(plan, device)
    if obstacle is not None:
        if optimizer is not None:
            optimizer.close()
        message = (
            f"A StowedOptimizer was to update a model with {obstacle}: {_OF_TORCH}. Use"
            " tensorstow.AdamW or Adam, or a plan without that."
        )
        raise OptionError(message)


def _class_obstacle(plan: Plan, device: torch.device) -> str | None:
    """Return why a class of torch's cannot update by a plan, or None."""
    tiers = plan.parameter_tiers
    obstacles = {
        f"parameters in host memory beside an accelerator ({device})": (
            device.type != "cpu" and Tier.HOST in tiers
        ),
        "parameters on disk": Tier.DISK in tiers,
        plan.timing.keyword: plan.timing.is_overlapped,
        f"update_on={plan.update_on!r}": plan.update_on is not None,
    }
    return " and ".join(name for name, is_present in obstacles.items() if is_present) or None


# --- ranks ---


def validate_same_on_ranks(arguments: Mapping[str, str]) -> None:
    """Check that every rank called ``stow`` alike: fail fast instead of deadlocking. Collective.

    ``arguments``: values that must be the same, by their names in the error.
    """
    by_rank = from_every_rank(arguments)
    for rank, other in enumerate(by_rank):
        for name, value in by_rank[0].items():
            if other.get(name) != value:
                message = (
                    f"Rank {rank} called stow() with another {name} than rank 0:"
                    f" {other.get(name)} and {value}. Every rank is to call it alike."
                )
                raise OptionError(message)


def describe_units(units: Iterable[Unit]) -> dict[str, str]:
    """Return what must be the same on every rank: a line for each unit."""
    lines = {}
    for unit in units:
        parameters = [f"{n} {_describe(p)}" for n, p in unit.parameters.items()]
        digest = hashlib.sha256("\n".join(parameters).encode()).hexdigest()[:8]
        few = f"{len(parameters)} parameters, of names, kinds and places with the sum {digest}"
        lines[f"unit {unit.name!r}"] = few if len(parameters) > 4 else ", ".join(parameters)
    return {"units": ", ".join(lines), **lines}


def _describe(parameter: torch.Tensor) -> str:
    """Return what ranks may differ in; a rank with values cannot help one on the meta device."""
    trained = "trained" if parameter.requires_grad else "frozen"
    place = "meta" if parameter.is_meta else "memory"
    return f"{tuple(parameter.shape)} {parameter.dtype} {trained} in {place}"
