"""DeepSpeed and TensorNVMe, where they are installed (the optional group `peers`)."""

import importlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu import arrays
from benchmarks.cpu.arrays import AdamTensors
from benchmarks.measure import (
    Figure,
    Settings,
    interleave,
    not_available,
    ratio,
    use_all_cores,
)
from tensorstow.io.arena import Arena
from tensorstow.io.engine import open_engine
from tensorstow.io.files import File, scratch_file

_LARGE = 128 << 20
_TENSORS = 64
_TENSOR_BYTES = 16 << 20
_DEEPSPEED_OPTIMIZER = 0


def figures(settings: Settings) -> Iterator[Figure]:
    """Compare with the peers that can be imported; say which cannot."""
    use_all_cores()
    yield from _deepspeed(settings)
    yield from _tensornvme(settings)


def deepspeed_update(t: AdamTensors) -> tuple[Callable[[], None] | None, str]:
    """Return DeepSpeed's CPU Adam over ``t``, or None and why not. It may compile for minutes."""
    try:
        builder = importlib.import_module("deepspeed.ops.op_builder")
        op: Any = builder.CPUAdamBuilder().load(verbose=False)
    except Exception as error:  # noqa: BLE001  # whatever a peer's import or compiler raises
        return None, _reason("DeepSpeed", error)
    op.create_adam(
        _DEEPSPEED_OPTIMIZER,
        arrays.LR,
        arrays.BETA1,
        arrays.BETA2,
        arrays.EPS,
        arrays.DECAY,
        True,  # noqa: FBT003  # adamw_mode
        False,  # noqa: FBT003  # should_log
    )

    def update() -> None:
        op.adam_update(
            _DEEPSPEED_OPTIMIZER,
            arrays.STEP,
            arrays.LR,
            arrays.BETA1,
            arrays.BETA2,
            arrays.EPS,
            arrays.DECAY,
            True,  # noqa: FBT003  # bias_correction
            t.param,
            t.grad,
            t.m,
            t.v,
        )

    return update, ""


def _deepspeed(settings: Settings) -> Iterator[Figure]:
    name = "fp32 Adam, 128M elements: time / DeepSpeedCPUAdam"
    t = arrays.in_arena(1 << 16 if settings.quick else _LARGE)
    theirs, why = deepspeed_update(t)
    if theirs is None:
        yield not_available(name, None, why)
        return
    samples = interleave({"ours": arrays.ours(t), "DeepSpeedCPUAdam": theirs}, settings.pairs)
    yield ratio(name, None, samples, "ours", "DeepSpeedCPUAdam")


def _tensornvme(settings: Settings) -> Iterator[Figure]:
    count, nbytes = (2, 1 << 20) if settings.quick else (_TENSORS, _TENSOR_BYTES)
    title = f"{count} tensors of {nbytes >> 20} MiB"
    try:
        offloader: Any = importlib.import_module("tensornvme").DiskOffloader
    except Exception as error:  # noqa: BLE001  # whatever a peer's import raises
        yield not_available(f"{title}: time / TensorNVMe", None, _reason("TensorNVMe", error))
        return
    directory = settings.scratch(2 * count * nbytes)
    tensors = [torch.rand(nbytes // 4) for _ in range(count)]
    arena = Arena(count * nbytes, in_children=False)
    buffers = [arena.tensor(i * nbytes, nbytes // 4, torch.float32) for i in range(count)]
    engine = open_engine()
    with (
        tempfile.TemporaryDirectory(dir=directory) as folder,
        scratch_file(engine, directory, count * nbytes) as file,
    ):
        theirs: Any = offloader(folder, n_entries=count, backend="uring")
        samples = interleave(
            {
                "ours, write": lambda: _move(file, buffers, "write"),
                "TensorNVMe, write": lambda: _offload(theirs, tensors, Path(folder)),
                "ours, read": lambda: _move(file, buffers, "read"),
                "TensorNVMe, read": lambda: _fetch(theirs, tensors),
            },
            settings.pairs,
        )
    # Its reads come out of the page cache, which is memory too; ours come from the disk.
    for operation in ("write", "read"):
        yield ratio(
            f"{operation} of {title}: time / TensorNVMe",
            None,
            samples,
            f"ours, {operation}",
            f"TensorNVMe, {operation}",
        )


def _move(file: File, tensors: list[torch.Tensor], operation: str) -> None:
    start = file.write if operation == "write" else file.read
    futures = [start(tensor, i * tensor.nbytes) for i, tensor in enumerate(tensors)]
    for future in futures:
        future.wait()
    if operation == "write":
        os.fdatasync(file.fd)


def _offload(offloader: Any, tensors: list[torch.Tensor], folder: Path) -> None:  # noqa: ANN401
    for tensor in tensors:
        offloader.async_write(tensor)
    offloader.synchronize()
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fdatasync(file.fileno())


def _fetch(offloader: Any, tensors: list[torch.Tensor]) -> None:  # noqa: ANN401
    for tensor in tensors:
        offloader.async_read(tensor)
    offloader.synchronize()


def _reason(peer: str, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{peer} is not installed"
    return f"{peer} does not load: {type(error).__name__}"
