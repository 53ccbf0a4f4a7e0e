"""``ActivationPlacement``: KEEP, RECOMPUTE, HOST or DISK."""

from enum import StrEnum


class ActivationPlacement(StrEnum):
    """What is done with the tensors that a block saves for its backward.

    "ram" is accepted for "host".
    """

    KEEP = "keep"
    """They stay where they were computed."""
    RECOMPUTE = "recompute"
    """Backward computes them again from the block's inputs."""
    HOST = "host"
    """They wait in host memory."""
    DISK = "disk"
    """They wait in files."""

    @classmethod
    def _missing_(cls, value: object) -> "ActivationPlacement | None":
        return cls.HOST if value == "ram" else None

    def __repr__(self) -> str:
        """Return what users type, as in the repr of a plan."""
        return repr(self.value)
