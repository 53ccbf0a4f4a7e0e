"""Ranks that are threads of one process, which is enough for all that only talks."""

import itertools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from tensorstow.checkpoint import coordinator
from tensorstow.checkpoint.coordinator import Coordinator


def coordinators(world: int, seconds: float = 20.0) -> list[Coordinator]:
    """Return one coordinator for each rank, all over one store."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=seconds))
    with patch.object(coordinator, "_numbers", itertools.repeat(0)):
        return [Coordinator(store, rank, world) for rank in range(world)]


def each(acts: list[Callable[[], Any]]) -> list[Any]:
    """Call all at once; return what each returned or raised."""
    found: list[Any] = [None] * len(acts)

    def call(rank: int) -> None:
        try:
            found[rank] = acts[rank]()
        except Exception as error:  # noqa: BLE001  # the test looks at it
            found[rank] = error

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank waits for ever"
    return found
