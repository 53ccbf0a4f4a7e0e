"""`opt.step` of the seed example (GPT-2, 124M parameters), everything in RAM."""

from collections.abc import Iterator

import torch

from benchmarks.measure import Figure, Settings, at_most, interleave, ratio, use_all_cores
from tensorstow.optim.adam import AdamW

_STEPS_PER_PAIR = 3
_SIZES = (
    *((1, 16), (1, 1 << 16), (1, 1 << 20), (1, 1 << 23), (1, 1 << 26)),
    *((200, 1000), (200, 1 << 16), (16, 1 << 20), (20_000, 16)),
)
"""Tensors, and elements of each."""
_MARGIN = 20e-6
"""Seconds that a step may take longer than torch's, where these are more than a twentieth."""
_MOST_TURNS = 60
_ELEMENTS, _OVERHEAD = 1 << 29, 1 << 13
"""Those stepped in all, as if each tensor had some more."""


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
    """Step two copies of parameters in turns, ours and torch's: of the seed example, and others."""
    use_all_cores()
    yield _seed_example(settings)
    for count, elements in _SIZES[:2] if settings.quick else _SIZES:
        yield _step_of(count, elements, settings)


def _seed_example(settings: Settings) -> Figure:
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
    return figure


def _step_of(count: int, elements: int, settings: Settings) -> Figure:
    ours, theirs = _parameters([(elements,)] * count), _parameters([(elements,)] * count)
    our_optimizer = AdamW(ours, lr=1e-3)
    torch_optimizer = torch.optim.AdamW(theirs, lr=1e-3, fused=True)
    turns = max(settings.pairs, min(_MOST_TURNS, _ELEMENTS // (count * (elements + _OVERHEAD))))
    steps = {"ours": our_optimizer.step, "torch fused": torch_optimizer.step}
    samples = interleave(steps, turns)
    our_optimizer.close()
    seconds = samples["torch fused"].median
    return ratio(
        f"opt.step in RAM, tensors x elements {count:,} x {elements:,}: time / torch fused",
        at_most(round(max(1.05, 1 + _MARGIN / seconds), 2)),
        samples,
        "ours",
        "torch fused",
    )


def _parameters(shapes: list[tuple[int, ...]]) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for shape in shapes:
        parameter = torch.nn.Parameter(torch.empty(shape).uniform_(-0.1, 0.1, generator=generator))
        parameter.grad = torch.empty(shape).uniform_(-0.01, 0.01, generator=generator)
        parameters.append(parameter)
    return parameters
