"""A model whose second block uses a weight of its first, on every rank."""

import torch
from torch import nn

import tensorstow.deepspeed as deepspeed
from tensorstow.deepspeed import zero

WIDTH = 6


class Borrowing(nn.Module):
    """A block that computes with a weight of its own, or with another block's too."""

    def __init__(self) -> None:
        """Make a layer."""
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Apply both."""
        x = torch.tanh(self.linear(x))
        return x if weight is None else x @ weight


class Chain(nn.Module):
    """Three blocks, of which the last uses a weight of the first."""

    def __init__(self) -> None:
        """Make the blocks."""
        super().__init__()
        self.blocks = nn.ModuleList(Borrowing() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a sum."""
        x = self.blocks[1](self.blocks[0](x, None), None)
        return self.blocks[2](x, self.blocks[0].linear.weight).square().sum()


def trained_with_an_external_weight(config: dict[str, object]) -> list[torch.Tensor]:
    """Train three steps; return the weights in fp32, by a plain loop without a configuration."""
    torch.manual_seed(5)
    model = Chain()
    x = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)
    if not config:
        plain = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
        for _ in range(3):
            plain.zero_grad()
            model(x).backward()
            plain.step()
        return [p.detach() for p in model.parameters()]
    zero.register_external_parameter(model.blocks[2], model.blocks[0].linear.weight)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for _ in range(3):
        engine.backward(engine(x))
        engine.step()
    found = []
    for parameter in engine.module.parameters():
        with zero.GatheredParameters([parameter]):
            found.append(parameter.data.clone())
    engine.destroy()
    return found
