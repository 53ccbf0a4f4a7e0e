"""``colossalai.booster.plugin``: how a model is placed."""

from tensorstow.colossalai.booster.plugin.gemini_plugin import GeminiPlugin
from tensorstow.colossalai.booster.plugin.plugin_base import Plugin

__all__ = ["GeminiPlugin", "Plugin"]
