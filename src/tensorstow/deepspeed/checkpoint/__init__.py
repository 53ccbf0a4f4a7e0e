"""``deepspeed.checkpoint``: checkpoints of an engine, and copies of tensors to save."""
