"""``Tier``: DEVICE, HOST or DISK."""

from enum import StrEnum


class Tier(StrEnum):
    """A place for parameters or states, from fast and small to slow and large.

    Wherever a tier is an argument, "cuda" and "gpu" are accepted for "device", "cpu" and "ram" for
    "host", and "nvme" for "disk".
    """

    DEVICE = "device"
    """The accelerator's memory; where there is no accelerator, the CPU's."""
    HOST = "host"
    """The CPU's memory."""
    DISK = "disk"
    """Files, read with direct I/O."""

    @classmethod
    def named(cls, value: object) -> "Tier | None":
        """Return the tier that ``value`` is a name of; None: it is no name of a tier."""
        return cls(value) if isinstance(value, str) and value in {*cls, *_ALIASES} else None

    @classmethod
    def _missing_(cls, value: object) -> "Tier | None":
        name = _ALIASES.get(value) if isinstance(value, str) else None
        return None if name is None else cls(name)


_ALIASES = {"cuda": "device", "gpu": "device", "cpu": "host", "ram": "host", "nvme": "disk"}
"""What torch, DeepSpeed and accelerate call them."""
