"""``colossalai.zero``: Gemini without a booster."""

from tensorstow.base.absent_names import refuse_names
from tensorstow.colossalai.utils.model.colo_init_context import ColoInitContext
from tensorstow.colossalai.zero.gemini.gemini_ddp import GeminiDDP
from tensorstow.colossalai.zero.gemini.gemini_optimizer import GeminiAdamOptimizer, GeminiOptimizer

__all__ = ["ColoInitContext", "GeminiAdamOptimizer", "GeminiDDP", "GeminiOptimizer"]

_BOOSTER = "Booster(plugin={}) places a model and creates its optimizer again in one call"
_LOW_LEVEL = _BOOSTER.format("LowLevelZeroPlugin(stage=1)")
_ABSENT = {
    "LowLevelZeroOptimizer": f"an optimizer alone does not show its model. {_LOW_LEVEL}",
    "get_static_torch_model": "model.state_dict(only_rank_0=False) has whole weights for a model of"
    " torch",
    "zero_model_wrapper": _BOOSTER.format("LowLevelZeroPlugin or GeminiPlugin"),
    "zero_optim_wrapper": _BOOSTER.format("LowLevelZeroPlugin or GeminiPlugin"),
}
__getattr__ = refuse_names(__name__, _ABSENT)
