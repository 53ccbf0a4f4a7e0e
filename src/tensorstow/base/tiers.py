"""``Tier``: DEVICE, HOST or DISK."""

from enum import StrEnum


class Tier(StrEnum):
    """A place for parameters or states, from fast and small to slow and large.

    "ram" is accepted for "host" wherever a tier is an argument.
    """

    DEVICE = "device"
    """The accelerator's memory; where there is no accelerator, the CPU's."""
    HOST = "host"
    """The CPU's memory."""
    DISK = "disk"
    """Files, read with direct I/O."""

    @classmethod
    def _missing_(cls, value: object) -> "Tier | None":
        return cls.HOST if value == "ram" else None
