"""The configurations that the demo compares, and the model that all of them train."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tensorstow.base.update_on import Overlap
from tensorstow.states.layout import DEFAULT_RING_BYTES
from tensorstow.states.policy import PipelinePolicy

FOLDER = Path(__file__).resolve().parent.parent
"""Folder that child processes import the demo from."""
TURN_STEPS = 2
"""Steps that a row takes before the next row's turn; the first of them is not counted."""
ADAM_STATE_BYTES = 8
"""Adam keeps two fp32 numbers per fp32 parameter."""
ANCHOR = "ram"
"""The row that all other tensorstow rows must equal: everything in RAM."""
_LEAST_PROCESS_BYTES = 512 << 20
"""Bytes of Python, torch and the allocator, in addition to weights and states."""
_WEIGHT_BYTES = 4
_BLOCKS_HELD = 3
"""Blocks in RAM with weights on disk: one is used, one is fetched ahead, one is updated."""
_ALIGNMENT_OF_A_UNIT = 1 << 16


@dataclass(frozen=True, slots=True)
class Configuration:
    """One optimizer that trains the model in its own process."""

    key: str
    title: str
    """The heading of its column: two lines of at most ten characters, so that the table fits."""
    about: str
    """A description of the heading, in one line."""
    optimizer: Literal["torch", "HybridAdam", "AdamW", "stow"]
    fraction: float
    """Share of the states' bytes on disk."""
    schedule: Literal["pipelined", "naive"] = "pipelined"
    overlap: Overlap = "none"

    @property
    def name(self) -> str:
        """Return the title on one line."""
        return self.title.replace("\n", ", ")

    @property
    def is_ours(self) -> bool:
        """Return whether it is tensorstow's: all of those must be bitwise equal."""
        return self.optimizer != "torch"

    @property
    def is_offloaded(self) -> bool:
        """Return whether any states are on disk."""
        return self.fraction > 0


CONFIGURATIONS = (
    Configuration(
        "torch",
        "torch\nfused",
        "torch.optim.AdamW(fused=True): weights, gradients and states in RAM",
        "torch",
        0.0,
    ),
    Configuration("ram", "tensorstow\nin RAM", "everything in RAM, our kernel", "HybridAdam", 0.0),
    Configuration(
        "naive",
        "tensorstow\n100% naive",
        "all states on disk; read, update, write, one after the other: what a plain loop does",
        "HybridAdam",
        1.0,
        "naive",
    ),
    Configuration(
        "half",
        "tensorstow\n50% disk",
        "half of the states on disk; reads, updates and writes at once",
        "HybridAdam",
        0.5,
    ),
    Configuration(
        "full",
        "tensorstow\n100% disk",
        "all states on disk; reads, updates and writes at once, inside opt.step()",
        "HybridAdam",
        1.0,
    ),
    Configuration(
        "forward",
        "tensorstow\nforward",
        'all states on disk; overlap="forward": updates run during the next forward',
        "AdamW",
        1.0,
        overlap="forward",
    ),
    Configuration(
        "backward",
        "tensorstow\nbackward",
        'all states on disk; overlap="backward": updates run during the backward that computes'
        " their gradients",
        "AdamW",
        1.0,
        overlap="backward",
    ),
    Configuration(
        "stow",
        "stow\nall disk",
        f"tensorstow.stow: weights and states on disk; in RAM are the embedding and {_BLOCKS_HELD}"
        " of the blocks; updates run during backward",
        "stow",
        1.0,
        overlap="backward",
    ),
)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of the GPT-2 that is trained, of its batches, and of the chunks on disk."""

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
        """Return the number of parameters: the blocks and the rest."""
        return self.layers * self._block + self._rest

    @property
    def weight_ram_budget(self) -> int:
        """Return the RAM for weights on disk: that of the rest, and of the blocks in RAM."""
        held = self._rest + _BLOCKS_HELD * self._block
        return _WEIGHT_BYTES * held + (1 + _BLOCKS_HELD) * _ALIGNMENT_OF_A_UNIT

    @property
    def _block(self) -> int:
        return 12 * self.width**2 + 13 * self.width

    @property
    def _rest(self) -> int:
        """Embeddings, which the head shares, and the last norm."""
        return (self.vocabulary + self.positions) * self.width + 2 * self.width

    @property
    def row_disk_bytes(self) -> int:
        """Return the free space that the largest configuration needs, alignment included."""
        return (ADAM_STATE_BYTES + _WEIGHT_BYTES) * self.parameters + DEFAULT_RING_BYTES

    @property
    def run_disk_bytes(self) -> int:
        """Return the free space that the killed run needs: two extents of each chunk."""
        return 2 * self.row_disk_bytes

    @property
    def rows_disk_bytes(self) -> int:
        """Return the free space that all configurations need at the same time."""
        return sum(self.row_disk_bytes for row in CONFIGURATIONS if row.is_offloaded)

    @property
    def rows_ram_bytes(self) -> int:
        """Return the RAM that all configurations need at the same time, with weights and states."""
        per_parameter = sum(
            _WEIGHT_BYTES + ADAM_STATE_BYTES * (1 - row.fraction) for row in CONFIGURATIONS
        )
        working = (_WEIGHT_BYTES + ADAM_STATE_BYTES) * self.parameters  # the one that is running
        held = int(per_parameter * self.parameters) + working
        return held + len(CONFIGURATIONS) * _LEAST_PROCESS_BYTES

    def policy(self, row: Configuration) -> PipelinePolicy:
        """Return how ``row`` moves its states."""
        return PipelinePolicy(chunk_elements=self.chunk_elements, schedule=row.schedule)


FULL = ModelSize(
    layers=12,
    heads=12,
    width=768,
    vocabulary=50257,
    positions=1024,
    batch=4,
    sequence=128,
    chunk_elements=PipelinePolicy().chunk,
)
"""The default ``GPT2Config()`` with batches of 4 x 128."""

SMALL = ModelSize(
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
