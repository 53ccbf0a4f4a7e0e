"""``deepspeed.runtime.utils``: memory in the log."""

from tensorstow.base.sizes import format_bytes
from tensorstow.deepspeed.accelerator.real_accelerator import get_accelerator
from tensorstow.deepspeed.ranks import rank_here
from tensorstow.deepspeed.utils.logging import logger

__all__ = ["see_memory_usage"]


def see_memory_usage(message: str, force: bool = False) -> None:  # noqa: FBT001, FBT002  # upstream's
    """Log what tensors have of the device's memory, now and at most.

    Args:
        message: What the line begins with.
        force: False: nothing is logged.
    """
    if force and rank_here() == 0:
        here = get_accelerator()
        now, most = here.memory_allocated(), here.max_memory_allocated()
        logger.info(
            "%s: %s on the device, at most %s", message, format_bytes(now), format_bytes(most)
        )
