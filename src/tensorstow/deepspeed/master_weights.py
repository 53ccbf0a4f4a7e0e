"""fp32 values of a model before its cast to 16 bits: what its masters start as."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from tensorstow.deepspeed.states import owned_names, set_states
from tensorstow.fsdp.sharding import host_group
from tensorstow.optim.placed import PlacedOptimizer
from tensorstow.step.step_plan import as_step
from tensorstow.tensors.dtensor import part_of


class MasterWeights:
    """The fp32 values of a model that is cast to 16 bits, until its optimizer has them."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Cast ``model`` and keep the values before the cast; those of rank 0, as the engine does.

        Parameters on the meta device have no values: their master weights start as their weights.
        """
        self._values = {
            name: parameter.detach().cpu()
            for name, parameter in model.named_parameters()
            if _has_more(parameter, dtype)
        }
        group = host_group() if self._values else None
        if group is not None:
            for values in self._values.values():
                dist.broadcast(values, 0, group=group)
        cast_model(model, dtype)

    @torch.no_grad()
    def assign(self, model: nn.Module, optimizer: PlacedOptimizer) -> None:
        """Set the master weights of the placed ``model``."""
        named = dict(model.named_parameters())
        begun = {}
        for name in owned_names(model, optimizer):
            values = self._values.pop(name, None)
            if values is not None:
                master = part_of(values, named[name], name).clone()
                begun[name] = {"step": as_step(0), "master": master}
        set_states(model, optimizer, begun)


def cast_model(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters of a model in place.

    Buffers keep their dtype, as upstream: a table of rotary frequencies is of no use in bf16.
    Running statistics alone follow, for torch's batch norm takes none of another dtype.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        if isinstance(module, _NormBase):
            for buffer in module.buffers(recurse=False):
                if buffer.is_floating_point():
                    buffer.data = buffer.data.to(dtype)


def _has_more(parameter: nn.Parameter, dtype: torch.dtype) -> bool:
    """Return whether a cast to ``dtype`` loses bits that a master weight would keep."""
    is_updated = parameter.requires_grad and not parameter.is_meta
    return is_updated and parameter.dtype == torch.float32 and dtype != torch.float32
