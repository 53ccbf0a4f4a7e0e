"""Training in every state format beside fp32: the same task, the same data."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tensorstow.formats.reference import FormattedStates, adam_reference_in_format, adam_scalars
from tensorstow.formats.state_format import StateFormat, streams_of

STEPS = 200


class Trainer:
    """AdamW in a format, on the flat parameters of a model."""

    def __init__(self, model: nn.Module, format_: StateFormat) -> None:
        self.parameters = list(model.parameters())
        self.kept = [self.blank(p, format_) for p in self.parameters]

    @staticmethod
    def blank(parameter: Tensor, format_: StateFormat) -> FormattedStates:
        specs = streams_of(parameter.dtype, format_, amsgrad=False)
        streams = [torch.zeros(-(-parameter.numel() // s.per), dtype=s.dtype) for s in specs]
        return FormattedStates(streams, format_, amsgrad=False)

    @torch.no_grad()
    def step(self, number: int, lr: float) -> None:
        scalars = adam_scalars(
            lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, step=number, decoupled=True
        )
        for index, (parameter, kept) in enumerate(zip(self.parameters, self.kept, strict=True)):
            assert parameter.grad is not None
            adam_reference_in_format(
                parameter.view(-1),
                parameter.grad.view(-1),
                kept,
                scalars,
                key=(index << 32) | number,
                seed_master=number == 1,
            )
            parameter.grad = None


def curve(format_: StateFormat, dtype: torch.dtype) -> list[float]:
    """Fit a small network to another one, noise in its gradients; return the clean losses."""
    random = torch.Generator().manual_seed(11)

    def network(width: int) -> nn.Sequential:
        layers = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 8))
        for p in layers.parameters():
            p.data = torch.randn(p.shape, generator=random) / p.shape[-1] ** 0.5
        return layers

    teacher, student = network(64), network(96).to(dtype)
    trainer = Trainer(student, format_)
    losses = []
    for number in range(1, STEPS + 1):
        x = torch.randn(64, 16, generator=random)
        with torch.no_grad():
            y = teacher(x)
        loss: Tensor = (student(x.to(dtype)).float() - y).square().mean()
        loss.backward()
        trainer.step(number, lr=3e-3 * (1 - number / STEPS) + 1e-5)
        losses.append(loss.item())
    return losses


def tail(losses: list[float]) -> float:
    return sum(losses[-50:]) / 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_format_learns_as_well_as_fp32(dtype: torch.dtype) -> None:
    wanted = curve(StateFormat.FP32, dtype)
    assert tail(wanted) < 0.1 * wanted[0]
    assert curve(StateFormat.SPLIT, dtype) == wanted
    for format_ in (StateFormat.BF16, StateFormat.INT8):
        assert tail(curve(format_, dtype)) == pytest.approx(tail(wanted), rel=0.01)


def test_it_settles_where_fp32_settles() -> None:
    """A quadratic of a thousand curvatures; at the end only rounding is left."""

    def distance(format_: StateFormat, move: Callable[[Tensor], Tensor]) -> float:
        x = nn.Parameter(torch.full((1024,), 1.0))
        holder = nn.ParameterList([x])
        trainer = Trainer(holder, format_)
        for number in range(1, 601):
            x.grad = move(x.detach())
            trainer.step(number, lr=1e-2 * (1 - number / 601) ** 2)
        return (x - 0.5).abs().max().item()

    curvature = torch.logspace(-3, 3, 1024)
    for format_ in StateFormat:
        assert distance(format_, lambda x: curvature * (x - 0.5)) < 0.02
