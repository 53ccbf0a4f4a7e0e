"""Losses of large vocabularies, whose logits are never whole in memory."""

from tensorstow.losses.cross_entropy import chunked_cross_entropy

__all__ = ["chunked_cross_entropy"]
