"""``deepspeed.runtime.activation_checkpointing``: where scripts look for ``checkpointing``."""

from tensorstow.deepspeed.runtime.activation_checkpointing import checkpointing

__all__ = ["checkpointing"]
