"""accelerate: the last micro-batch of a step, and models that are already placed."""

from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState

from tensorstow.base.errors import OptionError
from tensorstow.fsdp.sharding import world_size
from tensorstow.fsdp.stow import plan_of


def last_micro_batch() -> bool:
    """Return whether the current backward is the last of its step.

    For ``tensorstow.AdamW(overlap="backward", accumulation_steps=last_micro_batch)`` inside of
    ``accelerator.accumulate(model)``: the last step of an epoch may have fewer micro-batches.

    Returns:
        Whether gradients are synchronized, which accelerate does in the last backward of a step.
    """
    return bool(GradientState().sync_gradients)


def prepared(model: torch.nn.Module) -> torch.nn.Module:
    """Mark a model that ``stow`` has placed, so that ``prepare`` leaves it as it is.

    accelerate would move it to a device, and wrap and cast it.

    Args:
        model: The model; pass it to ``accelerator.prepare`` with its optimizer.

    Returns:
        The model.

    Raises:
        OptionError: ``stow`` has not placed it, or the accelerator has mixed precision or another
            number of ranks.
    """
    plan_of(model)
    processes = AcceleratorState().num_processes
    if processes != world_size():
        message = (
            f"prepared() was called for a model that is shared by {world_size()} ranks, and the"
            f" Accelerator knows of {processes}: start them with torchrun or accelerate launch."
        )
        raise OptionError(message)
    precision = AcceleratorState().mixed_precision
    if precision != "no":
        message = (
            f'mixed_precision="{precision}" was given to the Accelerator, and its model is placed:'
            " torch.autocast keeps a 16-bit copy of every weight until forward ends, so that the"
            " whole model would be in memory. Leave it out, and give stow compute_dtype=."
        )
        raise OptionError(message)
    marked: Any = model
    marked._is_accelerate_prepared = True  # noqa: SLF001  # accelerate's mark
    return model
