"""Losses of large vocabularies, whose logits are never whole in memory."""

from tensorstow.losses.causal_lm import chunk_loss
from tensorstow.losses.cross_entropy import chunked_cross_entropy

__all__ = ["chunk_loss", "chunked_cross_entropy"]
