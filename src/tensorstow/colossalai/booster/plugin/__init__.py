"""``colossalai.booster.plugin``: how a model is placed."""

from tensorstow.base.absent_names import refuse_names
from tensorstow.colossalai.booster.plugin.gemini_plugin import GeminiPlugin
from tensorstow.colossalai.booster.plugin.low_level_zero_plugin import LowLevelZeroPlugin
from tensorstow.colossalai.booster.plugin.plugin_base import Plugin
from tensorstow.colossalai.booster.plugin.torch_ddp_plugin import TorchDDPPlugin
from tensorstow.colossalai.booster.plugin.torch_fsdp_plugin import TorchFSDPPlugin

__all__ = ["GeminiPlugin", "LowLevelZeroPlugin", "Plugin", "TorchDDPPlugin", "TorchFSDPPlugin"]

_ABSENT = dict.fromkeys(
    ("HybridParallelPlugin", "MoeHybridParallelPlugin"),
    "models are not cut by layers, stages or experts. GeminiPlugin places what one device cannot"
    " hold elsewhere",
)
__getattr__ = refuse_names(__name__, _ABSENT)
