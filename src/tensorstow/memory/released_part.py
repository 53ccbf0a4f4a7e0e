"""What gives memory back at ``optimizer.release()``."""

from typing import Protocol


class ReleasedPart(Protocol):
    """Something that holds memory which it can give back."""

    def check_release(self, *, host: bool) -> None:
        """Raise OptionError if something is in use, or cannot be given back."""

    def release(self, *, host: bool) -> None:
        """Give device memory back, and ``host`` memory too."""

    def wake(self) -> None:
        """Take the memory again that is not taken at its next use."""
