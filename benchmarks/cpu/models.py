"""GPT-2, and small models of many kinds with a loss: what the planner's bytes are compared on."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Loss = Callable[[nn.Module], torch.Tensor]
SMALL = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 512}
"""Sizes of GPT-2 for a quick run."""
_TOKENS = (2, 64)


def gpt2(**sizes: Any) -> Any:  # noqa: ANN401  # transformers', which is optional
    """Return GPT-2 with a language model's head, the same at each call."""
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**sizes))


class _Level(nn.Module):
    """One level of a U-Net: halves the image, goes a level deeper, doubles it, and joins both."""

    def __init__(self, channels: int, inner: nn.Module | None) -> None:
        super().__init__()
        wide = 2 * channels
        self.down = nn.Sequential(nn.Conv2d(channels, wide, 3, 2, 1), nn.GroupNorm(8, wide))
        self.inner = inner if inner is not None else nn.Conv2d(wide, wide, 3, 1, 1)
        self.up = nn.ConvTranspose2d(wide, channels, 2, 2)
        self.join = nn.Conv2d(wide, channels, 3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(self.inner(functional.silu(self.down(x))))
        return functional.silu(self.join(torch.cat([x, up], 1)))


def _unet() -> tuple[nn.Module, Loss]:
    levels = _Level(64, _Level(128, _Level(256, None)))
    model = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1), levels, nn.Conv2d(64, 3, 1))
    x = torch.ones(2, 3, 64, 64)
    return model, lambda m: functional.mse_loss(m(x), x)


def _vit() -> tuple[nn.Module, Loss]:
    from transformers import ViTConfig, ViTForImageClassification  # noqa: PLC0415  # optional

    shape = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6}
    model = ViTForImageClassification(ViTConfig(**shape, num_hidden_layers=8, num_labels=1000))
    pixels, labels = torch.ones(2, 3, 224, 224), torch.tensor([1, 2])
    return model, lambda m: m(pixel_values=pixels, labels=labels).loss


def _bert() -> tuple[nn.Module, Loss]:
    from transformers import BertConfig, BertForMaskedLM  # noqa: PLC0415

    shape = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6}
    return _of_tokens(BertForMaskedLM(BertConfig(**shape, num_hidden_layers=6)))


def _mixtral() -> tuple[nn.Module, Loss]:
    from transformers import MixtralConfig, MixtralForCausalLM  # noqa: PLC0415

    config = MixtralConfig(
        vocab_size=8000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=4,
    )
    return _of_tokens(MixtralForCausalLM(config), use_cache=False)


def _t5() -> tuple[nn.Module, Loss]:
    from transformers import T5Config, T5ForConditionalGeneration  # noqa: PLC0415

    shape = {"d_model": 256, "d_kv": 32, "d_ff": 1024, "num_heads": 8, "num_layers": 4}
    config = T5Config(**shape, vocab_size=16000, decoder_start_token_id=0)
    return _of_tokens(T5ForConditionalGeneration(config))


def _lora() -> tuple[nn.Module, Loss]:
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415  # optional
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

    model = GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=384, n_head=6, vocab_size=16000))
    config = LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True)
    return _of_tokens(get_peft_model(model, config), use_cache=False)


def _of_tokens(model: nn.Module, **given: Any) -> tuple[nn.Module, Loss]:  # noqa: ANN401
    ids = torch.arange(_TOKENS[0] * _TOKENS[1]).view(_TOKENS) % 1000
    return model, lambda m: m(input_ids=ids, labels=ids, **given).loss


OTHERS: Mapping[str, Callable[[], tuple[nn.Module, Loss]]] = {
    "U-Net": _unet,
    "ViT": _vit,
    "BERT": _bert,
    "Mixtral, 4 experts": _mixtral,
    "T5": _t5,
    "GPT-2 with LoRA": _lora,
}
"""Models that ``tensorstow plan`` does not trace: their bytes are compared, not their seconds."""
