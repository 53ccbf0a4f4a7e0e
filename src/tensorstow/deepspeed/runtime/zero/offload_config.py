"""``deepspeed.runtime.zero.offload_config``: the devices of the sections ``offload_*``."""

from enum import StrEnum

__all__ = ["OffloadDeviceEnum"]


class OffloadDeviceEnum(StrEnum):
    """A device in a configuration; each is equal to the text that JSON has for it."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"
