"""Small models whose tensors and weights are used in several places, for parity through ``stow``.

Units are the repeated blocks, as in models of users. Each model is called with a number, which
seeds its batch, and returns the loss. Batches are on torch's default device.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, WORDS, LENGTH = 24, 19, 7


def tokens_of(batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    tokens = torch.randint(WORDS, (3, LENGTH), generator=generator, device="cpu")
    return tokens.to(torch.get_default_device())


def values_of(batch: int, *shape: int) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(batch), device="cpu")
    return values.to(torch.get_default_device())


class Attention(nn.Module):
    """Attention with a position bias."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, seen: Tensor, bias: Tensor) -> Tensor:
        # The keys come first: their products are the last in backward that need a weight.
        keys, values = self.key(seen), self.value(seen)
        scores = self.query(x) @ keys.mT + bias
        mixed: Tensor = self.out(scores.softmax(-1) @ values)
        return mixed


class Layer(nn.Module):
    """A block of an encoder, or of a decoder, which reads the encoder's output too."""

    def __init__(self, *, makes_bias: bool, decodes: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.own, self.other = Attention(), Attention() if decodes else None
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(LENGTH, LENGTH)) if makes_bias else None

    def forward(
        self, x: Tensor, bias: Tensor | None, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if bias is None:
            assert self.bias is not None
            bias = self.bias.tanh()
        x = x + self.own(self.norm(x), self.norm(x), bias)
        if self.other is not None and memory is not None:
            x = x + self.other(x, memory, bias)
        return x + self.down(self.up(x).relu()), bias


class EncoderDecoder(nn.Module):
    """Every decoder block reads the encoder's output; blocks pass a position bias on, as T5's."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)  # and the head
        self.encoder = nn.ModuleList(Layer(makes_bias=i == 0, decodes=False) for i in range(2))
        self.decoder = nn.ModuleList(Layer(makes_bias=i == 0, decodes=True) for i in range(3))

    def forward(self, batch: int) -> Tensor:
        tokens = tokens_of(batch)
        x, memory, bias = self.words(tokens), self.words(tokens.flip(1)), None
        for layer in self.encoder:
            memory, bias = layer(memory, bias)
        bias = None
        for layer in self.decoder:
            x, bias = layer(x, bias, memory)
        logits = functional.linear(x, self.words.weight)
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Twice(nn.Module):
    """A block that uses its input, and a weight, several times."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        once: Tensor = self.mix(x).tanh()
        return x + self.gain * self.mix(once) * x.sigmoid() + self.gain * once


class Repeated(nn.Module):
    """Blocks that are called again with other blocks in between, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Twice() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, batch: int) -> Tensor:
        tokens = tokens_of(batch)
        x = first = self.words(tokens)
        for _ in range(2):
            for block in self.blocks:
                x = block(x) + 0.5 * first
        logits = self.head(x)
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Checkpointed(Repeated):
    """Blocks that are computed again in backwards of their own, inside of the model's."""

    def forward(self, batch: int) -> Tensor:
        tokens = tokens_of(batch)
        x = self.words(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Residual(nn.Module):
    """A block of a U-Net: its input has two uses inside, and one as a skip connection."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, given)
        self.first, self.second = (nn.Conv2d(n, made, 3, padding=1) for n in (given, made))
        self.skip = nn.Conv2d(given, made, 1)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.second(functional.silu(self.first(functional.silu(self.norm(x)))))
        return mixed + self.skip(x)


class UNet(nn.Module):
    """Convolutions, with skip connections from blocks to blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(2, 8, 3, padding=1)
        self.down = nn.ModuleList([Residual(8, 8), Residual(8, 16)])
        self.shrink = nn.ModuleList(nn.Conv2d(n, n, 3, 2, 1) for n in (8, 16))
        self.up = nn.ModuleList([Residual(16 + 16, 16), Residual(16 + 8, 8)])
        self.leave = nn.Conv2d(8 + 8, 2, 3, padding=1)

    def forward(self, batch: int) -> Tensor:
        image = values_of(batch, 2, 2, 12, 12)
        x = entered = self.enter(image)
        skips = []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x)
            skips.append(x)
            x = shrink(x)
        for block in self.up:
            larger = functional.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([larger, skips.pop()], 1))
        return (self.leave(torch.cat([x, entered], 1)) - image).square().mean()


class Branches(nn.Module):
    """Several blocks read one tensor, as experts do, and the model reads it before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, WIDTH)
        self.branches = nn.ModuleList(Twice() for _ in range(3))
        self.gate = nn.Linear(WIDTH, 3)

    def forward(self, batch: int) -> Tensor:
        x = functional.gelu(self.enter(values_of(batch, 3, LENGTH, 4)))
        weights = self.gate(x).softmax(-1)
        mixed = [branch(x) * weights[..., i, None] for i, branch in enumerate(self.branches)]
        return (x * torch.stack(mixed).sum(0) + x).square().mean()


class NoInputGradients(nn.Module):
    """Blocks whose inputs need no gradients: data, or what a frozen block returns."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Twice() for _ in range(4))
        self.blocks[0].requires_grad_(requires_grad=False)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, batch: int) -> Tensor:
        given = values_of(batch, 3, WIDTH)
        seen = self.blocks[0](given)
        x = self.blocks[1](seen) + self.blocks[2](given)
        x = x + self.blocks[3](x.detach()) * x
        return self.head(x).square().mean()


ARCHITECTURES: Mapping[str, Callable[[], nn.Module]] = {
    "encoder-decoder": EncoderDecoder,
    "repeated": Repeated,
    "u-net": UNet,
    "branches": Branches,
    "no input gradients": NoInputGradients,
}


def t5() -> nn.Module:
    """Return transformers' encoder-decoder with a position bias."""
    from transformers import T5Config, T5ForConditionalGeneration  # noqa: PLC0415  # seconds

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=WORDS, decoder_start_token_id=0, dropout_rate=0.0, **sizes)
    )


def whisper() -> nn.Module:
    """Return transformers' encoder-decoder behind convolutions."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration  # noqa: PLC0415

    layers = {"encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 6, "d_model": 32}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    widths = {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_source_positions": LENGTH}
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=WORDS, decoder_start_token_id=0, **layers, **heads, **widths, **ends
        )
    )


class OfTransformers(nn.Module):
    """A model of transformers that is called like the others here."""

    def __init__(
        self, make: Callable[[], nn.Module], given: Callable[[int], dict[str, Tensor]]
    ) -> None:
        super().__init__()
        self.inner = make()
        self.given = given

    def forward(self, batch: int) -> Tensor:
        loss: Tensor = self.inner(**self.given(batch), labels=tokens_of(batch)).loss
        return loss


OF_TRANSFORMERS: Mapping[str, Callable[[], nn.Module]] = {
    "t5": lambda: OfTransformers(t5, lambda batch: {"input_ids": tokens_of(batch)}),
    "whisper": lambda: OfTransformers(
        whisper, lambda batch: {"input_features": values_of(batch, 3, 6, 2 * LENGTH)}
    ),
}
