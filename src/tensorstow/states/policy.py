"""``PipelinePolicy``: chunk size, threads, backend, depth; none changes a result."""

from dataclasses import dataclass
from typing import Literal

from tensorstow.base.errors import OptionError
from tensorstow.io.numa_binding import NodeChoice
from tensorstow.states.layout import LANE

_CHOICES = {
    "schedule": ("pipelined", "naive"),
    "backend": (None, "uring", "threads"),
    "isa": (None, "avx512", "avx2", "neon", "scalar"),
}


@dataclass(frozen=True, slots=True)
class PipelinePolicy:
    """The sizes, threads and backend that move and update states; no value changes a result.

    Args:
        chunk_elements: Elements of one state that move as one, a multiple of 32. Default: 524,288,
            that is 2 MiB of each fp32 moment.
        schedule: "pipelined" reads ahead during backward and writes after ``step()``. "naive" reads
            a chunk, updates it and writes it before it reads the next one, for comparison.
        backend: The I/O backend, "uring" or "threads". Default: None, the best one that works.
        depth: I/O requests of 1 MiB in flight. Default: None, this rank's share of 32.
        isa: The instruction set of the kernels: "avx512", "avx2", "neon" or "scalar". Default:
            None, the best one of this CPU.
        threads: The number of threads that update. Default: None, this rank's share of the cores.
        node: The NUMA node of the update and I/O threads and of their memory: a number; "any", no
            restriction; "auto", the node of this rank's accelerator, else ranks are spread over the
            nodes. It holds for the process: a number stays in force for later optimizers.
        nan_until_published: Whether weights are NaN until their update is published, for tests.

    Raises:
        OptionError: A value that cannot be used.
    """

    chunk_elements: int = 1 << 19
    schedule: Literal["pipelined", "naive"] = "pipelined"
    backend: Literal["uring", "threads"] | None = None
    depth: int | None = None
    isa: Literal["avx512", "avx2", "neon", "scalar"] | None = None
    threads: int | None = None
    node: NodeChoice = "auto"
    nan_until_published: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("chunk_elements", "depth", "threads"):
            value = getattr(self, name)
            if value is None and name != "chunk_elements":
                continue
            if not isinstance(value, int) or value <= 0:
                message = f"{name}={value!r} was given: it is a positive whole number."
                raise OptionError(message)
        if self.chunk_elements % LANE:
            message = f"chunk_elements={self.chunk_elements} was given: use a multiple of {LANE}."
            raise OptionError(message)
        if self.node not in ("auto", "any") and not (type(self.node) is int and self.node >= 0):
            message = (
                f'node={self.node!r} was given: it is "auto", "any", or the number of a NUMA node.'
            )
            raise OptionError(message)
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                message = f"{name}={value!r} was given: it is one of {known}."
                raise OptionError(message)

    @property
    def most_slots(self) -> int | None:
        """Return how many chunks may be in memory at once; None if only the budget limits it."""
        return 1 if self.schedule == "naive" else None
