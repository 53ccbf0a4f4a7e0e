"""What many tests share."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from ranks.pool import Ranks

if not torch.cuda.is_available():
    # Kernels of Triton then run as numpy. It is read when Triton is first imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse ids that differ from process to process: several could not share the tests out."""
    found = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if found:
        message = f"An address is in the id of {found[0]}: give ids=, or another value."
        raise pytest.UsageError(message)


def pytest_unconfigure() -> None:
    """Let the interpreter take apart what tests hid from the collector."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _share_of_the_cores() -> None:
    """Let torch's threads, which spin while they wait, leave other processes of tests theirs."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    threads = max(1, torch.get_num_threads() // processes)
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # of interpreters that tests start


@pytest.fixture(scope="module", autouse=True)
def _threads_put_back() -> Iterator[None]:
    """Leave the next file as many of torch's threads: commands and trainers set the number."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _no_rates_are_known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide what `tensorstow calibrate` measured here: plans are to be the same on every machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@contextmanager
def _environment_put_back() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module", autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """Leave no process group to the next file: which file that is differs from run to run.

    Nor variables of a rank, by which trainers would wait for others.
    """
    with _environment_put_back():
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def kept_environment() -> Iterator[None]:
    """Put back what libraries write to the environment."""
    with _environment_put_back():
        yield


@pytest.fixture(scope="module", autouse=True)
def _imported_apart() -> None:
    """Hide what is imported from the collector, which would take 0.2 seconds to look through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def garbage_apart() -> None:
    """Hide what earlier tests left from the collector, for tests that count what is open.

    Collecting it first is not enough: what is let go of in one pass can free more in the next.
    """
    gc.collect()
    gc.freeze()


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
