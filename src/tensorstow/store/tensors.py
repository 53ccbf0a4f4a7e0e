"""Writes whole tensors to a store's files and reads them back, piece by piece."""

import math
from collections import deque

import torch

import tensorstow._native as _native
from tensorstow.base.errors import DamageError, DTypeError, StoreFormatError
from tensorstow.io.files import File, IoFuture, wait_for_all
from tensorstow.store.checksums import PIECE_BYTES
from tensorstow.store.records import Extent, TensorRecord

# So at most 16 MiB of a tensor on a device are in host memory.
_IN_FLIGHT = 4
_NAMES = """
    bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64 bfloat16
    complex32 complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz
    float8_e8m0fnu float4_e2m1fn_x2 bits8 bits16 bits1x8 bits2x4 bits4x2
    uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 int7
"""
# An older torch lacks some of the names.
DTYPES: dict[str, torch.dtype] = {
    name: dtype for name in _NAMES.split() if (dtype := getattr(torch, name, None))
}
"""Dtypes of plain elements, by name. Others (quantized ones) have more than their bytes: memory of
such a dtype is read wrongly, or ends the process."""


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of ``tensor``'s elements; raise DTypeError if it has no plain ones."""
    is_plain = tensor.layout == torch.strided and not tensor.is_meta
    if not is_plain or tensor.dtype not in DTYPES.values():
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
    # A lazy conjugate or negative is a flag of the tensor, which its bytes do not show.
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    step = PIECE_BYTES // flat.element_size()
    futures: deque[IoFuture] = deque()
    seed = 0
    try:
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step].to("cpu").view(torch.uint8)
            futures.append(file.write(piece, offset + start * flat.element_size()))
            # The sum is computed while the piece is written.
            seed = _native.checksum(piece.data_ptr(), piece.numel(), seed)
            if len(futures) == _IN_FLIGHT:
                futures.popleft().wait()
    finally:
        # On an error the caller releases the extent: nothing may write to it then.
        wait_for_all(futures)
    return seed


def dtype_of(record: TensorRecord) -> torch.dtype:
    """Return the dtype of ``record``; raise StoreFormatError if it is none of plain elements."""
    if record.dtype not in DTYPES:
        message = (
            f"Tensor {record.name!r} was requested and is of dtype {repr(record.dtype)[:40]}, which"
            f" is none of those that are kept with torch {torch.__version__}. Use the torch that"
            " wrote it, or a newer one."
        )
        raise StoreFormatError(message)
    return DTYPES[record.dtype]


def plain_bytes(record: TensorRecord) -> int:
    """Return the bytes of the elements of ``record``."""
    return math.prod(record.shape) * dtype_of(record).itemsize


def read_tensor(file: File, record: TensorRecord) -> torch.Tensor:
    """Read the tensor of ``record`` from ``file``; raise DamageError if it is not the same."""
    tensor = torch.empty(record.shape, dtype=dtype_of(record), device="cpu")
    flat = tensor.reshape(-1).view(torch.uint8)
    pieces = [flat[start : start + PIECE_BYTES] for start in range(0, len(flat), PIECE_BYTES)]
    seed = 0
    futures: deque[IoFuture] = deque()
    at = record.extent.offset
    # The pieces are parts of the result, so queuing all reads at once takes no more memory.
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
            f" {seed:08x} instead of {record.checksum:08x}). Run `tensorstow run scrub` to see what"
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
            # The oldest write has the buffer that comes next.
            if len(writes) == len(buffers):
                writes.popleft().wait()
            buffers.append(buffers.pop(0))
            piece = buffers[-1][: min(PIECE_BYTES, extent.nbytes - start)]
            # The piece before is written meanwhile.
            source.read(piece, extent.offset + start).wait()
            writes.append(target.write(piece, offset + start))
    finally:
        wait_for_all(writes)
