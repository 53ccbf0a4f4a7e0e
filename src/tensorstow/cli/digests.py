"""SHA-256 of a model's parameters, by name, wherever they are."""

import hashlib
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def digests_of(model: nn.Module) -> dict[str, str]:
    """Return the SHA-256 of each parameter's bytes.

    Args:
        model: A model; it may be one that ``stow`` placed.
    """
    found = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        memory = whole.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        found[name] = hashlib.sha256(memory).hexdigest()
    return found


def checksum(model: nn.Module) -> str:
    """Return one SHA-256 over the names and digests of all parameters.

    Args:
        model: A model; it may be one that ``stow`` placed.
    """
    return checksum_of(digests_of(model))


def checksum_of(digests: Mapping[str, str]) -> str:
    """Return one SHA-256 over the names and digests of parameters."""
    joined = "".join(f"{name} {digest}\n" for name, digest in digests.items())
    return hashlib.sha256(joined.encode()).hexdigest()
