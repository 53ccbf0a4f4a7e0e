"""Ranks that were asked for different things: told at once, where they would wait for ever."""

import hashlib
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from tensorstow.base.errors import OptionError
from tensorstow.fsdp.units import Unit


def check_agreement(told: Mapping[str, str], group: dist.ProcessGroup | None) -> None:
    """Raise OptionError on every rank unless all were told the same; a collective call."""
    if group is None:
        return
    everybody: list[Mapping[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everybody, dict(told), group=group)
    first = everybody[0]
    for rank, other in enumerate(everybody):
        for name, value in first.items():
            if other.get(name) != value:
                message = (
                    f"Rank {rank} called stow() with another {name} than rank 0:"
                    f" {other.get(name)} and {value}. Every rank is to call it alike."
                )
                raise OptionError(message)


def told_of(units: Iterable[Unit]) -> dict[str, str]:
    """Return what is to be the same of the model: a line for each unit."""
    lines = {}
    for unit in units:
        each = [f"{n} {_kind(p)}" for n, p in unit.parameters.items()]
        digest = hashlib.sha256("\n".join(each).encode()).hexdigest()[:8]
        few = f"{len(each)} parameters, of names, kinds and places with the sum {digest}"
        lines[f"unit {unit.name!r}"] = few if len(each) > 4 else ", ".join(each)
    return {"units": ", ".join(lines), **lines}


def _kind(parameter: torch.Tensor) -> str:
    """Return what ranks may differ in; a rank with values cannot help one on the meta device."""
    trained = "trained" if parameter.requires_grad else "frozen"
    place = "meta" if parameter.is_meta else "memory"
    return f"{tuple(parameter.shape)} {parameter.dtype} {trained} in {place}"
