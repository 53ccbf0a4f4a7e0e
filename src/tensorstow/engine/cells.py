"""A cell: this rank's bytes of one parameter in host memory, and who may read them when."""

from collections.abc import Callable

import torch

Wait = Callable[[], None]


class Cell:
    """One parameter's shard, padded to the size that all ranks' shards have.

    ``rows`` of the padded tensor's first dimension are this rank's; FSDP2 gathers the padding too.
    """

    def __init__(self, padded: torch.Tensor, rows: int) -> None:
        """Take ``padded``, which is contiguous host memory."""
        self.padded = padded
        self.rows = rows
        self.home = padded.narrow(0, 0, rows)
        """This rank's elements, without padding: what the optimizer updates."""
        self.before_read: Wait = _at_once
        """Returns when the weight is the newest one."""

    def read(self) -> torch.Tensor:
        """Return the padded weight, the newest one."""
        self.before_read()
        return self.padded


def _at_once() -> None:
    pass
