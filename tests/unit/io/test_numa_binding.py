"""Where native threads run: on this machine's cores, as if they were on several nodes."""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ranks.halved
from ranks.halved import Started
from tensorstow import AdamW, PipelinePolicy, _native
from tensorstow.base import nodes
from tensorstow.base.errors import OptionError
from tensorstow.io import local_share, numa_binding
from tensorstow.io.arena import Arena
from tensorstow.io.engine import DEPTH, open_engine, probe_backend
from tensorstow.io.numa_binding import bind_threads
from tensorstow.states.kernels import prepare_kernels
from topology import make_nodes

CORES = sorted(os.sched_getaffinity(0))
FIRST, LAST = {CORES[0]}, set(CORES[1:])
FAR = 999
"""A node that no machine has."""

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="one core is one node")

AsRank = Callable[..., None]


@pytest.fixture
def as_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsRank]:
    """Give what makes this process a rank on two nodes, the first of which has one core."""
    folder = make_nodes(tmp_path / "nodes", {0: str(CORES[0]), FAR: ",".join(map(str, CORES[1:]))})
    for name, value in vars(numa_binding._Process).items():
        if not name.startswith("_"):
            monkeypatch.setattr(numa_binding._Process, name, value)
    monkeypatch.setattr(numa_binding._Process, "is_warned", False)

    def become(rank: int, count: int = 2) -> None:
        monkeypatch.setattr(nodes, "_NODES", folder)
        monkeypatch.setattr(local_share, "launcher_cores", frozenset)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(count))
        monkeypatch.setenv("LOCAL_RANK", str(rank))

    yield become
    monkeypatch.undo()
    prepare_kernels()


@pytest.mark.parametrize(("rank", "cores"), [(0, FIRST), (1, LAST)])
@pytest.mark.parametrize("backend", ["threads", "uring"])
def test_threads_of_an_engine_stay_on_the_cores_of_the_ranks_node(
    backend: str, rank: int, cores: set[int], as_rank: AsRank
) -> None:
    if probe_backend(backend) is not None:
        pytest.skip("not here")
    as_rank(rank)
    started = Started()
    engine = open_engine(backend, depth=3)
    assert engine.backend == backend
    assert started.come_to(cores, 3 if backend == "threads" else 1)
    assert os.sched_getaffinity(0) == set(CORES)  # the caller's thread is where it was


def test_threads_of_the_update_stay_there_and_move_with_it(as_rank: AsRank) -> None:
    as_rank(1)
    prepare_kernels(PipelinePolicy(threads=3))
    as_rank(0)
    started = Started()
    prepare_kernels(PipelinePolicy(threads=3))
    assert started.come_to(FIRST, _native.pool_threads() - 1)
    started = Started()
    prepare_kernels(PipelinePolicy(node="any", threads=3))
    assert not started.come_to(FIRST, _native.pool_threads() - 1, seconds=0.1)
    assert started.come_to(set(CORES), _native.pool_threads() - 1)


def test_an_optimizer_of_one_rank_moves_nothing_else(as_rank: AsRank, tmp_path: Path) -> None:
    as_rank(1)
    policy = PipelinePolicy(backend="threads", threads=2)
    assert prepare_kernels(policy).threads >= 2
    train(tmp_path, policy=policy, keep=Started())


def train(
    directory: Path,
    *,
    policy: PipelinePolicy,
    states: str = "disk",
    keep: Started | None = None,
) -> list[torch.Tensor]:
    """Take three steps; return weights and states."""
    weights = ranks.halved.make_weights()
    optimizer = AdamW(
        weights,
        lr=1e-2,
        states=states,
        policy=policy,
        **({"dir": directory, "durability": "none"} if states == "disk" else {}),
    )
    ranks.halved.train(optimizer, weights)
    if keep is not None:
        assert keep.come_to(LAST, 9)  # the scheduler, and the I/O engine's 8
        assert os.sched_getaffinity(0) == set(CORES)
    held = optimizer.state_dict()["state"]
    kept = [held[k][name].clone() for k in held for name in ("exp_avg", "exp_avg_sq")]
    optimizer.close()
    return [*weights, *kept]


def test_no_bit_depends_on_threads_nodes_or_depth(as_rank: AsRank, tmp_path: Path) -> None:
    expected = train(tmp_path, policy=PipelinePolicy(), states="ram")
    ways = [
        (0, 1, PipelinePolicy()),
        (0, 2, PipelinePolicy(threads=3)),
        (1, 2, PipelinePolicy(depth=1)),
        (2, 5, PipelinePolicy(node=0, threads=2)),
        (1, 4, PipelinePolicy(node="any", depth=5)),
    ]
    for rank, count, policy in ways:
        as_rank(rank, count)
        found = train(tmp_path, policy=policy)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), policy


def test_a_named_node_holds_until_another_is_named(as_rank: AsRank) -> None:
    as_rank(0, 1)
    assert bind_threads().nodes == ()
    assert bind_threads(FAR).nodes == bind_threads().nodes == (FAR,)
    assert _native.thread_cores() == sorted(LAST)
    assert bind_threads("any").nodes == bind_threads().nodes == ()
    assert _native.thread_cores() == []


def test_a_node_that_is_not_there_is_refused_and_changes_nothing(as_rank: AsRank) -> None:
    as_rank(1)
    before = bind_threads()
    with pytest.raises(OptionError, match=r"node=5 .*: 0, 999\."):
        open_engine(node=5)
    assert bind_threads() == before


def test_ranks_of_one_machine_share_the_depth_of_its_disk(as_rank: AsRank) -> None:
    for count, depths in ((1, [32]), (3, [11, 11, 10]), (64, [1])):
        for rank, depth in enumerate(depths):
            as_rank(rank, count)
            assert open_engine("threads").depth == depth
    assert open_engine("threads", depth=7).depth == 7
    assert sum((11, 11, 10)) == DEPTH


def policy_of(address: int) -> str:
    """Return where the kernel takes the pages of an address from."""
    try:
        lines = Path("/proc/self/numa_maps").read_text(encoding="ascii").splitlines()
    except OSError:
        pytest.skip("this kernel does not tell where memory comes from")
    begun = [line.split() for line in lines if int(line.split()[0], 16) <= address]
    return begun[-1][1]


def test_memory_comes_from_the_ranks_node(as_rank: AsRank) -> None:
    plain = Arena(1 << 20, in_children=False)
    as_rank(0)
    bind_threads()
    arena = Arena(5 << 20, in_children=False)
    if numa_binding._Process.is_warned:
        pytest.skip("this container may not bind memory")
    assert policy_of(arena.address).startswith("prefer")
    assert policy_of(arena.address).endswith(":0")
    assert policy_of(plain.address) == "default"
    assert arena.tensor(0, 5 << 20, torch.uint8).sum() == 0


def test_memory_that_cannot_be_bound_is_used_as_it_is_with_one_warning(
    as_rank: AsRank, caplog: pytest.LogCaptureFixture
) -> None:
    as_rank(1)
    bind_threads()
    with caplog.at_level(logging.WARNING):
        arenas = [Arena(4096, in_children=False) for _ in range(2)]
    (said,) = [record.message for record in caplog.records if "mbind" in record.message]
    assert "NUMA node 999" in said
    assert all(arena.tensor(0, 4096, torch.uint8).sum() == 0 for arena in arenas)


def test_cores_that_no_thread_may_run_on_are_an_error(as_rank: AsRank) -> None:
    as_rank(0)
    before = _native.thread_cores()
    with pytest.raises(OSError, match="sched_setaffinity"):
        _native.set_thread_cores([4000])
    with pytest.raises(OSError, match="below 0"):
        _native.set_thread_cores([-1])
    assert _native.thread_cores() == before
