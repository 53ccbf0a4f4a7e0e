"""``Budget``: how many bytes of each tier one rank may use."""

from dataclasses import dataclass

from tensorstow.base.fields import check_fields
from tensorstow.base.keywords import names_keywords
from tensorstow.base.sizes import Size


@names_keywords
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

    device: Size | None = None
    host: Size | None = None
    disk: Size | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def bytes_of(self, tier: str) -> int | None:
        """Return the limit of a tier.

        Args:
            tier: "device", "host" or "disk".

        Returns:
            The limit in bytes; None is no limit.
        """
        size = getattr(self, tier)
        return None if size is None else int(size)
