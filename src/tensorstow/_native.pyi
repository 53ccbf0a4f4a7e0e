"""
The native core of tensorstow: kernels, file I/O and the update pipeline.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray
import torch


def supported_isas() -> list[str]: ...

def best_isa() -> str: ...

def set_pool_threads(threads: int) -> None: ...

def pool_threads() -> int: ...

def slow_down(*, disk_bytes_per_s: float = 0.0, update_elements_per_s: float = 0.0) -> None:
    """
    for tests: no faster than this, on backend threads; 0: as fast as it goes
    """

def adam_update(param: int, grad: int, states: Sequence[int], n: int, param_dtype: str, grad_dtype: str, format: str, first: int, key: int, seed_master: bool, hyper: tuple[float, float, float, float, float, float, float, float, float], isa: str | None, on_pool: bool) -> None:
    """
    `states`: addresses of m, v, vmax, master, m_scale, v_scale; 0 where there is none
    """

def streams_of(dtype: str, format: str, amsgrad: bool) -> list[tuple[str, int, int]]:
    """(name, bytes, per) of each stream: `bytes` for every `per` elements"""

def squared_norm(grad: int, n: int, dtype: str, isa: str | None) -> float: ...

def seven_streams(p: int, g: int, m: int, v: int, n: int) -> None: ...

def mixed_streams(p16: int, g16: int, w: int, m: int, v: int, n: int) -> None: ...

def checksum(data: int, nbytes: int, seed: int = 0) -> int: ...

def checksum_by_blocks(data: int, nbytes: int) -> int: ...

def set_thread_cores(cores: Sequence[int]) -> None:
    """Threads of ours that start from now on run there only; none: anywhere"""

def thread_cores() -> list[int]: ...

def prefer_node(address: int, nbytes: int, node: int) -> int:
    """errno, or 0"""

def direct_alignment(fd: int) -> int:
    """bytes; 0 where it is not told"""

def fallocate(fd: int, length: int) -> int:
    """errno, or 0"""

class Ticket:
    def wait(self, timeout: float | None = None) -> bool: ...

    def done(self) -> bool: ...

    def error(self) -> tuple[int, int, int]:
        """(errno, offset, length); errno 0 where all bytes moved"""

class Engine:
    def __init__(self, backend: str, depth: int = 32, block_bytes: int = 1048576, drives: int = 1) -> None: ...

    @property
    def backend(self) -> str: ...

    @property
    def depth(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    def add_file(self, fd: int, align: int, drop_cache: bool) -> int: ...

    def read(self, file: int, data: int, length: int, offset: int, owner: object | None) -> Ticket: ...

    def write(self, file: int, data: int, length: int, offset: int, owner: object | None) -> Ticket: ...

    def drain(self) -> None: ...

    def counters(self) -> dict[str, int]: ...

    def inject_fault(self, operation: str, *, after: int = 0, times: int = 1, error: int = 0, max_bytes: int = 0, delay_us: int = 0) -> None: ...

    def log_writes(self) -> None: ...

    def logged_writes(self) -> list[tuple[int, int, bytes]]: ...

    def clear_faults(self) -> None: ...

def cache_blocks_of(library: str) -> bool:
    """
    let a loaded library allocate large blocks from a cache of freed ones; False where that cannot be
    """

def allocator_bytes() -> tuple[int, int, int]:
    """
    (used, cached, fresh): of blocks in use, of freed ones, and of all that came from the system so far
    """

def empty_cache(bytes: int | None = None) -> None:
    """return freed blocks to the system: so many bytes of them, or all"""

def set_memory_limit(bytes: int) -> None:
    """
    refuse blocks with which the process would have more bytes in memory; 0: no limit
    """

def memory_limit() -> int:
    """most bytes of the process in memory; 0: no limit"""

def resident_bytes() -> int:
    """bytes of the process in memory now"""

def fits_memory_limit(bytes: int) -> bool:
    """
    whether so many new bytes fit below the limit, after freed memory went back if need be
    """

def chunk_layout(family: tuple[str, str, bool], elements: int) -> list[tuple[int, int, int, int, int]]:
    """
    (width, per, offset in a file, offset in a slot, bytes) of each stream and the weight
    """

UPDATE_BLOCK: int = 16384

class StepRows:
    def __init__(self, tensor: object, strided: object, dtypes: list[torch.dtype], size: int, owners: list[torch.Tensor], rows: list[tuple[int, int, int, int, int]], counts: list[object], states: dict[torch.Tensor, dict[str, object]]) -> None: ...

    def gather(self, groups: list[dict[str, object]], owners: list[torch.Tensor], counts: list[object], views: list[dict[str, torch.Tensor]], states: dict[torch.Tensor, dict[str, object]]) -> tuple[list[torch.Tensor], list[tuple[int, int]]] | None:
        """
        the parameters with a gradient, and (group, step) of each row of scalars; None: a step that does not repeat the last one
        """

    def count(self, owners: list[torch.Tensor], counts: list[object]) -> None: ...

    def versions(self) -> list[int]: ...

class Pipeline:
    def __init__(self, engine: Engine, isa: str | None, alternate: bool, team: tuple[int, int, int]) -> None: ...

    def set_ring(self, base: int, slots: int, slot_bytes: int, owner: object | None) -> None: ...

    def add_chunk(self, family: tuple[str, str, bool], segments: Sequence[tuple[int, int, int, int]], elements: int, place: tuple[int, int], resident: Sequence[tuple[int, object]], blank: bool, checksums: tuple[bytes, bytes]) -> int: ...

    def set_order(self, arg: Sequence[int], /) -> None: ...

    def set_caller_chunks(self, arg: Sequence[int], /) -> None: ...

    def order(self) -> list[int]: ...

    def prefetch(self) -> None: ...

    def begin(self, rows: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], hypers: Sequence[tuple[float, float, float, float, float, float, float, float, float]], weights: Sequence[object], gradients: Sequence[object], *, open: bool, capture: bool, resident_first: bool, newest_first: bool, caller: str) -> tuple[int, str, int, int, int, int]:
        """`weights` and `gradients`: each row's owners, or None"""

    def step(self, rows: StepRows, hypers: Sequence[tuple[float, float, float, float, float, float, float, float, float]]) -> tuple[int, str, int, int, int, int]: ...

    def add_gradient(self, parameter: int, grad: int, dtype: int, owner: object | None) -> None: ...

    def add_chunk_gradients(self, chunk: int, pieces: Sequence[tuple[int, int, int, object]]) -> None: ...

    def acquire_chunk(self, *, wait: bool) -> tuple[int, int]:
        """(chunk, slot): -1 where there is none"""

    def release_chunk(self, arg: int, /) -> None: ...

    def is_updated(self, arg: int, /) -> bool: ...

    def close(self) -> None: ...

    def is_published(self, arg: int, /) -> bool: ...

    def counters(self) -> dict[str, float]: ...

    def start_trace(self, arg: int, /) -> None: ...

    def trace(self) -> list[tuple[str, float, float, int, int]]: ...

    def wait_published(self) -> tuple[int, str, int, int, int, int]: ...

    def wait_parameters(self, parameters: Sequence[int]) -> tuple[int, str, int, int, int, int]: ...

    def wait_chunk(self, arg: int, /) -> tuple[int, str, int, int, int, int]: ...

    def help(self) -> None: ...

    def changes(self) -> int: ...

    def wait_change(self, arg: int, /) -> tuple[int, str, int, int, int, int]: ...

    def signal(self) -> None: ...

    def wait_written(self) -> tuple[int, str, int, int, int, int]: ...

    def quiesce(self) -> tuple[int, str, int, int, int, int]: ...

    def failure(self) -> tuple[int, str, int, int, int, int]: ...

    def state(self, arg: int, /) -> str: ...

    def place(self, arg: int, /) -> tuple[int, int]: ...

    def captured(self, arg: int, /) -> bool: ...

    def forget_capture(self, arg: int, /) -> None: ...

    def set_target(self, arg0: int, arg1: int, arg2: int, /) -> None: ...

    def checksums(self, chunk: int) -> tuple[bytes, bytes]: ...

    def rewritten(self, arg0: int, arg1: Sequence[int], /) -> None: ...

    def intact(self, arg0: int, arg1: Sequence[int], /) -> bool: ...

    def record_weight(self, arg0: int, arg1: int, /) -> None: ...

    def forget_weight(self, arg: int, /) -> None: ...

    def unchanged(self, arg0: int, arg1: int, /) -> bool: ...
