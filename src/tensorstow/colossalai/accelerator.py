"""``colossalai.accelerator``: this rank's device, by upstream's calls."""

from functools import cache

import torch

from tensorstow.base.errors import OptionError
from tensorstow.doorkit.keyword_table import Table, describes, honoured
from tensorstow.fsdp.sharding import backend_of, current_device

_NO_MEMORY = (
    "{call}() was called on the CPU, and torch does not count host memory: the"
    " optimizer's memory() returns what it holds."
)
_KEYWORDS: Table = {
    "device": honoured("The device or its index. Default: None, this rank's."),
}


class Accelerator:
    """The device that this rank computes on: torch's accelerator, or the CPU where there is none.

    It has the calls of ColossalAI's accelerators that scripts make. On the CPU ``synchronize`` and
    ``empty_cache`` have nothing to do; upstream raises an error there.
    """

    @property
    def name(self) -> str:
        """The device's type, such as "cuda" or "cpu"."""
        return current_device().type

    @property
    def communication_backend(self) -> str:
        """The backend of process groups, as ``torch.distributed.init_process_group`` takes it."""
        return backend_of(current_device())

    def get_current_device(self) -> torch.device:
        """Return this rank's device, with its index on an accelerator."""
        return current_device()

    def current_device(self) -> int:
        """Return the index of this rank's device.

        Raises:
            OptionError: The CPU computes, which has no index.
        """
        device = current_device()
        if device.type == "cpu":
            message = (
                "get_accelerator().current_device() was called on the CPU, which has"
                " no index: get_current_device() returns a device."
            )
            raise OptionError(message)
        return device.index

    def set_device(self, device: torch.device | int | None = None) -> None:
        """Choose this rank's device.

        Args:
            device: The device or its index. Default: None, it stays.
        """
        if device is not None:
            torch.accelerator.set_device_index(device)

    def is_available(self) -> bool:
        """Return True: without an accelerator the CPU is the device."""
        return True

    def device_count(self) -> int:
        """Return the number of accelerators; 1 where the CPU computes."""
        return 1 if self.name == "cpu" else torch.accelerator.device_count()

    @describes(_KEYWORDS)
    def synchronize(self, device: torch.device | int | None = None) -> None:
        """Wait for what was given to a device."""
        if self.name != "cpu":
            torch.accelerator.synchronize(device)

    def empty_cache(self) -> None:
        """Give memory that torch keeps back to the device."""
        if self.name != "cpu":
            torch.accelerator.empty_cache()

    @describes(_KEYWORDS)
    def memory_allocated(self, device: torch.device | int | None = None) -> int:
        """Return the bytes that tensors take of a device.

        Raises:
            OptionError: The CPU computes.
        """
        self._check_counted("memory_allocated")
        return torch.accelerator.memory_allocated(device)

    @describes(_KEYWORDS)
    def max_memory_allocated(self, device: torch.device | int | None = None) -> int:
        """Return the most bytes of tensors since the start, or ``reset_peak_memory_stats``.

        Raises:
            OptionError: The CPU computes.
        """
        self._check_counted("max_memory_allocated")
        return torch.accelerator.max_memory_allocated(device)

    @describes(_KEYWORDS)
    def reset_peak_memory_stats(self, device: torch.device | int | None = None) -> None:
        """Let ``max_memory_allocated`` begin again.

        Raises:
            OptionError: The CPU computes.
        """
        self._check_counted("reset_peak_memory_stats")
        torch.accelerator.reset_peak_memory_stats(device)

    def _check_counted(self, call: str) -> None:
        if self.name == "cpu":
            raise OptionError(_NO_MEMORY.format(call=call))


@cache
def get_accelerator() -> Accelerator:
    """Return the accelerator of this process, the same object at each call."""
    return Accelerator()
