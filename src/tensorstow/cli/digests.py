"""SHA-256 of a model's parameters and of an optimizer's states by name, on any tier."""

import hashlib
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def digests_of(model: nn.Module) -> dict[str, str]:
    """Return the SHA-256 of each parameter's bytes; ``stow`` may have placed the model."""
    digests = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        digests[name] = _digest(value.full_tensor() if isinstance(value, DTensor) else value)
    return digests


def digests_of_states(optimizer: Optimizer, model: nn.Module) -> dict[str, str]:
    """Return the SHA-256 of each state's bytes, by the state and its parameter.

    The optimizer has all of the model's parameters, in their order, on one rank.
    """
    names = [name for name, _ in model.named_parameters()]
    return {
        f"{kind} of {names[index]}": _digest(value)
        for index, entry in optimizer.state_dict()["state"].items()
        for kind, value in entry.items()
    }


def _digest(values: torch.Tensor) -> str:
    memory = values.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return hashlib.sha256(memory).hexdigest()


def checksum(model: nn.Module) -> str:
    """Return one SHA-256 over the names and digests of all parameters."""
    return checksum_of(digests_of(model))


def checksum_of(digests: Mapping[str, str]) -> str:
    """Return one SHA-256 over names and digests."""
    joined = "".join(f"{name} {digest}\n" for name, digest in digests.items())
    return hashlib.sha256(joined.encode()).hexdigest()
