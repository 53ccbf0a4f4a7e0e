"""Limits that a run enforces and the planner counts with, in bytes and units."""

MIN_UNITS_IN_MEMORY = 3
"""Units on disk that are in memory at once, at least: one is computed with, others are updated."""
UNITS_UNSHARDED = 2
"""Units whose parameters are whole at once: one is computed with, FSDP2 unshards the next."""
SHARD_ALIGN = 128
"""Shards of a unit begin at multiples of so many bytes."""
MAX_IN_FLIGHT_BYTES = 256 << 20
"""Bytes of gradients that the device keeps for copies that are not complete."""
PIECE_BYTES = 4 << 20
PIECE_BUFFERS = 8
"""Pieces of gradients of later micro-batches that are copied to host memory at once."""
_LEAST_BUFFERS = 2  # one that FSDP2 gathers from, and one that it gathers ahead


def upload_buffers(ahead: int) -> int:
    """Return how many units have a buffer on the device for copies from the host.

    Args:
        ahead: How many units are copied ahead of use (``Plan.prefetch``).
    """
    return max(ahead + 1, _LEAST_BUFFERS)
