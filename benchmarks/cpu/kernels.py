"""The update kernels against torch's, DeepSpeed's, and what the memory can do."""

from collections.abc import Callable, Iterator

import torch

from benchmarks.cpu import arrays, peers
from benchmarks.cpu.arrays import AdamTensors
from benchmarks.measure import (
    Contender,
    Figure,
    Sample,
    Settings,
    at_least,
    at_most,
    fastest,
    interleave,
    not_available,
    ratio,
    use_all_cores,
)
from tensorstow import _native

_LARGE = 128 << 20
_NEAR_CACHE = {"1M": 1 << 20, "8M": 8 << 20}
_ELEMENTS_PER_SAMPLE = 64 << 20
_TILE = 1 << 18


def figures(settings: Settings) -> Iterator[Figure]:
    """Measure the kernels alone, everything in RAM."""
    use_all_cores()
    large = 1 << 16 if settings.quick else _LARGE
    yield from _large_fp32(large, settings.pairs)
    yield from _mixed(large, settings.pairs)
    for name, count in _NEAR_CACHE.items():
        yield from _near_cache(name, 1 << 12 if settings.quick else count, settings)


def _large_fp32(count: int, pairs: int) -> Iterator[Figure]:
    shared, own = arrays.in_arena(count), arrays.from_torch(count)
    samples = interleave(
        {
            "ours": arrays.ours(shared),
            "torch fused": _fused(shared),
            "seven streams": _seven_streams(shared),
            "ours, torch's memory": arrays.ours(own),
            "torch fused, torch's memory": _fused(own),
        },
        pairs,
    )
    best = fastest(samples, ["torch fused", "torch fused, torch's memory"])
    name = "fp32 Adam, 128M elements"
    yield _with_bandwidth(
        ratio(f"{name}: time / torch fused", at_most(1.05), samples, "ours", best), shared, samples
    )
    yield ratio(
        f"{name}: bandwidth / seven streams", at_least(0.9), samples, "seven streams", "ours"
    )
    yield ratio(
        f"{name} in torch's memory: time / torch fused",
        None,
        samples,
        "ours, torch's memory",
        "torch fused, torch's memory",
    )


def _mixed(count: int, pairs: int) -> Iterator[Figure]:
    t = arrays.mixed_in_arena(count)
    compositions = {
        "copy, fused, copy": _composition(t, count),
        "float(), fused, copy": _allocating_composition(t),
    }
    samples = interleave(
        {
            "ours": arrays.ours(t),
            **compositions,
            "tiled composition": _composition(t, _TILE),
            "mixed streams": _mixed_streams(t),
        },
        pairs,
    )
    name = "bf16 gradient -> fp32 states -> bf16 weight"
    best = fastest(samples, compositions)
    yield _with_bandwidth(
        ratio(f"{name}: time / torch composition", at_most(0.75), samples, "ours", best), t, samples
    )
    yield ratio(
        f"{name}: bandwidth / mixed streams", at_least(0.9), samples, "mixed streams", "ours"
    )
    # No optimizer does this; it shows how much of the gain is in not leaving the cache.
    yield ratio(
        f"{name}: time / composition in tiles of 256K", None, samples, "ours", "tiled composition"
    )


def _near_cache(name: str, count: int, settings: Settings) -> Iterator[Figure]:
    t = arrays.in_arena(count)
    calls = 2 if settings.quick else max(1, _ELEMENTS_PER_SAMPLE // count)
    contenders: dict[str, Contender] = {
        "ours": _repeated(arrays.ours(t), calls),
        "torch fused": _repeated(_fused(t), calls),
        "seven streams": _repeated(_seven_streams(t), calls),
    }
    deepspeed, why = peers.deepspeed_update(t)
    if deepspeed is not None:
        contenders["DeepSpeedCPUAdam"] = _repeated(deepspeed, calls)
    samples = interleave(contenders, settings.pairs)
    title = f"fp32 Adam, {name} elements: time / DeepSpeedCPUAdam"
    if deepspeed is None:
        yield not_available(title, at_most(1.0), why)
    else:
        yield ratio(title, at_most(1.0), samples, "ours", "DeepSpeedCPUAdam")
    title = f"fp32 Adam, {name} elements: time / torch fused"
    yield ratio(title, None, samples, "ours", "torch fused")


def _fused(t: AdamTensors) -> Callable[[], None]:
    return arrays.torch_fused(t.param, t.grad, t.m, t.v)


def _composition(t: AdamTensors, tile: int) -> Callable[[], None]:
    """Widen the gradient, step the master, narrow it: in torch, into buffers made before."""
    master = _master(t)
    wide = torch.zeros(min(tile, t.m.numel()))
    pieces = []
    for start in range(0, t.m.numel(), tile):
        part = slice(start, start + tile)
        grad = wide[: t.grad[part].numel()]
        fused = arrays.torch_fused(master[part], grad, t.m[part], t.v[part])
        pieces.append((t.grad[part], grad, fused, master[part], t.param[part]))

    def update() -> None:
        for narrow_grad, grad, fused, whole, param in pieces:
            grad.copy_(narrow_grad)
            fused()
            param.copy_(whole)

    return update


def _allocating_composition(t: AdamTensors) -> Callable[[], None]:
    """Return the same as everybody writes it: a new fp32 gradient each step."""
    master = _master(t)

    def update() -> None:
        arrays.torch_fused(master, t.grad.float(), t.m, t.v)()
        t.param.copy_(master)

    return update


def _master(t: AdamTensors) -> torch.Tensor:
    if t.master is None:
        message = "A mixed update without a master cannot be."
        raise ValueError(message)
    return t.master


def _seven_streams(t: AdamTensors) -> Callable[[], None]:
    # What `p += g; m += g; v += g` adds must not grow into infinities: a gradient of zeros.
    zeros = arrays.staggered([torch.float32], t.m.numel())[0].zero_()

    def stream() -> None:
        _native.seven_streams(
            t.param.data_ptr(), zeros.data_ptr(), t.m.data_ptr(), t.v.data_ptr(), t.m.numel()
        )

    return stream


def _mixed_streams(t: AdamTensors) -> Callable[[], None]:
    zeros = arrays.staggered([torch.bfloat16], t.m.numel())[0].zero_()
    master = _master(t)

    def stream() -> None:
        _native.mixed_streams(
            t.param.data_ptr(),
            zeros.data_ptr(),
            master.data_ptr(),
            t.m.data_ptr(),
            t.v.data_ptr(),
            t.m.numel(),
        )

    return stream


def _repeated(work: Callable[[], None], calls: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(calls):
            work()

    return run


def _with_bandwidth(figure: Figure, t: AdamTensors, samples: dict[str, Sample]) -> Figure:
    speeds = {name: t.nbytes_moved / s.median / 1e9 for name, s in samples.items()}
    figure.detail["gb_per_second_counting_one_pass"] = speeds
    return figure
