"""Parameters on an accelerator: our step against torch's fused one there and other offloaders.

Gradients are on the device when the clock starts, and the clock stops when the device has the new
weights: what is measured is the optimizer alone, with nothing to hide it. Beside it stand the links
that it uses, each alone with the same bytes; the slowest of them is what bounds the step.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks import arrays
from benchmarks.measure import (
    Figure,
    Sample,
    Settings,
    interleave,
    not_available,
    ratio,
    use_all_cores,
)
from benchmarks.raw import RawFile, alternate, cut
from tensorstow.io.engine import open_engine
from tensorstow.io.files import scratch_file
from tensorstow.io.pinned import PinnedBlock
from tensorstow.optim.accelerator.device import open_link
from tensorstow.optim.adam import AdamW

_PARAMETERS = 256 << 20
_TENSORS = 16
_NAME = "bf16 parameters on an accelerator"
Parameters = list[torch.nn.Parameter]


def figures(settings: Settings) -> Iterator[Figure]:
    """Measure one step of 256M bf16 parameters, states on HOST and on DISK."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        yield not_available(_NAME, None, "torch.accelerator has no device here")
        return
    use_all_cores()
    count = (1 << 20 if settings.quick else _PARAMETERS) // _TENSORS
    with ExitStack() as held:
        yield from _on_device(settings, device, count, held)


def _on_device(
    settings: Settings, device: torch.device, count: int, held: ExitStack
) -> Iterator[Figure]:
    directory = settings.scratch(24 * count * _TENSORS)
    host = _ours(_parameters(device, count), states="ram", state_format="split")
    disk = _ours(_parameters(device, count), states="disk", dir=directory, durability="none")
    contenders = {"ours, states on HOST": host.step, "ours, states on DISK": _written(disk)}
    for name, make in _PEERS.items():
        step, why = _peer(make, _parameters(device, count))
        if step is None:
            yield not_available(f"step on HOST: time / {name}", None, why)
        else:
            contenders[name] = step
    links = {**_links(device, count), **_disk(directory, disk, count, held)}
    everything = {name: _until_done(work) for name, work in (contenders | links).items()}
    samples = interleave(everything, settings.pairs)
    for ours in ("ours, states on HOST", "ours, states on DISK"):
        yield _bound(ours, [n for n in links if "DISK" in ours or "disk" not in n], samples)
    for name in _PEERS:
        if name in samples:
            yield ratio(f"step on HOST: time / {name}", None, samples, "ours, states on HOST", name)
    host.close()
    disk.close()


def _bound(ours: str, links: list[str], samples: dict[str, Sample]) -> Figure:
    slowest = max(links, key=lambda name: samples[name].median)
    figure = ratio(f"{ours}: time / slowest link alone", None, samples, ours, slowest)
    figure.detail["note"] = f"bound by: {slowest}"
    return figure


def _parameters(device: torch.device, count: int) -> Parameters:
    made = [torch.nn.Parameter(_random(device, count)) for _ in range(_TENSORS)]
    for parameter in made:
        parameter.grad = _random(device, count)
    return made


def _random(device: torch.device, count: int) -> torch.Tensor:
    return torch.randn(count, device=device, dtype=torch.bfloat16)


def _ours(parameters: Parameters, **given: Any) -> AdamW:  # noqa: ANN401  # keywords of AdamW
    return AdamW(parameters, lr=1e-4, **given)


def _written(optimizer: AdamW) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        optimizer.synchronize()

    return step


def _until_done(work: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        work()
        torch.accelerator.synchronize()

    return run


# --- the links alone ---


def _links(device: torch.device, count: int) -> dict[str, Callable[[], object]]:
    """Return what moves one step's bytes between device and host, and updates them there."""
    link = open_link(device)
    nbytes = 2 * count
    block = PinnedBlock(nbytes, device, link.settle)
    host = block.tensor(0, count, torch.bfloat16)
    away = _random(device, count)

    def down() -> None:
        for _ in range(_TENSORS):
            mark = link.down([(host, away)], [link.mark()])
        mark.synchronize()

    def up() -> None:
        for _ in range(_TENSORS):
            mark = link.up([(away, host)])
        mark.synchronize()

    update = arrays.ours(arrays.mixed_in_arena(count))

    def kernel() -> None:
        for _ in range(_TENSORS):
            update()

    return {"link, down": down, "link, up": up, "update on HOST": kernel}


def _disk(
    directory: Path, disk: AdamW, count: int, held: ExitStack
) -> dict[str, Callable[[], object]]:
    """Return what reads and writes the states of one step."""
    nbytes = 10 * count * _TENSORS
    engine = open_engine(None, depth=32)
    file = held.enter_context(scratch_file(engine, directory, nbytes))
    raw = RawFile(engine, file.fd, disk.memory().ring_bytes)
    reads, writes = (cut(operation, 0, nbytes, 1 << 20) for operation in ("read", "write"))
    raw.run(writes)
    both = alternate(reads, writes)
    return {"disk, read and write": lambda: raw.run(both)}


# --- the peers ---


def _fused(parameters: Parameters) -> Callable[[], object]:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True).step


def _torchao(parameters: Parameters) -> Callable[[], object]:
    offload: Any = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    optimizer = offload(parameters, torch.optim.AdamW, lr=1e-4, fused=True)
    gradients = [p.grad for p in parameters]

    def step() -> None:
        # It takes gradients down in hooks, which only a backward calls.
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None
            torch.autograd.backward(parameter, gradient)
        optimizer.step()

    return step


def _deepspeed(parameters: Parameters) -> Callable[[], object]:
    adam: Any = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    host = [torch.nn.Parameter(p.detach().cpu().float().pin_memory()) for p in parameters]
    for parameter in host:
        parameter.grad = torch.empty_like(parameter).pin_memory()
    optimizer = adam(host, lr=1e-4)

    def step() -> None:
        # As its engine does: fp32 gradients on the host, one copy after the other.
        for here, there in zip(host, parameters, strict=True):
            if here.grad is not None and there.grad is not None:
                here.grad.copy_(there.grad.float(), non_blocking=True)
        torch.accelerator.synchronize()
        optimizer.step()
        for here, there in zip(host, parameters, strict=True):
            there.data.copy_(here.data, non_blocking=True)

    return step


_PEERS: dict[str, Callable[[Parameters], Callable[[], object]]] = {
    "torch fused AdamW on the device": _fused,
    "torchao CPUOffloadOptimizer": _torchao,
    "DeepSpeedCPUAdam and copies": _deepspeed,
}


def _peer(
    make: Callable[[Parameters], Callable[[], object]], parameters: Parameters
) -> tuple[Callable[[], object] | None, str]:
    try:
        step = make(parameters)
        step()
    except Exception as error:  # noqa: BLE001  # whatever a peer's import or compiler raises
        return None, f"{type(error).__name__}: {error}".splitlines()[0]
    return step, ""
