"""``colossalai.cluster``: the rank's position, and work for one rank alone."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from tensorstow.base.errors import OptionError
from tensorstow.base.launch import launched
from tensorstow.doorkit.keyword_table import Table, describes, honoured
from tensorstow.fsdp.sharding import rank_here, world_size

P = ParamSpec("P")
R = TypeVar("R")

_KEYWORDS: Table = {
    "msg": honoured("What is printed."),
    "process_group": honoured("The ranks that take part. Default: None, all."),
}


class DistCoordinator:
    """The place of this process among the ranks. One process without a group is rank 0 of one.

    The master is rank 0, the node's master the one with local rank 0.
    """

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return _place_in(None)[0]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return _place_in(None)[1]

    @property
    def local_rank(self) -> int:
        """The rank on this machine; -1 if no launcher sets it, 0 for one process alone."""
        rank = launched().local_rank
        alone = 0 if self.world_size == 1 else -1
        return alone if rank is None else rank

    @describes(_KEYWORDS)
    def is_master(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Return whether this is rank 0."""
        return _place_in(process_group)[0] == 0

    def is_node_master(self) -> bool:
        """Return whether this has local rank 0.

        Raises:
            OptionError: No launcher has set LOCAL_RANK.
        """
        if self.local_rank < 0:
            message = (
                "DistCoordinator was requested the node's master, and LOCAL_RANK is not set: start"
                " the ranks with torchrun, which sets it."
            )
            raise OptionError(message)
        return self.local_rank == 0

    @describes(_KEYWORDS)
    def is_last_process(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Return whether this is the last rank."""
        rank, size = _place_in(process_group)
        return rank == size - 1

    @describes(_KEYWORDS)
    def print_on_master(self, msg: str, process_group: dist.ProcessGroup | None = None) -> None:
        """Print on rank 0."""
        if self.is_master(process_group):
            print(msg)  # noqa: T201  # its purpose

    @describes(_KEYWORDS)
    def print_on_node_master(self, msg: str) -> None:
        """Print on local rank 0.

        Raises:
            OptionError: As of ``is_node_master``.
        """
        if self.is_node_master():
            print(msg)  # noqa: T201  # its purpose

    @describes(_KEYWORDS)
    @contextmanager
    def priority_execution(
        self, executor_rank: int = 0, process_group: dist.ProcessGroup | None = None
    ) -> Iterator[None]:
        """Let one rank run the block before the others do.

        Args:
            executor_rank: The rank that runs first.

        Yields:
            Nothing.
        """
        first = _place_in(process_group)[0] == executor_rank
        if not first:
            self.block_all(process_group)
        try:
            yield
        finally:
            # After an error too: the other ranks wait for this one.
            if first:
                self.block_all(process_group)

    @describes(_KEYWORDS)
    def block_all(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Wait until every rank is here.

        Raises:
            OptionError: The environment describes several ranks, and there is no process group.
        """
        if dist.is_initialized():
            dist.barrier(group=process_group)
        else:
            launched().refuse_unjoined("block_all() was called")

    @describes(_KEYWORDS)
    def destroy(self, process_group: dist.ProcessGroup | None = None) -> None:
        """End the process group."""
        if dist.is_initialized():
            dist.destroy_process_group(process_group)

    @describes(_KEYWORDS)
    def on_master_only(
        self, process_group: dist.ProcessGroup | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
        """Return what lets a function run on rank 0 alone.

        Returns:
            A decorator; on the other ranks the function returns None.
        """
        is_master = self.is_master(process_group)

        def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
            @functools.wraps(function)
            def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
                return function(*args, **kwargs) if is_master else None

            return call

        return decorate


def _place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this process's rank in a group, and how many there are."""
    if not dist.is_initialized():
        return rank_here(), world_size()
    return dist.get_rank(group), dist.get_world_size(group)
