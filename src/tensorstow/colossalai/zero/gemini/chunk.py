"""``colossalai.zero.gemini.chunk``: not supported; its names raise errors."""

from tensorstow.base.absent_names import refuse_names

BY_UNITS = "parameters move by the model's blocks, and there are no chunks"

ABSENT = {
    **dict.fromkeys(
        (
            "Chunk",
            "ChunkFullError",
            "ChunkManager",
            "TensorInfo",
            "TensorState",
            "classify_params_by_dp_degree",
            "init_chunk_manager",
        ),
        BY_UNITS,
    ),
    "search_chunk_configuration": f"{BY_UNITS} whose size is searched. Leave chunk_config_dict out",
}
__getattr__ = refuse_names(__name__, ABSENT)
