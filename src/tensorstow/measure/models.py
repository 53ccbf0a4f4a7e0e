"""Builds the model that a command line names, on the meta device."""

import importlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensorstow.base.errors import OptionError

_GPT2 = {"model_type": "gpt2"}
_LLAMA: dict[str, Any] = {"model_type": "llama", "dtype": "bfloat16"}
KNOWN: Mapping[str, Mapping[str, Any]] = {
    "gpt2": _GPT2,
    "gpt2-medium": {**_GPT2, "n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-large": {**_GPT2, "n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2-xl": {**_GPT2, "n_embd": 1600, "n_layer": 48, "n_head": 25},
    "llama-3.2-1b": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "llama-2-7b": {**_LLAMA},
    "llama-3-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "llama-2-13b": {
        **_LLAMA,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
    "llama-2-70b": {
        **_LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "llama-3-70b": {
        **_LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}
"""Configurations as transformers reads them, by the names that people use."""


@dataclass(frozen=True, eq=False, slots=True)
class NamedModel:
    """A model on the meta device, with its name."""

    name: str
    module: nn.Module
    config: Any = None
    """Transformers' configuration; None: a function built the model."""


def build_model(name: str, dtype: torch.dtype | None = None) -> NamedModel:
    """Return the model called ``name``, on the meta device.

    Args:
        name: A name of KNOWN; a configuration of transformers, as a file or the folder of a
            ``config.json``; or ``module:function``, which is called without arguments.
        dtype: Of floating point parameters; None: as the configuration or the function has it.

    Raises:
        OptionError: It is no model, or transformers is needed and not installed.
    """
    path = Path(name)
    if name in KNOWN:
        found = _from_config(name, dict(KNOWN[name]), dtype)
    elif path.is_dir() or path.is_file():
        found = _from_config(name, _read(path), dtype)
    elif ":" in name:
        found = NamedModel(name, _call(name))
    else:
        message = (
            f"MODEL={name!r} was given: it is none of {', '.join(KNOWN)}, no file or folder that"
            " is there, and no module:function."
        )
        raise OptionError(message)
    if dtype is not None:
        found.module.to(dtype)
    if not any(p.numel() for p in found.module.parameters()):
        message = f"MODEL={name!r} was given, which has no parameters: there is nothing to place."
        raise OptionError(message)
    return found


def from_config(config: Any, device: str = "meta") -> nn.Module:  # noqa: ANN401
    """Return a causal language model of transformers.

    Args:
        config: A configuration of transformers.
        device: Where its parameters are made.

    Raises:
        OptionError: transformers cannot build it.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  # optional

    try:
        with torch.device(device):
            build: Any = AutoModelForCausalLM.from_config
            model: nn.Module = build(config)
    except (ValueError, TypeError, AttributeError) as error:
        message = f"No model could be made of the configuration: {error}"
        raise OptionError(message) from error
    return model


def _from_config(name: str, given: dict[str, Any], dtype: torch.dtype | None) -> NamedModel:
    try:
        from transformers import AutoConfig  # noqa: PLC0415  # optional
    except ImportError as error:
        message = (
            f"MODEL={name!r} was given, which transformers builds, and it is not installed:"
            " `pip install transformers`, or name a module:function."
        )
        raise OptionError(message) from error
    kind = given.pop("model_type", None)
    if not isinstance(kind, str):
        message = f"MODEL={name!r} was given: its configuration says no model_type."
        raise OptionError(message)
    try:
        config = AutoConfig.for_model(kind, **given)
    except (ValueError, TypeError, KeyError) as error:
        message = f"MODEL={name!r} was given: transformers does not take it: {error}"
        raise OptionError(message) from error
    if dtype is not None:
        config.dtype = dtype
    return NamedModel(name, from_config(config), config)


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"MODEL={str(path)!r} was given: {file} is no configuration: {error}."
        raise OptionError(message) from error
    if not isinstance(given, dict):
        message = f"MODEL={str(path)!r} was given: {file} is no JSON object."
        raise OptionError(message)
    return given


def _call(name: str) -> nn.Module:
    where, _, function = name.partition(":")
    try:
        build = getattr(importlib.import_module(where), function)
    except (ImportError, AttributeError) as error:
        message = f"MODEL={name!r} was given: {error}."
        raise OptionError(message) from error
    with torch.device("meta"):
        model = build()
    if inspect.isclass(model) or not isinstance(model, nn.Module):
        message = f"MODEL={name!r} was given: it returned {type(model).__name__}, no nn.Module."
        raise OptionError(message)
    return model
