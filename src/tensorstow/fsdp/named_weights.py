"""The full weights of a model, one tensor at a time, wherever ``stow`` has placed them.

[Note: Weights of one moment] Somebody who reads one weight after the other may take a step in
between, and would have weights of two steps. All updates under way are waited for at the start, and
the stamps of all weights are kept: a weight with another stamp at its turn raises an error.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tensorstow.base.errors import OptionError
from tensorstow.base.keywords import names_keywords
from tensorstow.checkpoint.content import module_tensors
from tensorstow.fsdp.full_tensors import resharded
from tensorstow.fsdp.read_only import streams_in
from tensorstow.fsdp.weight_stream import Call, WeightStream
from tensorstow.tensors.dtensor import Stamp, shard_of, stamp_of


@dataclass(frozen=True, eq=False, slots=True)
class _NamedTensor:
    """One of the model's tensors, and where it is."""

    module: nn.Module
    name: str
    """The tensor's name in the module."""
    tensor: torch.Tensor
    stamp: Stamp
    lender: tuple[WeightStream, Call] | None
    """What has the values of a model that is only read, and lends them; None: the tensor itself."""


class ModelWeights:
    """The parameters and persistent buffers of a model at one moment, read one by one.

    Every rank reads them in the same order, because shards are all-gathered.
    """

    def __init__(self, model: nn.Module) -> None:
        """Wait for updates under way, and note the weights of this moment."""
        for module in model.modules():
            _run_pre_hooks(module)
        lenders = {
            id(tensor.absent): (stream, call)
            for stream in streams_in(model)
            for call in stream.calls
            for tensor in call.unit.tensors
        }
        modules = dict(model.named_modules())
        self.tensors: dict[str, torch.Tensor] = {}
        """The model's own tensors by their names in ``state_dict``; a tied one by its first."""
        self._places: dict[str, _NamedTensor] = {}
        for path, tensor in module_tensors(resharded(model)):
            prefix, _, name = path.rpartition(".")
            lender = lenders.get(id(tensor))
            self._places[path] = _NamedTensor(modules[prefix], name, tensor, _stamp(tensor), lender)
            self.tensors[path] = tensor

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def whole(self, path: str) -> torch.Tensor:
        """Return a full tensor, on the device where it is; collective.

        It may share its memory with the weight.

        Raises:
            OptionError: The weight was changed since the start.
        """
        place = self._places[path]
        if place.lender is not None:
            return _borrow(place, *place.lender)
        # A forward since the start may have left the weight unsharded.
        _run_pre_hooks(place.module)
        tensor = place.tensor
        is_placed = getattr(place.module, place.name) is tensor
        if not is_placed or _stamp(tensor) != place.stamp:
            message = (
                f"{path} was changed since the iteration over the model's weights began, and the"
                " ones before it are from an earlier moment: take no step and load nothing until"
                " the last weight is read, and begin again."
            )
            raise OptionError(message)
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()

    def copy(self, path: str, device: torch.device) -> torch.Tensor:
        """Return a copy of a full tensor on ``device``, contiguous; collective."""
        whole = self.whole(path)
        # The caller keeps the copy, and autograd cannot save tensors made under inference_mode.
        with torch.inference_mode(mode=False), torch.no_grad():
            copy = torch.empty(whole.shape, dtype=whole.dtype, device=device)
            return copy.copy_(whole)


@names_keywords
def named_weights(
    model: nn.Module, *, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return an iterator over the names and full tensors of a model, for an inference server.

    The names are those of ``model.state_dict()``, as vLLM's and SGLang's weight updates take them.
    A tied weight comes once, under its first name, as in ``model.named_parameters()``. Persistent
    buffers come after the parameters. Each tensor is a contiguous copy in the model's dtype, which
    is yours to keep. One tensor is gathered at a time, from memory or disk, and with several ranks
    no more than two are in memory.

    Call it between steps, on every rank. Each rank gets every full tensor, and all ranks iterate
    over the same number of them. It waits for updates under way, as ``save_safetensors`` does.

    Args:
        model: A stowed model, one that is only read among them, or any other.
        device: Where the tensors are made. Default: "cpu".

    Returns:
        The iterator. It holds nothing of the model's between two tensors, so you may drop it at any
            time.

    Raises:
        OptionError: ``model`` is no module, or ``device`` no device; or, from the iterator, a
            weight was changed since the call, as by a step.
    """
    module: object = model
    if not isinstance(module, nn.Module):
        message = f"named_weights() was called with a {type(module).__name__}: pass an nn.Module."
        raise OptionError(message)
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError) as error:
        message = f"named_weights() was called with device={device!r}, which is none: {error}"
        raise OptionError(message) from None
    weights = ModelWeights(model)
    return ((name, weights.copy(name, target)) for name in weights.tensors)


def _run_pre_hooks(module: nn.Module) -> None:
    """Run the pre-hooks of a module's ``state_dict()``, which wait for updates and reshard."""
    hooks: Sequence[object] = list(module._state_dict_pre_hooks.values())  # noqa: SLF001
    for hook in hooks:
        hook(module, "", False)  # type: ignore[operator]  # noqa: FBT003  # torch's own call


def _stamp(tensor: torch.Tensor) -> Stamp:
    """Return what changes when a tensor is written or replaced, without waiting for updates."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        return stamp_of(shard_of(tensor), tensor)


def _borrow(place: _NamedTensor, stream: WeightStream, call: Call) -> torch.Tensor:
    """Return a copy of a weight that a stream reads."""
    stream.enter(call)
    try:
        parameter: torch.Tensor = getattr(place.module, place.name)
        return parameter.detach().clone()
    finally:
        stream.leave(call)
