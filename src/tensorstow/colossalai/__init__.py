"""ColossalAI's interface: only the import line changes.

``from colossalai.nn.optimizer import CPUAdam, HybridAdam`` becomes
``from tensorstow.colossalai import CPUAdam, HybridAdam``.
"""

from tensorstow.colossalai.adam import CPUAdam, HybridAdam

__all__ = ["CPUAdam", "HybridAdam"]
