"""Writes whole tensors to a store's files and reads them back, piece by piece."""

from collections import deque

import torch

import tensorstow._native as _native
from tensorstow.base.errors import DamageError, DTypeError, StoreFormatError
from tensorstow.io.files import File, IoFuture
from tensorstow.store.checksums import PIECE_BYTES
from tensorstow.store.records import Extent, TensorRecord

_IN_FLIGHT = 4


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of ``tensor``'s elements; raise DTypeError where it has no plain ones."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        message = (
            f"A tensor of layout {tensor.layout} and dtype {tensor.dtype} on {tensor.device} was to"
            " be kept: only dense ones with plain elements can be. Convert it first."
        )
        raise DTypeError(message)
    return tensor.numel() * tensor.element_size()


def write_tensor(file: File, offset: int, tensor: torch.Tensor) -> int:
    """Write ``tensor`` to ``file``; return its checksum once all is written, not yet durable.

    What is not in host memory passes through it in pieces; what is not contiguous is copied where
    it is.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    step = PIECE_BYTES // flat.element_size()
    futures: deque[IoFuture] = deque()
    seed = 0
    try:
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step].to("cpu").view(torch.uint8)
            futures.append(file.write(piece, offset + start * flat.element_size()))
            seed = _native.checksum(piece.data_ptr(), piece.numel(), seed)
            if len(futures) == _IN_FLIGHT:
                futures.popleft().wait()
    finally:
        _drain(futures)
    return seed


def dtype_of(record: TensorRecord) -> torch.dtype:
    """Return the dtype of ``record``; raise StoreFormatError where this torch has no such."""
    dtype = getattr(torch, record.dtype, None)
    if not isinstance(dtype, torch.dtype):
        message = (
            f"Tensor {record.name!r} was requested and is of dtype {record.dtype}, which torch"
            f" {torch.__version__} does not have. Use the torch that wrote it, or a newer one."
        )
        raise StoreFormatError(message)
    return dtype


def read_tensor(file: File, record: TensorRecord) -> torch.Tensor:
    """Read the tensor of ``record`` from ``file``; raise DamageError where it is not the same."""
    tensor = torch.empty(record.shape, dtype=dtype_of(record), device="cpu")
    flat = tensor.reshape(-1).view(torch.uint8)
    pieces = [flat[start : start + PIECE_BYTES] for start in range(0, len(flat), PIECE_BYTES)]
    seed = 0
    futures: deque[IoFuture] = deque()
    at = record.extent.offset
    for piece in pieces:
        futures.append(file.read(piece, at))
        at += piece.numel()
    for piece in pieces:
        futures.popleft().wait()
        seed = _native.checksum(piece.data_ptr(), piece.numel(), seed)
    if seed != record.checksum:
        message = (
            f"{record.kind} tensor {record.name!r} was read from {file.path}, {flat.numel()} bytes"
            f" at offset {record.extent.offset}: they are not those that were written (checksum"
            f" {seed:08x} instead of {record.checksum:08x}). Run `tensorstow scrub` to see what"
            " else is damaged, and resume from a snapshot that is whole."
        )
        raise DamageError(message)
    return tensor


def copy_bytes(source: File, extent: Extent, target: File, offset: int) -> None:
    """Copy the bytes of ``extent`` in ``source`` to ``offset`` of ``target``, unchecked.

    Their own checksums tell whether they are valid.
    """
    buffers = [torch.empty(min(PIECE_BYTES, extent.nbytes), dtype=torch.uint8) for _ in range(2)]
    writes: deque[IoFuture] = deque()
    try:
        for start in range(0, extent.nbytes, PIECE_BYTES):
            if len(writes) == len(buffers):
                writes.popleft().wait()
            buffers.append(buffers.pop(0))
            piece = buffers[-1][: min(PIECE_BYTES, extent.nbytes - start)]
            source.read(piece, extent.offset + start).wait()
            writes.append(target.write(piece, offset + start))
    finally:
        _drain(writes)


def _drain(futures: "deque[IoFuture]") -> None:
    while futures:
        futures.popleft().wait()
