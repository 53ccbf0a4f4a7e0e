"""Where models are computed: an accelerator, or the CPU in its place.

The CPU in the device's place runs everything but the device: the optimizer takes what was ``put``
there for an accelerator's, and its copies go over a link that counts and is never late.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn

from tensorstow.fsdp.sharding import Sharding
from tensorstow.io import device_link as links
from tensorstow.io.device_link import PlainLink

_STOW = "tensorstow.fsdp.stow"
_PLACEMENTS = "tensorstow.fsdp.placements"


class Place:
    """A device that computes."""

    def __init__(self, device: torch.device) -> None:
        """Take ``device``; the CPU where it is to be one."""
        self.device = device
        self._addresses: set[int] = set()

    @property
    def is_real(self) -> bool:
        """Return whether it is an accelerator."""
        return self.device.type != "cpu"

    def put(self, model: nn.Module) -> nn.Module:
        """Let the parameters and buffers of ``model`` be there; return it."""
        if self.is_real:
            return model.to(self.device)
        self._addresses.update(p.data_ptr() for p in model.parameters() if p.numel())
        return model

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` was put there, where there is the CPU."""
        plain = type(tensor) in {torch.Tensor, nn.Parameter}
        return plain and tensor.data_ptr() in self._addresses

    def clear(self) -> None:
        """Give back the memory of what is gone."""
        self._addresses.clear()
        if self.is_real:
            torch.accelerator.empty_cache()

    def forget_peak(self) -> None:
        """Begin to look anew for the most that is held at once."""
        if self.is_real:
            torch.accelerator.reset_peak_memory_stats()

    def peak(self) -> int:
        """Return the most bytes of the device that torch held at once; 0 of the CPU."""
        return torch.accelerator.max_memory_allocated() if self.is_real else 0

    def wait(self) -> None:
        """Return when all that it was given is done."""
        if self.is_real:
            torch.accelerator.synchronize()


def accelerator_here() -> Place | None:
    """Return this machine's accelerator; None where there is none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return None
    return Place(torch.device(device.type, torch.accelerator.current_device_index()))


def _plain_link(_: torch.device) -> PlainLink:
    return PlainLink()


@contextmanager
def on_cpu() -> Iterator[torch.device]:
    """Let ``stow`` compute on the CPU inside, whatever else there is."""
    cpu = torch.device("cpu")
    engine = importlib.import_module(_STOW)
    with mock.patch.object(engine, "current_device", return_value=cpu):
        yield cpu


@contextmanager
def cpu_as_device() -> Iterator[Place]:
    """Let the CPU be the device inside."""
    with on_cpu() as cpu:
        yield from _counting(Place(cpu))


def _counting(place: Place) -> Iterator[Place]:
    with (
        mock.patch.object(links, "is_remote", place.has),
        mock.patch.object(links, "open_link", _plain_link),
        mock.patch.object(Sharding, "is_in_place", new=False),  # a device has memory of its own
        mock.patch.object(importlib.import_module(_PLACEMENTS), "is_away", return_value=True),
    ):
        yield place
