"""``colossalai.zero.gemini.chunk``: not supported; its names raise errors."""

from typing import NoReturn

from tensorstow.colossalai.absent import BY_UNITS, refuse

_ABSENT = {
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


def __getattr__(name: str) -> NoReturn:
    refuse(__name__, name, _ABSENT)
