"""A plain decoder in bf16, of sizes that need no download."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a model and its sequences are."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    """Tokens of a sequence."""
    recomputes: bool = False
    """Whether backward computes each block's activations again instead of keeping them."""


SHAPES = {
    "1B": Shape(layers=18, width=2048, heads=16, vocabulary=32_000, length=1024),
    "3B": Shape(layers=36, width=2560, heads=20, vocabulary=32_000, length=1024, recomputes=True),
    "8B": Shape(layers=38, width=4096, heads=32, vocabulary=32_000, length=1024, recomputes=True),
}
"""1.04, 3.0 and 7.9 billion parameters."""
TINY = Shape(layers=3, width=64, heads=2, vocabulary=256, length=16)


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm."""

    def __init__(self, shape: Shape) -> None:
        """Make the layers."""
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.before = nn.LayerNorm(width)
        self.between = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to the stream, (sequences, tokens, width)."""
        rows, length, width = x.shape
        heads = self.qkv(self.before(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        out: torch.Tensor = x + self.down(functional.gelu(self.up(self.between(x))))
        return out


class Decoder(nn.Module):
    """Blocks between an embedding and a head; returns the loss of the next tokens."""

    def __init__(self, shape: Shape) -> None:
        """Make the blocks, the same at each call."""
        super().__init__()
        torch.manual_seed(0)
        self.recomputes = shape.recomputes
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for embedding in (self.embedding, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.to(torch.bfloat16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of ``ids``, (sequences, tokens)."""
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.embedding(ids) + self.positions(places)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        logits = self.head(self.norm(x))[:, :-1].flatten(0, 1)
        loss: torch.Tensor = functional.cross_entropy(logits.float(), ids[:, 1:].flatten())
        return loss


def made_by(device: torch.device, shape: Shape) -> Decoder:
    """Return a model in host memory; ``device`` draws its numbers, which takes the CPU minutes."""
    with torch.device("meta"):
        model = Decoder(shape)
    model.to_empty(device=device)
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Linear | nn.LayerNorm):
            module.reset_parameters()
    return model.to("cpu")


def elements_of(model: nn.Module) -> int:
    """Return how many numbers a model's parameters have."""
    return sum(p.numel() for p in model.parameters())
