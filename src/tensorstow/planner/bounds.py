"""Limits that a run enforces and the planner counts with, in bytes and units."""

MIN_UNITS_IN_MEMORY = 3
"""Least number of units on disk in memory at once: one is used, the others are updated."""
UNITS_UNSHARDED = 2
"""Number of units unsharded at once: one is used, and FSDP2 unshards the next."""
SHARD_ALIGN = 128
"""Alignment, in bytes, of the shards of a unit."""
MAX_IN_FLIGHT_BYTES = 256 << 20
"""Most bytes of gradients that the device holds for unfinished copies."""
PIECE_BYTES = 4 << 20
PIECE_BUFFERS = 8
"""Buffers for gradients of later micro-batches that are copied to host memory in pieces."""
_LEAST_BUFFERS = 2  # one that FSDP2 gathers from, and one that it gathers ahead


def upload_buffers(ahead: int) -> int:
    """Return how many units have a buffer on the device; ``ahead`` are copied ahead of use."""
    return max(ahead + 1, _LEAST_BUFFERS)
