"""``colossalai.zero.gemini``: a model and its optimizer, placed without a booster."""

from tensorstow.base.absent_names import refuse_names
from tensorstow.colossalai.zero.gemini.chunk import BY_UNITS
from tensorstow.colossalai.zero.gemini.gemini_ddp import GeminiDDP
from tensorstow.colossalai.zero.gemini.gemini_optimizer import GeminiAdamOptimizer, GeminiOptimizer

__all__ = ["GeminiAdamOptimizer", "GeminiDDP", "GeminiOptimizer"]

_ABSENT = {
    "ChunkManager": BY_UNITS,
    "GeminiManager": BY_UNITS,
    "TensorInfo": BY_UNITS,
    "TensorState": BY_UNITS,
    "get_static_torch_model": "model.state_dict(only_rank_0=False) has whole weights for a model of"
    " torch",
    "search_chunk_configuration": f"{BY_UNITS} whose size is searched. Leave chunk_config_dict out",
}
__getattr__ = refuse_names(__name__, _ABSENT)
