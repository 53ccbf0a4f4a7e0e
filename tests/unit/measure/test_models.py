"""Models by name: on the meta device, with the parameters that the real ones have."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.fsdp.units import aliases_of
from tensorstow.measure.models import build_model, is_causal
from tensorstow.measure.user_code import UserCodeError

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


def test_the_loss_is_named_that_transformers_would_warn_of() -> None:
    assert build_model("gpt2").module.loss_type == "ForCausalLM"


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


def with_arguments() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return build(), (torch.ones(2, 3),)


def with_keywords() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return build(), {"input": torch.ones(2, 3)}


def test_a_function_may_return_the_arguments_of_forward() -> None:
    found = build_model(f"{__name__}:with_arguments").inputs
    assert found is not None
    (positional,), named = found
    assert (positional.shape, named) == ((2, 3), {})
    found = build_model(f"{__name__}:with_keywords").inputs
    assert found is not None
    assert (found[0], list(found[1])) == ((), ["input"])
    assert build_model(f"{__name__}:build").inputs is None


def test_a_function_is_found_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from torch import nn\ndef make(): return nn.Linear(2, 2)\n"
    (tmp_path / "a_module_of_a_user.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert isinstance(build_model("a_module_of_a_user:make").module, nn.Linear)


def test_what_a_module_raises_is_shown_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    broken = {
        "a_broken_one": ("x = 1\n1 / 0\n", "ZeroDivisionError", "line 2"),
        "one_that_lacks": ("import no_such_thing_here\n", "ModuleNotFoundError", "line 1"),
        "one_that_is_none": ("def make(:\n", "SyntaxError", "line 1"),
    }
    for name, (text, kind, line) in broken.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        with pytest.raises(UserCodeError) as caught:
            build_model(f"{name}:make")
        assert caught.value.kind == kind
        assert f"MODEL='{name}:make' raised an error:" in str(caught.value)
        assert f'{name}.py", {line}' in str(caught.value)
        assert str(caught.value).splitlines()[-1].startswith(f"{kind}: ")


def raises() -> nn.Module:
    message = "first\nsecond"
    raise KeyError(message)


def reads_a_value() -> nn.Module:
    return nn.Linear(int(torch.ones(()).item()), 2)


def test_what_a_function_raises_is_shown_with_advice_if_a_value_was_read() -> None:
    with pytest.raises(UserCodeError, match=r"in raises\n    raise KeyError") as caught:
        build_model(f"{__name__}:raises")
    assert caught.value.kind == "KeyError"
    assert "meta" not in str(caught.value)
    with pytest.raises(UserCodeError, match=r"meta.*where tensors have no values.*\.item\(\)"):
        build_model(f"{__name__}:reads_a_value")


@pytest.mark.parametrize(
    "name", ["openai-community/gpt2", "GPT2", "meta-llama/Llama-3.2-1B-Instruct"]
)
def test_names_of_the_hub_are_known(name: str) -> None:
    short = "llama-3.2-1b" if "lama" in name else "gpt2"
    sizes = [[p.shape for p in build_model(each).module.parameters()] for each in (name, short)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("kind", ["vit", "t5"])
def test_a_configuration_without_a_causal_model_is_taken(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    given = {"vit": {"hidden_size": 16, "intermediate_size": 32}, "t5": {"d_model": 16, "d_ff": 32}}
    layers = {"num_hidden_layers": 1, "num_layers": 1, "num_attention_heads": 2, "num_heads": 2}
    text = {"model_type": kind, **given[kind], **layers, "vocab_size": 8}
    file.write_text(json.dumps(text), encoding="utf-8")
    model = build_model(str(file))
    assert not is_causal(model.config)
    assert sum(p.numel() for p in model.module.parameters()) > 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no-such-model", "none of gpt2"),
        ("no_such_module:build", "No module named"),
        ("llama-3-8", r"Did you mean llama-3-8b\?"),
        ("torch.nn:no_such_function", "torch.nn has no no_such_function"),
        ("torch.nn:Linea", r"Did you mean Linear\?"),
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
