"""``PipelinePolicy``: chunk size, threads, backend, depth; none changes a result."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tensorstow._native as _native
from tensorstow.base.errors import OptionError
from tensorstow.base.fields import PositiveInt, check_fields, whole_number
from tensorstow.base.keywords import names_keywords
from tensorstow.io.engine import open_engine
from tensorstow.io.files import backend_for
from tensorstow.io.numa_binding import NodeChoice
from tensorstow.states.layout import DEFAULT_CHUNK, LANE, LINKED_CHUNK

_MOST_DEPTH = 32_768
"""The entries that a ring of io_uring may have."""
_MOST_THREADS = 4096


@names_keywords
@dataclass(frozen=True, slots=True)
class PipelinePolicy:
    """The sizes, threads and backend that move and update states; no value changes a result.

    Args:
        chunk_elements: Elements of one state that move as one, a multiple of 32. Default: None:
            524,288 (2 MiB of each fp32 moment); 2,097,152 for states in RAM of weights on an
            accelerator, where Python sends each chunk's gradients.
        schedule: "pipelined" reads ahead during backward and writes after ``step()``. "naive" reads
            a chunk, updates it and writes it before it reads the next one, for comparison.
        backend: The I/O backend, "uring" or "threads". Default: None, the best one that works.
        depth: I/O requests of 1 MiB in flight. Default: None, this rank's share of 32 for each
            directory.
        isa: The instruction set of the kernels: "avx512", "avx2", "neon" or "scalar". Default:
            None, the best one of this CPU.
        threads: The number of threads that update. Default: None, this rank's share of the cores.
        node: The NUMA node of the update and I/O threads and of their memory: a number; "any", no
            restriction; "auto", the node of this rank's accelerator, else ranks are spread over the
            nodes. It holds for the process: a number stays in force for later optimizers.
        nan_until_published: Whether weights in memory are NaN until their update is published, for
            tests.

    Raises:
        OptionError: A value that cannot be used.
    """

    chunk_elements: PositiveInt | None = None
    schedule: Literal["pipelined", "naive"] = "pipelined"
    backend: Literal["uring", "threads"] | None = None
    depth: Annotated[int, whole_number(1, _MOST_DEPTH)] | None = None
    isa: Literal["avx512", "avx2", "neon", "scalar"] | None = None
    threads: Annotated[int, whole_number(1, _MOST_THREADS)] | None = None
    node: NodeChoice = "auto"
    nan_until_published: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        check_fields(self)
        if self.chunk_elements is not None and self.chunk_elements % LANE:
            message = f"chunk_elements={self.chunk_elements} was given: use a multiple of {LANE}."
            raise OptionError(message)
        if isinstance(self.node, int) and self.node < 0:
            message = (
                f'node={self.node!r} was given: it is "auto", "any", or the number of a NUMA node.'
            )
            raise OptionError(message)

    @property
    def chunk(self) -> int:
        """Return the elements of a chunk on disk, and of one in RAM that Python does not send."""
        return self.chunk_elements or DEFAULT_CHUNK

    @property
    def linked_chunk(self) -> int:
        """Return the elements of a chunk in RAM of weights on an accelerator."""
        return self.chunk_elements or LINKED_CHUNK

    @property
    def most_slots(self) -> int | None:
        """Return how many chunks may be in memory at once; None if only the budget limits it."""
        return 1 if self.schedule == "naive" else None


def engine_for(directories: Iterable[Path], policy: PipelinePolicy) -> _native.Engine:
    """Return a new I/O engine for files in ``directories``.

    Its depth is that of all of them together: what is in flight to a drive that is late would
    leave no room for another's.
    """
    places = list(directories)
    backend, drives = backend_for(places, policy.backend), max(len(places), 1)
    return open_engine(backend, depth=policy.depth, node=policy.node, drives=drives)
