"""``state_dict`` of a sharded model: plain tensors that anybody can save, and the way back.

Values are DTensors over plain shards: of parameters in host memory the memory itself, as torch's
own state dicts have it, and of those on disk a copy. What is loaded may be as sharded, or whole.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tensorstow.base.errors import OptionError
from tensorstow.engine.stowed_parameter import StowedParameter


def keep_plain(model: nn.Module) -> None:
    """Let the state dicts of a sharded ``model``, and of modules in it, be plain, and load them."""
    for module in model.modules():
        own = {n: p for n, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)}
        if own:
            _hook(module, own)


def _hook(module: nn.Module, own: Mapping[str, DTensor]) -> None:
    def saved(_: nn.Module, state_dict: dict[str, Any], prefix: str, __: object) -> None:
        for name in own:
            value = state_dict.get(prefix + name)
            if isinstance(value, DTensor) and not isinstance(value, nn.Parameter):
                state_dict[prefix + name] = plain(value)

    def loading(
        _: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: Mapping[str, Any],
        *__: object,
    ) -> None:
        if metadata.get("assign_to_params_buffers"):
            message = (
                "load_state_dict(assign=True) was called on a stowed model, whose parameters the"
                " optimizer and the engine hold: leave assign out, and the values are copied."
            )
            raise OptionError(message)
        for name, parameter in own.items():
            value = state_dict.get(prefix + name)
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                state_dict[prefix + name] = _shard(value, parameter)

    register: Any = module.register_state_dict_post_hook
    register(saved)
    before: Any = module.register_load_state_dict_pre_hook
    before(loading)


@torch.no_grad()
def plain(value: DTensor) -> DTensor:
    """Return a DTensor of the same elements whose shard is an ordinary tensor."""
    local = value.to_local()
    if not isinstance(local, StowedParameter):
        return value
    cell = local.slot.filled()
    with cell.opened(to_change=False):
        shard = cell.home if cell.lessor is None else cell.home.clone()
    made: DTensor = DTensor(shard, value._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # noqa: SLF001
    return made


@torch.no_grad()
def _shard(whole: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """Return this rank's rows of ``whole``, in the way of ``parameter``; itself if it is no such.

    torch says that then, with the name.
    """
    if whole.shape != parameter.shape:
        return whole
    mesh = parameter.device_mesh
    ranks, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    length = -(-whole.shape[0] // ranks)
    rows = whole.detach()[rank * length : (rank + 1) * length]
    made: DTensor = DTensor(rows, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # noqa: SLF001
    return made
