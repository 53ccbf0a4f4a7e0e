"""``state_dict`` of a stowed model as plain tensors; loads whole or sharded ones.

On one rank values are plain tensors, on several ranks DTensors over plain shards. Parameters in
host memory are returned as they are, like torch's own state dicts, and those on disk as copies, in
a mapped, unnamed file (ADR 0014) unless they are small. Loaded values may be sharded or whole.
"""

import weakref
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tensorstow.base.errors import OptionError
from tensorstow.fsdp.stowed_parameter import StowedParameter
from tensorstow.io.mapped import scratch_pieces
from tensorstow.memory.buffer_pool import PooledBuffer
from tensorstow.tensors.dtensor import part_of

SMALL_BYTES = 1 << 20
"""Copies up to this size are no files: those would be slower and save nothing."""


class SavedShard(DTensor):
    """A rank's shard of a weight; its storage cannot be saved as a whole tensor."""

    def storage(self) -> NoReturn:
        """Raise OptionError: the caller would save the shard as a whole tensor."""
        _refuse_whole()

    def untyped_storage(self) -> NoReturn:
        """Raise OptionError: the caller would save the shard as a whole tensor."""
        _refuse_whole()

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401  # torch's own signature
        """Pickle as torch's own DTensor."""
        plain: Any = _of_torch(self._local_tensor, self)
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        """Return a copy as torch's own DTensor."""
        copy = memo[id(self)] = _of_torch(self._local_tensor.clone(), self)
        return copy


def _of_torch(local: torch.Tensor, like: DTensor) -> DTensor:
    sharded: DTensor = DTensor(local, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # noqa: SLF001
    return sharded


def _refuse_whole() -> NoReturn:
    message = (
        "The state_dict() of a stowed model over several ranks was to be written as if its tensors"
        " were whole, and this rank has a shard of each: call tensorstow.save_safetensors(model,"
        " directory) on every rank, which writes whole tensors one after the other; or"
        " torch.distributed.checkpoint.save(state_dict)."
    )
    raise OptionError(message)


def register_state_dict_hooks(model: nn.Module) -> None:
    """Let ``state_dict`` of a sharded model return tensors that anybody can save, and load them.

    Its modules have state dicts too. Loading with ``assign=True`` raises OptionError.
    """
    copies: dict[int, weakref.ref[torch.Tensor]] = {}
    for module in model.modules():
        parameters = {
            n: p for n, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)
        }
        if parameters:
            _hook(module, parameters, copies)


def _hook(
    module: nn.Module,
    parameters: Mapping[str, torch.Tensor],
    copies: dict[int, "weakref.ref[torch.Tensor]"],
) -> None:
    """Put the hooks on ``module``; ``copies``: the last ones, by parameter."""

    def saved(_: nn.Module, state_dict: dict[str, Any], prefix: str, __: object) -> None:
        for name, parameter in parameters.items():
            value = state_dict.get(prefix + name)
            # With keep_vars=True torch returns the parameters themselves.
            if isinstance(value, DTensor) and not isinstance(value, nn.Parameter):
                reference = copies.get(id(parameter))
                copy = None if reference is None else reference()
                # A tied weight has one copy under all of its names.
                # A copy that is in an older state dict has old values.
                if copy is None or not any(v is copy for v in state_dict.values()):
                    copy = to_savable(value)
                    copies[id(parameter)] = weakref.ref(copy)
                state_dict[prefix + name] = copy

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
        for name, parameter in parameters.items():
            value = state_dict.get(prefix + name)
            if not isinstance(parameter, DTensor):
                continue  # it is whole at present (fsdp.full_tensors)
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                state_dict[prefix + name] = _shard(value, parameter, prefix + name)

    register: Any = module.register_state_dict_post_hook
    register(saved)
    before: Any = module.register_load_state_dict_pre_hook
    before(loading)


@torch.no_grad()
def to_savable(value: DTensor) -> torch.Tensor:
    """Return the elements of a sharded parameter as a tensor that can be saved.

    It is a torch.Tensor on one rank and a DTensor over one on several. Memory is shared with a
    parameter that stays in host memory, and copied from one on disk.
    """
    local = value.to_local()
    if isinstance(local, StowedParameter):
        storage = local.source.storage
        # The caller may write to the memory of a parameter at once: no copy to a device reads it.
        with storage.access(write=storage.pager is None):
            local = (
                storage.local_shard
                if storage.pager is None
                else _copy(storage.local_shard, storage.pager)
            )
    if value.device_mesh.size() == 1:
        return local
    shard: DTensor = SavedShard(local, value._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # noqa: SLF001
    return shard


def _copy(values: torch.Tensor, buffer: PooledBuffer) -> torch.Tensor:
    if values.nbytes <= SMALL_BYTES:
        return values.clone()
    with scratch_pieces(buffer.pool.directory, values.nbytes) as file:
        file.write(values, 0)
        return file.map().tensor(0, values.shape, values.dtype)


@torch.no_grad()
def _shard(whole: torch.Tensor, parameter: DTensor, name: str) -> torch.Tensor:
    """Return this rank's rows of ``whole``, sharded as ``parameter`` is.

    A tensor of another shape is returned as it is: torch raises the error, with its name.
    """
    if whole.shape != parameter.shape:
        return whole
    return _of_torch(part_of(whole.detach(), parameter, name), parameter)
