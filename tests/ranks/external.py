"""A model whose second block uses a weight of its first, on every rank."""

import torch
from torch import nn

import tensorstow.deepspeed as deepspeed
from tensorstow.base.errors import OptionError
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


class Encoding(nn.Module):
    """Blocks of which a method other than forward is called, or a weight is read."""

    def __init__(self, *, reads: bool) -> None:
        """Make the blocks."""
        super().__init__()
        self.blocks = nn.ModuleList(Borrowing() for _ in range(2))
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a sum."""
        for block in self.blocks:
            x = block(x, None) * block.linear.bias if self.reads else block.linear(x)
        return x.square().sum()


def used_outside_of_blocks(config: dict[str, object]) -> list[str]:
    """Return what is said where the use is not registered, and where it is."""
    said = []
    for reads in (True, False):
        for is_registered in (False, True):
            model = Encoding(reads=reads)
            for block in model.blocks if is_registered else ():
                zero.register_external_parameter(model, block.linear.bias)
            engine, *_ = deepspeed.initialize(model=model, config=config)
            try:
                engine.backward(engine(torch.ones(2, WIDTH)))
                engine.step()
                said.append("")
            except OptionError as error:
                said.append(str(error))
            engine.destroy()
    return said
