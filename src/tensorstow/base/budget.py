"""How many bytes of each tier one rank may hold."""

from dataclasses import dataclass

from tensorstow.base.sizes import parse_size


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes per rank and tier; None: no limit.

    Sizes are ints of bytes or text ("20GiB"). What counts is parameters, gradients, states and the
    buffers they move through; torch's own memory and activations do not.
    """

    device: int | str | None = None
    host: int | str | None = None
    disk: int | str | None = None

    def __post_init__(self) -> None:
        """Read the sizes; raises OptionError for what is no size."""
        for tier in ("device", "host", "disk"):
            given = getattr(self, tier)
            if given is not None:
                object.__setattr__(self, tier, parse_size(given, tier))

    def bytes_of(self, tier: str) -> int | None:
        """Return the bytes of a tier, or None where it has no limit."""
        size = getattr(self, tier)
        return None if size is None else int(size)
