"""Small models that several tests train: one of each kind.

A test has a model of its own where the model is what it tests: one that raises, returns objects, or
leaves parameters without gradients.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class ResidualLinear(nn.Module):
    """Adds one linear layer behind a ReLU to its input."""

    def __init__(self, width: int) -> None:
        """Make a layer from ``width`` features to as many."""
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the input's shape."""
        out: Tensor = x + torch.relu(self.linear(x))
        return out


class ResidualMatrix(nn.Module):
    """Adds its input times one matrix to its input."""

    def __init__(self, width: int, seed: int) -> None:
        """Make a matrix of ``width`` rows and columns, drawn from ``seed``."""
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(width, width, generator=generator) / 16)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the input's shape."""
        out: Tensor = x + x @ self.weight
        return out


class ResidualStack(nn.Module):
    """Linear blocks one after the other, each added to what comes in."""

    def __init__(self, width: int, blocks: int) -> None:
        """Make ``blocks`` layers from ``width`` features to as many."""
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))

    def forward(self, x: Tensor, skipped: int | None = None) -> Tensor:
        """Return features of the input's shape; ``skipped``: the block that is left out."""
        for number, block in enumerate(self.blocks):
            x = x if number == skipped else x + block(x)
        return x


class ResidualMLP(nn.Module):
    """Adds a perceptron of two matrices, a tanh between them, to its input."""

    def __init__(self, width: int, hidden: int) -> None:
        """Make the matrices: ``width`` features to ``hidden`` and back, without biases."""
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the input's shape."""
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class AttentionBlock(nn.Module):
    """A transformer block, normed first: attention with one head, then a perceptron."""

    def __init__(
        self, width: int, hidden: int, *, dropout: float = 0.0, is_causal: bool = True
    ) -> None:
        """Make the layers; ``dropout``: of what attention adds, drawn from the global generator."""
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)
        )
        self.dropout = nn.Dropout(dropout)
        self.is_causal = is_causal

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the input's shape, (batch, length, width)."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + self.dropout(self.out(seen))
        out: Tensor = x + self.mlp(x)
        return out


class FeedForward(nn.Module):
    """The feed-forward half of a transformer's block: norm, two layers with GELU, added."""

    def __init__(self, width: int, *, recompute: bool = False) -> None:
        """Make a norm and layers from ``width`` features to four times as many and back.

        With ``recompute`` backward computes all but the sum again.
        """
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.recompute = recompute

    def inner(self, x: Tensor) -> Tensor:
        """Return what is added."""
        out: Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the input's shape."""
        if not self.recompute:
            return x + self.inner(x)
        added: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return x + added


class TiedModel(nn.Module):
    """Linear blocks between an embedding and a head that is tied to it."""

    def __init__(self, vocabulary: int, width: int, blocks: int = 2) -> None:
        """Make the layers."""
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, one more dimension than ``tokens`` has."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Vectors(nn.Module):
    """Vectors that are read one after the other, and so have their gradients last to first."""

    def __init__(
        self, sizes: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> None:
        """Make a parameter of each of ``sizes`` elements, drawn from ``seed``."""
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.parts = nn.ParameterList(
            [nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in sizes]
        )

    def forward(self) -> Tensor:
        """Return a loss."""
        return torch.stack([(p.float().sin() * p.float()).mean() for p in self.parts]).sum()
