"""ColossalAI's interface: only the import lines change.

``import colossalai`` becomes ``import tensorstow.colossalai as colossalai``, and ``from
colossalai.booster.plugin import GeminiPlugin`` becomes ``from tensorstow.colossalai.booster.plugin
import GeminiPlugin``. docs/guides/colossalai.md lists what is honoured and what is refused.
"""

from tensorstow.base.absent_names import refuse_other_modules
from tensorstow.colossalai import accelerator
from tensorstow.colossalai.adam import CPUAdam, HybridAdam
from tensorstow.colossalai.initialize import (
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
)

__version__ = "0.5.0"
"""The version of ColossalAI whose interface this is; scripts compare it."""

__all__ = [
    "CPUAdam",
    "HybridAdam",
    "__version__",
    "accelerator",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
]

refuse_other_modules(__name__, "docs/guides/colossalai.md")
