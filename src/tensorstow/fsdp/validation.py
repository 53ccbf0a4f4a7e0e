"""What users asked of ``stow``, checked before anything else."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from tensorstow.base.budget import Budget
from tensorstow.base.errors import OptionError
from tensorstow.base.plan import Plan
from tensorstow.base.update_on import reaches_device, told
from tensorstow.io import device_link

_COMPUTES = (torch.float32, torch.bfloat16, torch.float16)


def check_asked(
    model: object, optimizer: object, plan: object, compute_dtype: object, mesh: object
) -> None:
    """Raise OptionError for what is of a wrong kind."""
    if not isinstance(model, nn.Module):
        message = f"stow() was given a {type(model).__name__} for a model: give it a torch module."
        raise OptionError(message)
    if not callable(optimizer):
        message = (
            f"stow() was given a {type(optimizer).__name__} for an optimizer: give it what makes"
            " one of the model's named parameters, partial(tensorstow.AdamW, lr=1e-5), for the"
            " parameters are others once they are stowed."
        )
        raise OptionError(message)
    if plan != "auto" and not isinstance(plan, Plan):
        message = f'plan={plan!r} was given: it is a tensorstow.Plan, or "auto".'
        raise OptionError(message)
    if compute_dtype is not None and compute_dtype not in _COMPUTES:
        message = (
            f"compute_dtype={compute_dtype!r} was given: it is one of"
            f" {', '.join(map(str, _COMPUTES))}, or None for the parameters' own."
        )
        raise OptionError(message)
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        message = f"mesh={mesh!r} was given: it is a DeviceMesh, by init_device_mesh(...)."
        raise OptionError(message)
    if torch.is_inference_mode_enabled():
        message = "stow() was called under inference_mode: what is made there is never trained."
        raise OptionError(message)
    _check_new(model)


def check_budget(budget: object) -> None:
    """Raise OptionError for what is no budget."""
    if budget is not None and not isinstance(budget, Budget):
        message = (
            f"budget={budget!r} was given: it is a tensorstow.Budget, as"
            ' Budget(device="20GiB", host="48GiB", disk="500GiB").'
        )
        raise OptionError(message)


def check_init(init: object) -> None:
    """Raise OptionError for what cannot give a module its first values."""
    if init is not None and not callable(init):
        message = (
            f"init={init!r} was given: it is a function that is called with a module, as"
            " model._init_weights of transformers is."
        )
        raise OptionError(message)


def _check_new(model: nn.Module) -> None:
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


def check_device(plan: Plan, here: torch.device) -> None:
    """Raise OptionError where updates are to run on an accelerator that this rank has not got."""
    if reaches_device(plan.update_on) and not device_link.is_remote(torch.empty(0, device=here)):
        message = (
            f"{told(plan.update_on)} was given, and this rank computes on {here}: there is no"
            ' accelerator to update on. Leave update_on out, or say "host".'
        )
        raise OptionError(message)


def check_mesh(mesh: DeviceMesh, plan: Plan, device: torch.device) -> None:
    """Raise OptionError for a mesh that FSDP2 cannot use so, or that the plan contradicts."""
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
