"""accelerate: what its ``Accelerator`` knows, for updates beside backward."""

from accelerate.state import GradientState


def last_micro_batch() -> bool:
    """Return whether the backward under way is the last of its step.

    For ``tensorstow.AdamW(overlap="backward", accumulation_steps=last_micro_batch)`` inside of
    ``accelerator.accumulate(model)``: the last step of an epoch may have fewer micro-batches.

    Returns:
        Whether gradients are synchronized, which accelerate does in the last backward of a step.
    """
    return bool(GradientState().sync_gradients)
