"""Models by name: on the meta device, with the parameters that the real ones have."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.fsdp.units import aliases_of
from tensorstow.measure.models import build_model

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("name", "parameters", "dtype"),
    [
        ("gpt2", 124_439_808, torch.float32),
        ("llama-3.2-1b", 1_235_814_400, torch.bfloat16),
        ("llama-2-7b", 6_738_415_616, torch.bfloat16),
        ("llama-3-8b", 8_030_261_248, torch.bfloat16),
        ("llama-2-70b", 68_976_648_192, torch.bfloat16),
    ],
)
def test_the_known_ones_are_what_they_are_called(
    name: str, parameters: int, dtype: torch.dtype
) -> None:
    found = list(build_model(name).module.parameters())
    assert sum(p.numel() for p in found) == parameters
    assert {p.dtype for p in found} == {dtype}
    assert all(p.is_meta for p in found)


def test_ties_are_kept_and_dtypes_asked_for() -> None:
    model = build_model("gpt2", torch.bfloat16).module
    assert aliases_of(model) == {"transformer.wte.weight": ["lm_head.weight"]}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_configuration_is_a_file_or_its_folder(tmp_path: Path) -> None:
    given = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(given), encoding="utf-8")
    counts = {
        sum(p.numel() for p in build_model(str(path)).module.parameters())
        for path in (tmp_path, tmp_path / "config.json")
    }
    assert len(counts) == 1


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))


def test_a_function_builds_any_module() -> None:
    model = build_model(f"{__name__}:build").module
    assert [tuple(p.shape) for p in model.parameters()] == [(4, 3), (4,), (5, 4), (5,)]
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no-such-model", "none of gpt2"),
        ("no_such_module:build", "No module named"),
        ("torch.nn:no_such_function", "no attribute"),
        ("builtins:dict", "returned dict, no nn.Module"),
        ("torch.nn:Flatten", "no parameters"),
    ],
)
def test_what_is_no_model_is_refused(name: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        build_model(name)


@pytest.mark.parametrize("text", ["no JSON", "[]", "{}", '{"model_type": "no-such-type"}'])
def test_what_is_no_configuration_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(OptionError, match="was given"):
        build_model(str(file))
