"""Checks everything that ``stow`` refuses, before anything is placed.

Arguments of a wrong kind, devices and meshes that do not fit the plan, parameters that FSDP2 cannot
shard, optimizers that contradict the plan, and ranks that were called with different arguments,
which would wait for each other for ever.
"""

import hashlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from tensorstow.base.budget import Budget
from tensorstow.base.errors import OptionError
from tensorstow.base.plan import Plan
from tensorstow.base.sizes import parse_size
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import keyword_of, reaches_device
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
        """Return whether the parameter ``name`` is updated there, if it is on the device.

        Its gradients and states stay there too.
        """


_COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_DEFAULTS: dict[str, Any] = {
    "states": "host",
    "overlap": "none",
    "update_on": None,
    "accumulation_steps": 1,
    "ram_budget": None,
    "dir": None,
}
"""The keywords that a plan decides, with what holds where it leaves them unset."""
_FREE = frozenset({"ram_budget", "dir", "update_on"})
"""Keywords that the user may pass to the optimizer if the plan leaves them unset."""


# --- arguments ---


def validate_arguments(
    model: object, optimizer: object, plan: object, compute_dtype: object, mesh: object
) -> None:
    """Check the types of the arguments of ``stow``, and that the model is new.

    Raises:
        OptionError: An argument has another type than ``stow`` documents.
    """
    if not isinstance(model, nn.Module):
        message = f"stow() was given a {type(model).__name__} for a model: give it a torch module."
        raise OptionError(message)
    if optimizer is not None and not callable(optimizer):
        message = (
            f"stow() was given a {type(optimizer).__name__} for an optimizer: give it what makes"
            " one of the model's named parameters, partial(tensorstow.AdamW, lr=1e-5), for the"
            " parameters are others once they are stowed; or None for a model that is only read."
        )
        raise OptionError(message)
    if plan != "auto" and not isinstance(plan, Plan):
        message = f'plan={plan!r} was given: it is a tensorstow.Plan, or "auto".'
        raise OptionError(message)
    if compute_dtype is not None and compute_dtype not in _COMPUTE_DTYPES:
        message = (
            f"compute_dtype={compute_dtype!r} was given: it is one of"
            f" {', '.join(map(str, _COMPUTE_DTYPES))}, or None for the parameters' own."
        )
        raise OptionError(message)
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        message = f"mesh={mesh!r} was given: it is a DeviceMesh, by init_device_mesh(...)."
        raise OptionError(message)
    if torch.is_inference_mode_enabled():
        message = (
            "stow() was called under inference_mode: what is made there is never trained, and has"
            " no versions. Call it before, and compute with the model under inference_mode."
        )
        raise OptionError(message)
    _validate_new(model)


def validate_unused(**given: object) -> None:
    """Check that arguments of training were not given for a model that is only read.

    Args:
        given: The arguments, by name.

    Raises:
        OptionError: One was.
    """
    for name, value in given.items():
        if value is not None:
            message = (
                f"{name}={value!r} was given without an optimizer: a model that is only read has"
                " neither states nor commits, and each rank has its own. Leave it out."
            )
            raise OptionError(message)


def validate_budget(budget: object) -> None:
    """Check that ``budget`` is a Budget or None.

    Raises:
        OptionError: It is something else.
    """
    if budget is not None and not isinstance(budget, Budget):
        message = (
            f"budget={budget!r} was given: it is a tensorstow.Budget, as"
            ' Budget(device="20GiB", host="48GiB", disk="500GiB").'
        )
        raise OptionError(message)


def validate_tokens(tokens: object) -> None:
    """Check that ``tokens`` is a number of tokens or None.

    Raises:
        OptionError: It is something else.
    """
    if tokens is None or (isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0):
        return
    message = f"tokens={tokens!r} was given: it is a number of tokens of a micro-batch, at least 1."
    raise OptionError(message)


def validate_init(init: object) -> None:
    """Check that ``init`` can give a module its first values.

    Raises:
        OptionError: It is neither None nor callable.
    """
    if init is not None and not callable(init):
        message = (
            f"init={init!r} was given: it is a function that is called with a module, as"
            " model._init_weights of transformers is."
        )
        raise OptionError(message)


def validate_directory(directory: object) -> None:
    """Check that ``dir`` is one directory, or none.

    Raises:
        OptionError: It is several, or something else.
    """
    if directory is not None and not isinstance(directory, str | os.PathLike):
        message = (
            f"dir={directory!r} was given to stow: it is one directory, of weights and states. For"
            " states over several give them to the optimizer, partial(AdamW, dir=[...]), and leave"
            " dir= of stow out."
        )
        raise OptionError(message)


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


def validate_units(plan: Plan, units: Iterable[Unit]) -> None:
    """Check that the model has every unit that the plan places.

    Raises:
        OptionError: It has not.
    """
    names = [unit.name for unit in units]
    unknown = sorted({*plan.units, *plan.unsharded} - set(names))
    if unknown:
        message = f"The plan names units that the model does not have ({unknown}): it has {names}."
        raise OptionError(message)


def validate_device(plan: Plan, device: torch.device) -> None:
    """Check that an accelerator is there where the plan needs one.

    Args:
        plan: The plan; of it, ``update_on``, ``device_limit`` and the activations.
        device: What this rank computes on.

    Raises:
        OptionError: This rank has no accelerator, and something is to be on one.
    """
    if device_link.is_remote(torch.empty(0, device=device)):
        return
    if reaches_device(plan.update_on):
        message = (
            f"{keyword_of(plan.update_on)} was given, and this rank computes on {device}: there is"
            ' no accelerator to update on. Leave update_on out, or say "host".'
        )
        raise OptionError(message)
    if plan.device_limit is not None:
        message = (
            f"device_limit={plan.device_limit} was given, and this rank computes on {device}: there"
            " is no accelerator for copies of units to stay on. Leave it out."
        )
        raise OptionError(message)
    if "host" in plan.activation_placements:
        message = (
            f'activations="host" was given, and this rank computes on {device}: they are in host'
            ' memory as they are. Say "keep", "recompute" or "disk".'
        )
        raise OptionError(message)


def validate_mesh(mesh: DeviceMesh, plan: Plan, device: torch.device) -> None:
    """Check that FSDP2 can shard over ``mesh``, and that the plan agrees with it.

    Args:
        mesh: (shard,), or (replicate, shard) with names.
        plan: The plan; of it, ``stage`` and ``replicas``.
        device: What this rank computes on.

    Raises:
        OptionError: The mesh has another form or device, or contradicts the plan.
    """
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


def takes_scalars(plan: Plan, device: torch.device, compute_dtype: torch.dtype | None) -> bool:
    """Return whether scalars may stay plain beside what FSDP2 shards ([Note: Scalars]).

    Args:
        plan: The plan.
        device: What this rank computes on.
        compute_dtype: What FSDP2 casts to, and would not cast scalars to; None: nothing.
    """
    within_step = plan.overlap != "backward" and plan.micro_batches == 1
    return device.type == "cpu" and compute_dtype is None and within_step


def validate_parameters(units: Iterable[Unit], *, scalars: bool = False) -> None:
    """Check that FSDP2 can shard every parameter, also at the first step.

    Raises:
        OptionError: It cannot; the parameter is named.
    """
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
            validate_no_hooks(parameter, name)
        _validate_one_dtype(unit)


def validate_no_hooks_of(units: Iterable[Unit]) -> None:
    """Check that no parameter has a hook of the user's, which would see unreduced gradients.

    Raises:
        OptionError: One has; it is named.
    """
    for unit in units:
        for name, parameter in unit.parameters.items():
            validate_no_hooks(parameter, name)


def validate_no_hooks(parameter: torch.Tensor, name: str) -> None:
    """Check that a parameter has no hook of the user's, which FSDP2 would never call.

    Args:
        parameter: The parameter.
        name: What the error calls it.

    Raises:
        OptionError: ``register_hook`` was called on it.
    """
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
        found = ", ".join(f"{name} is {dtype}" for dtype, name in examples.items())
        message = (
            f"What is trained in unit {unit.name!r} has several dtypes ({found}), and FSDP2"
            " reduces a unit's gradients in one. Cast it to one dtype (with compute_dtype= fp32"
            " parameters compute in 16 bits), or name modules of one dtype each by units=."
        )
        raise OptionError(message)


# --- the optimizer ---


def given_keywords(optimizer: OptimizerFactory) -> dict[str, Any]:
    """Return the keywords that the user has given with ``functools.partial``."""
    if not isinstance(optimizer, partial):
        return {}
    factory: object = optimizer.func
    if isinstance(factory, TranslatesPlacement):
        return factory.translate_placement(optimizer.keywords)
    return dict(optimizer.keywords)


def stays_on_device(optimizer: OptimizerFactory) -> Callable[[str], bool]:
    """Return the test, by name, whether a parameter on the device is updated there by torch."""
    factory: object = optimizer.func if isinstance(optimizer, partial) else optimizer
    return factory.stays_on_device if isinstance(factory, KeepsOnDevice) else _never


def _never(name: str) -> bool:
    del name
    return False


def accepts(optimizer: OptimizerFactory, name: str) -> bool:
    """Return whether the optimizer's function takes a keyword.

    Args:
        optimizer: What makes the optimizer.
        name: The keyword.
    """
    try:
        taken = inspect.signature(optimizer).parameters
    except ValueError:  # ``validate_factory`` raises the error
        return False
    return name in taken or any(p.kind == inspect.Parameter.VAR_KEYWORD for p in taken.values())


def validate_factory(optimizer: OptimizerFactory, placed: Mapping[str, Any]) -> None:
    """Check that the optimizer's function takes the plan's keywords and contradicts none.

    Args:
        optimizer: The optimizer's class or factory.
        placed: The plan's keywords for the placement of states.

    Raises:
        OptionError: It does not take one of them, or was given another value by the user.
    """
    for name, value in given_keywords(optimizer).items():
        if name in _FREE and name not in placed:
            continue
        said = "host" if (name, value) == ("states", "ram") else value
        if name in _DEFAULTS and placed.get(name, _DEFAULTS[name]) != said:
            message = (
                f"{name}={value!r} was given to the optimizer, and the plan says"
                f" {placed.get(name, _DEFAULTS[name])!r}. Say it in one place: in the plan."
            )
            raise OptionError(message)
    try:
        taken = inspect.signature(optimizer).parameters
    except ValueError as error:  # a partial with a keyword that its function does not take
        message = f"The optimizer refuses its arguments: {error.__cause__ or error}."
        raise OptionError(message) from error
    if any(p.kind == inspect.Parameter.VAR_KEYWORD for p in taken.values()):
        return
    missing = sorted(name for name in placed if name not in taken)
    if missing:
        message = (
            f"The optimizer's function does not accept {', '.join(missing)}, which say where states"
            " are kept. Let it accept **placement and pass that on:"
            " def make(named, **placement): return tensorstow.AdamW(groups, **placement)."
        )
        raise OptionError(message)


def validate_optimizer(made: object, placed: Mapping[str, Any]) -> PlacedOptimizer:
    """Return the optimizer that the user's function made, if it is one of ours and placed so.

    Args:
        made: What the function returned.
        placed: The keywords that it was given. An optimizer that lacks one is closed.

    Raises:
        OptionError: The function made another one, or did not pass the keywords on.
    """
    if not isinstance(made, PlacedOptimizer):
        message = (
            f"The optimizer's function returned a {type(made).__name__}: it is to return a"
            " tensorstow.AdamW, tensorstow.Adam or tensorstow.StowedOptimizer."
        )
        raise OptionError(message)
    where = made.offload_policy.placement
    found = {
        "states": made.placement_of_states,
        "overlap": made.offload_policy.overlap,
        "update_on": made.offload_policy.update_on,
        "dir": bool(where.directories),
        "ram_budget": where.ram_budget,
    }
    for name, value in found.items():
        if name in _FREE and name not in placed:
            continue
        wanted = placed.get(name, _DEFAULTS[name])
        if (name, wanted, value) == ("states", "disk", "shared"):
            continue  # a class that is given the share beside the plan
        if name == "ram_budget" and wanted is not None:
            wanted = parse_size(wanted, name)
        if value != (wanted is not None if name == "dir" else wanted):
            made.close()
            message = (
                "The optimizer's function did not pass on the keywords it was given: the plan has"
                f" {name}={wanted!r} and the optimizer has not. Pass **placement on to it."
            )
            raise OptionError(message)
    return made


def validate_class(made: StowedOptimizer, plan: Plan, device: torch.device) -> None:
    """Check that a plan is one by which a class of torch's can update.

    Args:
        made: What the optimizer's function returned; it is closed where it is refused.
        plan: The plan.
        device: What this rank computes on.

    Raises:
        OptionError: Something of it is for Adam and AdamW alone.
    """
    tiers = {plan.parameters, *plan.units.values()}
    found = {
        f"an accelerator ({device})": device.type != "cpu",
        "parameters on disk": Tier.DISK in tiers,
        f'overlap="{plan.overlap}"': plan.overlap != "none",
        f"update_on={plan.update_on!r}": plan.update_on is not None,
    }
    for what, given in found.items():
        if given:
            made.close()
            message = (
                f"A StowedOptimizer was to update a model with {what}: classes of torch's step in"
                " step(), on the CPU, parameters in host memory. Use tensorstow.AdamW or Adam, or"
                " another plan."
            )
            raise OptionError(message)


# --- ranks ---


def validate_same_on_ranks(arguments: Mapping[str, str], group: dist.ProcessGroup | None) -> None:
    """Check that every rank called ``stow`` alike: fail fast instead of deadlocking. Collective.

    Args:
        arguments: What is to be the same, by what the error calls it.
        group: All ranks; None: there is one.

    Raises:
        OptionError: On every rank, where one differs from rank 0.
    """
    if group is None:
        return
    everybody: list[Mapping[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everybody, dict(arguments), group=group)
    first = everybody[0]
    for rank, other in enumerate(everybody):
        for name, value in first.items():
            if other.get(name) != value:
                message = (
                    f"Rank {rank} called stow() with another {name} than rank 0:"
                    f" {other.get(name)} and {value}. Every rank is to call it alike."
                )
                raise OptionError(message)


def describe_units(units: Iterable[Unit]) -> dict[str, str]:
    """Return what is to be the same of the model on every rank: a line for each unit."""
    lines = {}
    for unit in units:
        each = [f"{n} {_describe(p)}" for n, p in unit.parameters.items()]
        digest = hashlib.sha256("\n".join(each).encode()).hexdigest()[:8]
        few = f"{len(each)} parameters, of names, kinds and places with the sum {digest}"
        lines[f"unit {unit.name!r}"] = few if len(each) > 4 else ", ".join(each)
    return {"units": ", ".join(lines), **lines}


def _describe(parameter: torch.Tensor) -> str:
    """Return what ranks may differ in; a rank with values cannot help one on the meta device."""
    trained = "trained" if parameter.requires_grad else "frozen"
    place = "meta" if parameter.is_meta else "memory"
    return f"{tuple(parameter.shape)} {parameter.dtype} {trained} in {place}"


def refuse_budget(budget: object) -> None:
    """Check that no budget was given beside a plan.

    Args:
        budget: What was given; None: nothing.

    Raises:
        OptionError: One was.
    """
    if budget is not None:
        message = 'budget= only applies to plan="auto"; leave it out or omit plan=.'
        raise OptionError(message)


def refuse_batch(**given: object) -> None:
    """Check that nothing was said of a batch beside a plan.

    Args:
        given: The arguments of ``stow``, by name.

    Raises:
        OptionError: One is not None.
    """
    for name, value in given.items():
        if value is not None:
            message = f'{name}= only applies to plan="auto".'
            raise OptionError(message)
