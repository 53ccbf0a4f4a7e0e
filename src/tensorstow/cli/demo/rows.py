"""What the demo runs: the rows that are compared, and the model they all train."""

from dataclasses import dataclass
from typing import Literal

from tensorstow.optim.states.layout import DEFAULT_RING_BYTES
from tensorstow.optim.states.policy import PipelinePolicy

ADAM_STATE_BYTES = 8
"""Adam keeps two fp32 numbers per fp32 parameter."""


@dataclass(frozen=True, slots=True)
class Row:
    """One optimizer that trains the model in a process of its own."""

    key: str
    title: str
    """The heading of its column: two lines of at most ten characters, so that the table fits."""
    optimizer: Literal["torch", "tensorstow"]
    fraction: float
    """Share of the states' bytes on disk."""
    schedule: Literal["pipelined", "naive"] = "pipelined"

    @property
    def name(self) -> str:
        """Return the title on one line."""
        return self.title.replace("\n", ", ")

    @property
    def is_offloaded(self) -> bool:
        """Return whether any states are on disk."""
        return self.fraction > 0


ROWS = (
    Row("torch", "torch\nfused", "torch", 0.0),
    Row("ram", "tensorstow\nin RAM", "tensorstow", 0.0),
    Row("naive", "tensorstow\n100% naive", "tensorstow", 1.0, "naive"),
    Row("half", "tensorstow\n50% disk", "tensorstow", 0.5),
    Row("full", "tensorstow\n100% disk", "tensorstow", 1.0),
)


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of the GPT-2 that is trained, of its batches, and of the chunks on disk."""

    layers: int
    heads: int
    width: int
    vocabulary: int
    positions: int
    batch: int
    sequence: int
    chunk_elements: int

    @property
    def parameters(self) -> int:
        """Return the number of parameters: embeddings, blocks, and the last norm."""
        block = 12 * self.width**2 + 13 * self.width
        embeddings = (self.vocabulary + self.positions) * self.width
        return embeddings + self.layers * block + 2 * self.width

    @property
    def disk_bytes(self) -> int:
        """Return the free space that the hungriest row needs, alignment included."""
        return ADAM_STATE_BYTES * self.parameters + DEFAULT_RING_BYTES

    def policy(self, row: Row) -> PipelinePolicy:
        """Return how ``row`` moves its states."""
        return PipelinePolicy(chunk_elements=self.chunk_elements, schedule=row.schedule)


FULL = Scale(
    layers=12,
    heads=12,
    width=768,
    vocabulary=50257,
    positions=1024,
    batch=4,
    sequence=128,
    chunk_elements=PipelinePolicy().chunk_elements,
)
"""``GPT2Config()`` as it comes, batches of 4 x 128."""

SMALL = Scale(
    layers=2,
    heads=2,
    width=64,
    vocabulary=1000,
    positions=64,
    batch=2,
    sequence=32,
    chunk_elements=1 << 14,
)
"""A toy that shows that everything works, in seconds; its figures mean nothing."""
