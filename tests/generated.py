"""Models that are only read, each beside the model in memory: the axes, and what both compute."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import tensorstow
from parity.cover import Row
from tensorstow import Budget, Plan

WORDS, NEW = 96, 3
AXES = {
    "where": ("disk", "host", "mixed", "small budget", "large budget"),
    "prefetch": (0, 2, 9),
    "dtype": ("fp32", "bf16", "fp16", "cast"),
    "tied": (False, True),
    "files": ("one", "sharded"),
    "batch": (1, 3),
    "call": ("forward", "generate", "beams"),
    "mode": ("grad", "no_grad", "inference"),
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MODES: Mapping[str, Any] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def allowed(row: Mapping[str, Any]) -> bool:
    """Return whether a (partial) row can be asked for: a budget chooses what is read ahead."""
    return "budget" not in row.get("where", "") or row.get("prefetch", 2) == 2


def made(row: Row, dtype: torch.dtype) -> Any:  # noqa: ANN401  # another library's
    """Return the row's model, of Llama's shape."""
    from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: PLC0415  # takes seconds

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=WORDS,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=row["tied"],
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def both(row: Row, folder: Path, device: torch.device) -> tuple[list[torch.Tensor], ...]:
    """Return what the model in memory computes, and what the one does that is only read."""
    stored = _DTYPES.get(str(row["dtype"]), torch.float32)
    computed = _DTYPES.get(str(row["dtype"]), torch.bfloat16)
    torch.manual_seed(0)
    saved = made(row, stored)
    saved.save_pretrained(folder, max_shard_size="1GB" if row["files"] == "one" else "20KB")
    # torch.matmul takes another kernel for strided rows times a weight that requires a gradient.
    whole = made(row, computed).requires_grad_(requires_grad=False)
    whole.load_state_dict(saved.state_dict())
    with torch.device("meta"):
        model = made(row, computed)
    nbytes = sum(p.nbytes for p in whole.parameters())
    where, ahead = row["where"], int(row["prefetch"])
    given: dict[str, Any]
    if where == "small budget":
        # Of the largest unit's buffers, cast and as they are stored, and of little more.
        given = {"budget": Budget(host=nbytes * 3 // 4 + 65536, device=nbytes // 2 + 32768)}
    elif where == "large budget":
        given = {"budget": Budget(host=9 * nbytes, device=9 * nbytes)}
    elif where == "mixed":
        units = {"model.layers.1": "host", "lm_head": "host", "model.norm": "device"}
        if row["tied"]:
            units.pop("lm_head")
        given = {"plan": Plan(parameters="disk", prefetch=ahead, parameter_units=units)}
    else:
        given = {"plan": Plan(parameters=where, prefetch=ahead)}
    model, _ = tensorstow.stow(model, None, weights=folder, **given)
    tokens = torch.randint(1, WORDS, (int(row["batch"]), 5)).to(device)
    with _MODES[str(row["mode"])]():
        return tuple(_called(row, each, tokens) for each in (whole.to(device), model))


def _called(row: Row, model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:  # noqa: ANN401
    if row["call"] == "forward":
        return [model(tokens).logits.detach().cpu() for _ in range(2)]
    told = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        num_beams=2 if row["call"] == "beams" else 1,
    )
    return [told.sequences.cpu(), *(each.cpu() for each in told.logits)]
