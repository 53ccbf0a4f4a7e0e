"""``colossalai.zero.gemini``: a model and its optimizer, placed without a booster."""

from tensorstow.base.absent_names import add_absent_modules, refuse_names
from tensorstow.colossalai.zero.gemini.gemini_ddp import GeminiDDP
from tensorstow.colossalai.zero.gemini.gemini_optimizer import GeminiAdamOptimizer, GeminiOptimizer

__all__ = ["GeminiAdamOptimizer", "GeminiDDP", "GeminiOptimizer"]

_BY_UNITS = (
    "parameters move by the model's blocks, and there are no chunks, whose size would be searched."
    " Leave chunk_config_dict out"
)
_ABSENT = {
    **dict.fromkeys(
        (
            *("Chunk", "ChunkFullError", "ChunkManager", "GeminiManager", "TensorInfo"),
            *("TensorState", "classify_params_by_dp_degree", "init_chunk_manager"),
            "search_chunk_configuration",
        ),
        _BY_UNITS,
    ),
    "get_static_torch_model": "model.state_dict(only_rank_0=False) has whole weights for a model of"
    " torch",
}
add_absent_modules(__name__, {"chunk": _BY_UNITS})
__getattr__ = refuse_names(__name__, _ABSENT)
