"""`opt.step` of the seed example (GPT-2, 124M parameters), everything in RAM."""

from collections.abc import Iterator

import torch

from benchmarks.measure import Figure, Settings, at_most, interleave, ratio, use_all_cores
from tensorstow.optim.adam import AdamW

_STEPS_PER_PAIR = 3


def gpt2_shapes(
    *, layers: int = 12, width: int = 768, vocabulary: int = 50257, positions: int = 1024
) -> list[tuple[int, ...]]:
    """Return the shapes of GPT-2's parameters in order; by default those of the small one."""
    w = width
    norm: list[tuple[int, ...]] = [(w,), (w,)]
    attention: list[tuple[int, ...]] = [(w, 3 * w), (3 * w,), (w, w), (w,)]
    mlp: list[tuple[int, ...]] = [(w, 4 * w), (4 * w,), (4 * w, w), (w,)]
    return [(vocabulary, w), (positions, w), *(norm + attention + norm + mlp) * layers, *norm]


def figures(settings: Settings) -> Iterator[Figure]:
    """Step two copies of the parameters in turns, ours and torch's."""
    use_all_cores()
    shapes = gpt2_shapes(layers=1, width=16, vocabulary=64) if settings.quick else gpt2_shapes()
    ours, theirs = _parameters(shapes), _parameters(shapes)
    our_optimizer = AdamW(ours, lr=1e-3, weight_decay=0.0)
    torch_optimizer = torch.optim.AdamW(theirs, lr=1e-3, weight_decay=0.0, fused=True)
    samples = interleave(
        {"ours": our_optimizer.step, "torch fused": torch_optimizer.step},
        settings.pairs * _STEPS_PER_PAIR,
    )
    figure = ratio(
        "opt.step of the seed example in RAM: time / torch fused",
        at_most(1.05),
        samples,
        "ours",
        "torch fused",
    )
    figure.detail["parameters"] = sum(p.numel() for p in ours)
    figure.detail["tensors"] = len(ours)
    yield figure


def _parameters(shapes: list[tuple[int, ...]]) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for shape in shapes:
        parameter = torch.nn.Parameter(torch.empty(shape).uniform_(-0.1, 0.1, generator=generator))
        parameter.grad = torch.empty(shape).uniform_(-0.01, 0.01, generator=generator)
        parameters.append(parameter)
    return parameters
