"""How states are moved: one frozen object instead of a handful of keywords."""

from dataclasses import dataclass
from typing import Literal

from tensorstow.base.errors import OptionError
from tensorstow.optim.states.layout import LANE

Overlap = Literal["none", "forward", "backward"]
UpdateOn = Literal["host", "device"]
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

    depth: int = 32
    """I/O requests of 1 MiB in flight."""

    isa: Literal["avx512", "avx2", "scalar"] | None = None
    """The instruction set of the kernels; None takes the best one that this CPU runs."""

    poison: bool = False
    """Weights that an update has not published yet are NaN: a test sees who reads them."""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        for name in ("chunk_elements", "depth"):
            value = getattr(self, name)
            if not isinstance(value, int) or value <= 0:
                message = f"{name}={value!r} was given: it is a positive whole number."
                raise OptionError(message)
        if self.chunk_elements % LANE:
            message = f"chunk_elements={self.chunk_elements} was given: use a multiple of {LANE}."
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
