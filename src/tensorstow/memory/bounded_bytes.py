"""The bytes that are held on one tier, their bound, and their peak."""


class BoundedBytes:
    """A count of bytes with a bound: a manager's memory is counted here and nowhere else.

    ``take`` does not refuse: bytes in use may exceed the bound, and the caller makes room first.
    """

    def __init__(self, capacity: int) -> None:
        """Hold nothing yet, and later up to ``capacity`` bytes."""
        self.capacity = capacity
        self.held = 0
        self.peak = 0
        """The most bytes that were held at once."""

    def fits(self, nbytes: int) -> bool:
        """Return whether so many bytes more are within the bound."""
        return self.held + nbytes <= self.capacity

    def take(self, nbytes: int) -> None:
        """Add bytes that are held from now on."""
        self.held += nbytes
        self.peak = max(self.peak, self.held)

    def give(self, nbytes: int) -> None:
        """Subtract bytes that were taken."""
        if nbytes > self.held:
            message = f"{nbytes} bytes were given back, and {self.held} are held."
            raise AssertionError(message)
        self.held -= nbytes
