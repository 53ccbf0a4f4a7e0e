"""``ActivationPlacement``: KEEP, RECOMPUTE, HOST or DISK."""

from enum import StrEnum


class ActivationPlacement(StrEnum):
    """What is done with the tensors that a block saves for its backward.

    "cpu" and "ram" are accepted for "host", and "nvme" for "disk".
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
        return {"cpu": cls.HOST, "ram": cls.HOST, "nvme": cls.DISK}.get(str(value))

    def __repr__(self) -> str:
        """Return what users type, as in the repr of a plan."""
        return repr(self.value)
