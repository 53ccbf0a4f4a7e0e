"""``colossalai.nn.optimizer``: the two that keep states on disk."""

from tensorstow.colossalai.adam import CPUAdam, HybridAdam

__all__ = ["CPUAdam", "HybridAdam"]
