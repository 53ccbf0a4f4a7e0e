"""The model to verify: a small transformer, a named model cut down, or the user's own."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.fsdp.traced_activations import loss_of
from tensorstow.measure.models import (
    Inputs,
    build_model,
    call_function,
    from_config,
    is_causal,
    moved_to,
)

_BATCH, _SEQUENCE = 2, 32
_WIDTH = 256
_LAYERS = 2
_VOCABULARY = 2048
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that can be rebuilt with the same values each time, and its inputs."""

    name: str
    note: str
    """A sentence about what was cut; empty: nothing."""
    dtypes: tuple[str, ...]
    """Names of the parameters' dtypes to verify."""
    build: Callable[[], nn.Module]
    inputs: Callable[[nn.Module], Inputs]
    """Function that makes a batch from torch's random numbers."""

    def make(self, dtype: str, device: torch.device) -> nn.Module:
        """Return the model in training mode, with the same values each time."""
        torch.manual_seed(0)
        return self.build().to(device=device, dtype=_DTYPES[dtype]).train()

    def loss(self, module: nn.Module, step: int) -> torch.Tensor:
        """Return the loss of a step; batch and dropout are drawn from the step's own seed."""
        torch.manual_seed(1_000 + step)
        parameter = next(module.parameters())
        positional, keywords = moved_to(self.inputs(module), parameter.device, parameter.dtype)
        output = module(*positional, **keywords)
        return loss_of(output)


class SmallTransformer(nn.Module):
    """Two blocks with dropout, and a head that shares the embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, batch_first=True)
            for _ in range(_LAYERS)
        )
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of the next token."""
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden)) / math.sqrt(_WIDTH)
        return nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
        )


def subject_of(name: str | None) -> Subject:
    """Return the model to verify."""
    if name is None:
        return Subject(
            "a small transformer",
            "",
            tuple(_DTYPES),
            SmallTransformer,
            lambda _: ((torch.randint(_VOCABULARY, (_BATCH, _SEQUENCE)),), {}),
        )
    named = None if _is_function(name) else build_model(name)
    if named is None or named.config is None:
        return _of_function(name)
    if not is_causal(named.config):
        message = (
            f"--model {name} was given, which is no causal language model, so that its batches are"
            " not known: name a module:function that returns the model and the arguments of its"
            " forward."
        )
        raise OptionError(message)
    config, note = _cut(named.config)

    def inputs(_: nn.Module) -> Inputs:
        ids = torch.randint(config.vocab_size, (_BATCH, _SEQUENCE))
        return (), {"input_ids": ids, "labels": ids, "use_cache": False}

    def build() -> nn.Module:
        return from_config(config, "cpu")

    return Subject(name, note, tuple(_DTYPES), build, inputs)


def _is_function(name: str) -> bool:
    module, _, function = name.partition(":")
    return bool(function) and all(part.isidentifier() for part in [*module.split("."), function])


def _of_function(name: str) -> Subject:
    module, call_inputs = call_function(name, "--model")
    dtype = next((p.dtype for p in module.parameters()), None)
    names = tuple(label for label, known_dtype in _DTYPES.items() if known_dtype == dtype)
    if not names:
        message = (
            f"--model {name} was given, whose parameters are {dtype}: fp32 and bf16 are verified."
        )
        raise OptionError(message)
    inputs = _guessed(module, name) if call_inputs is None else lambda _: call_inputs
    return Subject(name, "", names, lambda: call_function(name, "--model")[0], inputs)


def _guessed(module: nn.Module, name: str) -> Callable[[nn.Module], Inputs]:
    """Return a function that makes batches for the first layer of a module."""
    for layer in module.modules():
        if isinstance(layer, nn.Embedding):
            count = layer.num_embeddings
            return lambda _: ((torch.randint(count, (_BATCH, _SEQUENCE)),), {})
        if isinstance(layer, nn.Linear):
            width = layer.in_features
            return lambda _: ((torch.randn(_BATCH, width),), {})
        if isinstance(layer, nn.Conv2d):
            channels = layer.in_channels
            return lambda _: ((torch.randn(_BATCH, channels, _SEQUENCE, _SEQUENCE),), {})
    message = (
        f"--model {name} was given, whose first layer does not show what it takes: return the"
        " module and the arguments of its forward, `return model, (batch,)`."
    )
    raise OptionError(message)


def _cut(config: Any) -> tuple[Any, str]:  # noqa: ANN401  # transformers' own
    """Return a configuration of two narrow layers, and a sentence about the cut."""
    heads, width = config.num_attention_heads, config.hidden_size
    size = getattr(config, "head_dim", None) or width // heads
    fewer = max(1, min(heads, _WIDTH // size))
    narrow = fewer * (width // heads)
    changed: dict[str, Any] = {
        "num_hidden_layers": min(_LAYERS, config.num_hidden_layers),
        "num_attention_heads": fewer,
        "hidden_size": narrow,
        "vocab_size": min(_VOCABULARY, config.vocab_size),
    }
    shared = getattr(config, "num_key_value_heads", None)
    if shared is not None:
        # Query heads must be a multiple of these.
        changed["num_key_value_heads"] = fewer if shared == heads else math.gcd(shared, fewer)
    inner = getattr(config, "intermediate_size", None)
    if inner is not None:
        changed["intermediate_size"] = max(8, inner * narrow // width // 8 * 8)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        changed["layer_types"] = kinds[: changed["num_hidden_layers"]]
    was = f"{config.num_hidden_layers} layers of width {width}"
    for name, value in changed.items():
        setattr(config, name, value)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if isinstance(getattr(config, name, None), int):  # it may lie beyond the cut vocabulary
            setattr(config, name, config.vocab_size - 1)
    config.dtype = torch.float32
    note = (
        f"cut from {was} to {config.num_hidden_layers} of {narrow}, {config.vocab_size} tokens,"
        " so that it trains in a minute"
    )
    return config, note
