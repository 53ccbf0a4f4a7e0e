"""What many tests share."""

from collections.abc import Callable, Iterator

import pytest

from ranks.pool import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Give processes by their number, started when first asked for."""
    pools: dict[int, Ranks] = {}

    def get(world: int) -> Ranks:
        if world not in pools:
            pools[world] = Ranks(world)
        return pools[world]

    yield get
    for pool in pools.values():
        pool.close()
