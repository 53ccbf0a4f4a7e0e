import importlib

import pytest

import tensorstow.colossalai
from tensorstow.base.errors import AbsentAttributeError

ABSENT = [
    ("booster.plugin", "HybridParallelPlugin", "GeminiPlugin places what one device cannot hold"),
    ("nn.optimizer", "FusedAdam", "HybridAdam updates parameters on an accelerator"),
    ("nn.optimizer", "Lamb", r"tensorstow\.StowedOptimizer"),
    ("nn.lr_scheduler", "OneCycleLR", r"torch\.optim\.lr_scheduler\.OneCycleLR"),
    ("nn.lr_scheduler", "MultiStepWarmupLR", r"SequentialLR\(\[LinearLR"),
    ("nn.lr_scheduler", "FlatAnnealingLR", r"SequentialLR\(\[ConstantLR"),
    ("zero", "LowLevelZeroOptimizer", r"Booster\(plugin=LowLevelZeroPlugin\(stage=1\)\)"),
    ("zero", "zero_model_wrapper", "places a model"),
    ("zero", "zero_optim_wrapper", "creates its optimizer again"),
    ("zero", "get_static_torch_model", r"model\.state_dict\(only_rank_0=False\)"),
    ("zero.gemini", "GeminiManager", "there are no chunks"),
    ("zero.gemini", "TensorState", "there are no chunks"),
    ("zero.gemini.chunk", "ChunkManager", "there are no chunks"),
    ("zero.gemini.chunk", "init_chunk_manager", "there are no chunks"),
    ("zero.gemini.chunk", "search_chunk_configuration", "Leave chunk_config_dict out"),
]


@pytest.mark.parametrize(("module", "name", "said"), ABSENT)
def test_a_name_that_is_not_here_says_what_to_use(module: str, name: str, said: str) -> None:
    found = importlib.import_module(f"tensorstow.colossalai.{module}")
    with pytest.raises(AbsentAttributeError, match=f"{name} is not in {found.__name__}: .*{said}"):
        getattr(found, name)
    with pytest.raises(ImportError, match=said):
        exec(f"from tensorstow.colossalai.{module} import {name}")  # noqa: S102
    if module != "zero.gemini.chunk":  # which has no names at all
        with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
            found.Nothing  # noqa: B018


def test_the_version_is_one_that_scripts_ask_for() -> None:
    assert tensorstow.colossalai.__version__ == "0.5.0"
