"""``deepspeed.runtime.utils``: memory in the log."""

import logging

from tensorstow.base.sizes import format_bytes
from tensorstow.deepspeed.accelerator.real_accelerator import get_accelerator
from tensorstow.fsdp.sharding import rank_here

logger = logging.getLogger("tensorstow")


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log what tensors have of the device's memory, now and at most.

    Args:
        message: The beginning of the line.
        force: False: nothing is logged.
    """
    if force and rank_here() == 0:
        accelerator = get_accelerator()
        now, most = accelerator.memory_allocated(), accelerator.max_memory_allocated()
        logger.info(
            "%s: %s on the device, at most %s", message, format_bytes(now), format_bytes(most)
        )
