"""``deepspeed.runtime.activation_checkpointing.checkpointing``: ``deepspeed.checkpointing``."""

from tensorstow.deepspeed.checkpointing import checkpoint, configure, is_configured, reset

__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]

non_reentrant_checkpoint = checkpoint
