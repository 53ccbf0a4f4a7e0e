"""How states are moved: one frozen object instead of a handful of keywords."""

from dataclasses import dataclass
from typing import Literal

from tensorstow.base.errors import OptionError
from tensorstow.io.confinement import NodeChoice
from tensorstow.states.layout import LANE

Overlap = Literal["none", "forward", "backward"]
_CHOICES = {
    "schedule": ("pipelined", "naive"),
    "backend": (None, "uring", "threads"),
    "isa": (None, "avx512", "avx2", "scalar"),
}


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

    depth: int | None = None
    """I/O requests of 1 MiB in flight; None takes this rank's part of 32, shared by the ranks of
    its machine as if they had one disk."""

    isa: Literal["avx512", "avx2", "scalar"] | None = None
    """The instruction set of the kernels; None takes the best one that this CPU runs."""

    threads: int | None = None
    """Threads that update; None takes this rank's share of the cores."""

    node: NodeChoice = "auto"
    """The NUMA node whose cores the update and I/O threads stay on, and whose memory they prefer.
    ``auto``: where a machine has several, the node of this rank's accelerator, or ranks are spread
    over them; ``any``: no restriction. Holds for the process: one that is named stays for later
    optimizers too."""

    poison: bool = False
    """Weights that an update has not published yet are NaN: a test sees who reads them."""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
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
        """Return how many chunks may be in memory at once; None where only the budget says."""
        return 1 if self.schedule == "naive" else None
