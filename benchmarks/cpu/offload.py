"""The offloaded step in isolation against the disk alone and the kernel alone."""

from collections.abc import Callable, Iterator

import torch

from benchmarks.cpu import arrays
from benchmarks.cpu.arrays import AdamTensors
from benchmarks.cpu.raw import RawFile, alternate, cut
from benchmarks.measure import (
    Figure,
    Settings,
    at_most,
    interleave,
    ratio,
    use_all_cores,
)
from tensorstow import usage
from tensorstow.io.engine import open_engine
from tensorstow.io.files import scratch_file
from tensorstow.optim.adam import AdamW
from tensorstow.states.layout import Family
from tensorstow.states.policy import PipelinePolicy

_PARAMETERS = 256 << 20
_TENSORS = 16  # matrices of 16M elements: a large model's


def figures(settings: Settings) -> Iterator[Figure]:
    """Measure `step(); synchronize()` of 256M fp32 parameters with all states on disk."""
    use_all_cores()
    count = (1 << 22 if settings.quick else _PARAMETERS) // _TENSORS
    policy = PipelinePolicy()
    family = Family(torch.float32, amsgrad=False)
    state_bytes = family.state_bytes(count * _TENSORS)
    directory = settings.scratch(2 * state_bytes)

    parameters = [torch.nn.Parameter(torch.zeros(count)) for _ in range(_TENSORS)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.01)
    optimizer = AdamW(parameters, states="disk", dir=directory, durability="none", policy=policy)
    optimizer.step()  # the first step only writes
    optimizer.synchronize()

    def step() -> None:
        optimizer.step()
        optimizer.synchronize()

    # The same bytes on a scratch file of the same kind, with the pipeline's own transfers.
    engine = open_engine(policy.backend, depth=policy.depth)
    with scratch_file(engine, directory, state_bytes) as file:
        raw = RawFile(engine, file.fd, usage(optimizer=optimizer).states.ring_bytes)
        piece = family.state_bytes(policy.chunk) // len(family.specs)  # of one stream
        writes = cut("write", 0, state_bytes, piece)
        both = alternate(cut("read", 0, state_bytes, piece), writes)
        raw.run(writes)
        kernel = _kernel_alone(parameters)
        before = usage(optimizer=optimizer).traffic
        samples = interleave(
            {"offloaded": step, "raw read and write": lambda: raw.run(both), "kernel": kernel},
            settings.pairs,
        )
    after = usage(optimizer=optimizer).traffic
    optimizer.close()

    bound = max(("raw read and write", "kernel"), key=lambda name: samples[name].median)
    figure = ratio(
        "offloaded step, 256M parameters: time / max(raw I/O, kernel)",
        at_most(1.10),
        samples,
        "offloaded",
        bound,
    )
    steps = len(samples["offloaded"].seconds) + 1  # the warm-up too
    moved = after.bytes_read - before.bytes_read + after.bytes_written - before.bytes_written
    figure.detail["bytes_per_step"] = moved / steps
    figure.detail["gb_per_second"] = {
        "offloaded": moved / steps / samples["offloaded"].median / 1e9,
        "raw read and write": 2 * state_bytes / samples["raw read and write"].median / 1e9,
    }
    figure.detail["backend"] = engine.backend
    yield figure
    yield Figure("offloaded step: bytes moved / bytes of states", None, moved / steps / state_bytes)
    yield Figure(
        "offloaded step: I/O",
        None,
        figure.detail["gb_per_second"]["offloaded"],
        "GB/s",
        {"note": f"slower of the two bounds: {bound}"},
    )


def _kernel_alone(parameters: list[torch.nn.Parameter]) -> Callable[[], None]:
    updates = []
    for parameter in parameters:
        m, v = arrays.staggered([torch.float32] * 2, parameter.numel())
        m.zero_()
        v.zero_()
        grad = parameter.grad
        if grad is not None:
            updates.append(arrays.ours(AdamTensors(parameter.detach(), grad, m, v)))

    def run() -> None:
        for update in updates:
            update()

    return run
