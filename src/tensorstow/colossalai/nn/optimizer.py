"""``colossalai.nn.optimizer``: the two that keep states on disk."""

from typing import NoReturn

from tensorstow.colossalai.absent import refuse
from tensorstow.colossalai.adam import CPUAdam, HybridAdam

__all__ = ["CPUAdam", "HybridAdam"]

_ABSENT = {
    "FusedAdam": "HybridAdam updates parameters on an accelerator by torch's fused Adam",
    **dict.fromkeys(
        ("Adafactor", "CAME", "FusedLAMB", "FusedSGD", "GaLoreAdamW8bit", "Lamb", "Lars"),
        "tensorstow.StowedOptimizer keeps the states of any optimizer class of torch",
    ),
}


def __getattr__(name: str) -> NoReturn:
    refuse(__name__, name, _ABSENT)
