"""`opt.step` with everything in RAM, ours and torch's fused one, each in a process of its own.

The processes take turns. A step alone is repeated with the same gradients: of one tensor up to many
small ones, and of the seed example (GPT-2, 124M parameters). In a training loop it comes after a
backward, whose OpenMP threads still poll for work then.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.measure import (
    Figure,
    Sample,
    Settings,
    at_most,
    in_turns,
    ratio,
    run_alone,
    use_all_cores,
)
from tensorstow.optim.adam import AdamW

_OURS, _TORCH = "ours", "torch fused"
_SIZES = (
    *((1, 16), (1, 1 << 16), (1, 1 << 20), (1, 1 << 23), (1, 1 << 26)),
    *((200, 1000), (200, 1 << 16), (16, 1 << 20), (20_000, 16)),
)
"""Tensors, and elements of each."""
_LOOPS = ((512, 4), (1024, 8), (2048, 8))
"""The width and the number of linear layers."""
_LOOP_BATCH = 64
_MARGIN = 20e-6
"""Seconds that a step may take longer than torch's, where these are more than a twentieth."""
_SECONDS, _QUICK_SECONDS = 0.5, 0.02
"""How long a step is repeated in one process, after a fifth of that."""
_FEWEST_STEPS, _MOST_TURNS = 5, 7
_Repeat = Callable[[Callable[[], object]], list[float]]


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
    """Run both in turns; yield the steps alone, and those of training loops."""
    run = partial(run_alone, "benchmarks.cpu.optimizer", quick=settings.quick)
    runs = in_turns((_OURS, _TORCH), min(settings.pairs, _MOST_TURNS), run)
    for what in runs[_OURS][0]:
        samples = {
            name: Sample(tuple(run[what] for run in of_name)) for name, of_name in runs.items()
        }
        limit = at_most(round(max(1.05, 1 + _MARGIN / samples[_TORCH].median), 2))
        yield ratio(f"{what}: time / torch fused", limit, samples, _OURS, _TORCH)


# --- the child ---


def _measure(name: str, *, quick: bool) -> dict[str, float]:
    use_all_cores()
    seconds, repeat = {}, partial(_times, seconds=_QUICK_SECONDS if quick else _SECONDS)
    shapes = gpt2_shapes(layers=1, width=16, vocabulary=64) if quick else gpt2_shapes()
    seconds["opt.step of the seed example in RAM"] = _step_of(name, shapes, repeat)
    for count, elements in _SIZES[:2] if quick else _SIZES:
        what = f"opt.step in RAM, tensors x elements {count:,} x {elements:,}"
        seconds[what] = _step_of(name, [(elements,)] * count, repeat)
    for width, layers in _LOOPS[:1] if quick else _LOOPS:
        seconds.update(_loop_of(name, width, layers, repeat))
    return seconds


def _optimizer(name: str, parameters: list[nn.Parameter]) -> Any:  # noqa: ANN401  # either class
    if name == _OURS:
        return AdamW(parameters, lr=1e-3)
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def _step_of(name: str, shapes: list[tuple[int, ...]], repeat: _Repeat) -> float:
    return statistics.median(repeat(_optimizer(name, _parameters(shapes)).step))


def _loop_of(name: str, width: int, layers: int, repeat: _Repeat) -> dict[str, float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.GELU())))
    optimizer = _optimizer(name, list(model.parameters()))
    inputs = torch.randn(_LOOP_BATCH, width)
    steps: list[float] = []

    def train() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        start = time.perf_counter()
        optimizer.step()
        steps.append(time.perf_counter() - start)

    whole = statistics.median(repeat(train))
    what = f"{sum(p.numel() for p in model.parameters()):,} parameters in a training loop"
    return {f"{what}, opt.step": statistics.median(steps), f"{what}, the whole": whole}


def _times(act: Callable[[], object], seconds: float) -> list[float]:
    """Return the seconds that each of many calls took, after some that are not counted."""
    _times_for(act, seconds / 5)
    return _times_for(act, seconds)


def _times_for(act: Callable[[], object], seconds: float) -> list[float]:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < _FEWEST_STEPS:
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return times


def _parameters(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for shape in shapes:
        parameter = nn.Parameter(torch.empty(shape).uniform_(-0.1, 0.1, generator=generator))
        parameter.grad = torch.empty(shape).uniform_(-0.01, 0.01, generator=generator)
        parameters.append(parameter)
    return parameters


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=(_OURS, _TORCH))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    print(json.dumps(_measure(options.name, quick=options.quick)))
