"""``deepspeed.accelerator.real_accelerator``: ``get_accelerator`` over ``torch.accelerator``."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from tensorstow.fsdp.sharding import backend_of, current_device


def _zero(device_index: int | None = None) -> int:
    """Return the bytes that torch counts of the CPU's memory."""
    del device_index
    return 0


def _nothing(device_index: int | None = None) -> None:
    """Reset a count that stays 0."""
    del device_index


def _rng_state(device_index: int | None = None) -> torch.Tensor:
    del device_index
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device_index: int | None = None) -> None:
    del device_index
    torch.set_rng_state(new_state)


_OF_THE_CPU: Mapping[str, Callable[..., Any]] = {
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "initial_seed": torch.initial_seed,
    "get_rng_state": _rng_state,
    "set_rng_state": _set_rng_state,
    "memory_reserved": _zero,
    "max_memory_reserved": _zero,
    "reset_peak_memory_stats": _nothing,
    "reset_max_memory_allocated": _nothing,
}
"""What ``torch.cpu`` lacks of what scripts call on any device."""


class TorchAccelerator:
    """The accelerator that torch has, or the CPU: what scripts ask upstream's about.

    Other names are those of the device's module in torch, ``torch.cuda`` or ``torch.cpu``.
    """

    def __init__(self) -> None:
        self._kind = current_device().type
        self._is_host = self._kind == "cpu"

    def __getattr__(self, name: str) -> Any:
        if self._is_host and name in _OF_THE_CPU:
            return _OF_THE_CPU[name]
        return getattr(self._module(), name)

    def _module(self) -> Any:
        """Return the device's module in torch: ``torch.cuda``, ``torch.cpu``, ..."""
        return torch.get_device_module(self._kind)

    random = torch.random

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return a copy that the device reads directly; on the CPU, the tensor itself."""
        del align_bytes
        return tensor if self._is_host else tensor.pin_memory()

    def is_synchronized_device(self) -> bool:
        """Return whether calls end when their work has: on the CPU."""
        return self._is_host

    def is_available(self) -> bool:
        """Return True: the CPU is a device too."""
        return True

    def device_name(self, device_index: int | None = None) -> str:
        """Return a device's name: "cuda", "cuda:1" or "cpu"."""
        named = self._is_host or device_index is None
        return self._kind if named else f"{self._kind}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        """Return a device, which is a context manager too."""
        return torch.device(self.device_name(device_index))

    def current_device(self) -> int:
        """Return the current device's index; 0 for the CPU."""
        return 0 if self._is_host else torch.accelerator.current_device_index()

    def current_device_name(self) -> str:
        """Return the current device's name: "cuda:0"; "cpu" for the CPU."""
        return self.device_name(self.current_device())

    def set_device(self, device_index: int) -> None:
        """Make a device the current one; without effect for the CPU."""
        if not self._is_host:
            torch.accelerator.set_device_index(device_index)

    def device_count(self) -> int:
        """Return the number of devices; 1 for the CPU."""
        return 1 if self._is_host else torch.accelerator.device_count()

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for the work of a device, by default the current one."""
        if not self._is_host:
            torch.accelerator.synchronize(device_index)

    def communication_backend_name(self) -> str:
        """Return the backend of collectives: "nccl" for CUDA, "gloo" for the CPU, ..."""
        return backend_of(current_device()).rpartition(":")[2]

    def is_bf16_supported(self) -> bool:
        """Return whether models may be in bf16; True if the device's module does not say."""
        ask = getattr(self._module(), "is_bf16_supported", None)
        return True if ask is None else bool(ask())

    def is_fp16_supported(self) -> bool:
        """Return True: models may be in fp16."""
        return True

    def empty_cache(self) -> None:
        """Give memory that no tensor uses back to the system."""
        give_back = getattr(self._module(), "empty_cache", None)
        if give_back is not None:
            give_back()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the bytes of the tensors on a device; 0 for the CPU."""
        return self._bytes("memory_allocated", device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the most bytes that tensors had on a device; 0 for the CPU."""
        return self._bytes("max_memory_allocated", device_index)

    def _bytes(self, name: str, device_index: int | None) -> int:
        ask = getattr(self._module(), name, None)
        return 0 if ask is None else int(ask(device_index))


@cache
def get_accelerator() -> TorchAccelerator:
    """Return the accelerator, the same object at each call."""
    return TorchAccelerator()
