"""``Budget``: how many bytes of each tier one rank may use."""

from dataclasses import dataclass

from tensorstow.base.sizes import parse_size


@dataclass(frozen=True, slots=True)
class Budget:
    """The bytes that one rank may hold in each tier.

    Parameters, gradients, states and their buffers count; activations and torch's own memory do
    not.

    Args:
        device: Bytes, or text such as "20GiB", of device memory. Default: None, no limit.
        host: The same of host memory.
        disk: The same of disk space.

    Raises:
        OptionError: A value that is no size.
    """

    device: int | str | None = None
    host: int | str | None = None
    disk: int | str | None = None

    def __post_init__(self) -> None:
        """Parse the sizes; raise OptionError for an invalid one."""
        for tier in ("device", "host", "disk"):
            given = getattr(self, tier)
            if given is not None:
                object.__setattr__(self, tier, parse_size(given, tier))

    def bytes_of(self, tier: str) -> int | None:
        """Return the limit of a tier.

        Args:
            tier: "device", "host" or "disk".

        Returns:
            The limit in bytes; None: no limit.
        """
        size = getattr(self, tier)
        return None if size is None else int(size)
