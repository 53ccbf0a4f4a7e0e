"""Bytes that are held: all of them, no more than were taken."""

import pytest

from tensorstow.memory.bounded_bytes import BoundedBytes


def test_bytes_are_counted_with_their_peak() -> None:
    held = BoundedBytes(10)
    held.take(8)
    assert (held.fits(2), held.fits(3)) == (True, False)
    held.take(4)  # in use: above the bound
    held.give(12)
    assert (held.held, held.peak) == (0, 12)
    with pytest.raises(AssertionError, match="1 bytes were given back"):
        held.give(1)
