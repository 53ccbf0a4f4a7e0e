"""``colossalai.zero.gemini``: a model and its optimizer, placed without a booster."""

from tensorstow.base.absent_names import refuse_names
from tensorstow.colossalai.zero.gemini.chunk import ABSENT, BY_UNITS
from tensorstow.colossalai.zero.gemini.gemini_ddp import GeminiDDP
from tensorstow.colossalai.zero.gemini.gemini_optimizer import GeminiAdamOptimizer, GeminiOptimizer

__all__ = ["GeminiAdamOptimizer", "GeminiDDP", "GeminiOptimizer"]

_ABSENT = {
    **ABSENT,
    "GeminiManager": BY_UNITS,
    "get_static_torch_model": "model.state_dict(only_rank_0=False) has whole weights for a model of"
    " torch",
}
__getattr__ = refuse_names(__name__, _ABSENT)
