"""How states are moved: one frozen object instead of a handful of keywords."""

from dataclasses import dataclass
from typing import Literal

from tensorstow.base.errors import OptionError
from tensorstow.optim.layout import LANE


@dataclass(frozen=True, slots=True)
class PipelinePolicy:
    """The sizes and order of moving states between RAM and disk. No value changes a result."""

    chunk_elements: int = 1 << 19
    """Elements of one state that move as one: 2 MiB of m beside 2 MiB of v."""

    schedule: Literal["pipelined", "naive"] = "pipelined"
    """``pipelined`` reads ahead during backward and writes behind ``step()``. ``naive`` reads a
    chunk, updates it, writes it and only then takes the next: what the others are measured by."""

    backend: Literal["uring", "threads"] | None = None
    """The I/O backend; None takes the best one that works here."""

    depth: int = 32
    """I/O requests of 1 MiB in flight."""

    isa: Literal["avx512", "avx2", "scalar"] | None = None
    """The instruction set of the kernels; None takes the best one that this CPU runs."""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if self.chunk_elements <= 0 or self.chunk_elements % LANE:
            message = f"chunk_elements={self.chunk_elements} was given: use a multiple of {LANE}."
            raise OptionError(message)
        if self.schedule not in {"pipelined", "naive"}:
            message = f"schedule={self.schedule!r} was given: it is 'pipelined' or 'naive'."
            raise OptionError(message)

    @property
    def most_slots(self) -> int | None:
        """Return how many chunks may be in memory at once; None where only the budget says."""
        return 1 if self.schedule == "naive" else None
