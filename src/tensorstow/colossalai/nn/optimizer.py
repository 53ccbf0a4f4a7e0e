"""``colossalai.nn.optimizer``: the two that keep states on disk."""

from tensorstow.base.absent_names import refuse_names
from tensorstow.colossalai.adam import CPUAdam, HybridAdam

__all__ = ["CPUAdam", "HybridAdam"]

_ABSENT = {
    "FusedAdam": "HybridAdam updates parameters on an accelerator by torch's fused Adam",
    **dict.fromkeys(
        ("Adafactor", "CAME", "FusedLAMB", "FusedSGD", "GaLoreAdamW8bit", "Lamb", "Lars"),
        "tensorstow.StowedOptimizer keeps the states of any optimizer class of torch",
    ),
}
__getattr__ = refuse_names(__name__, _ABSENT)
