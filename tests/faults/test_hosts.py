"""Runs of two hosts: the bits of one host, a lost host, a cut cable, disks in the wrong host."""

import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hosts import Host, Hosts, Program, end, start_ranks, why_not
from tensorstow import Plan
from tensorstow.fsdp.units import units_of
from tensorstow.planner.network import Network, traffic_of
from tensorstow.planner.sizes import Sizes

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"hosts cannot be made: {why_not()}")
LAST = 6


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(tmp_path) as both:
        yield both


def start(places: Sequence[Host], last: int, **how: Any) -> list[Program]:  # noqa: ANN401
    """Start a rank at each of ``places``, to train to step ``last``."""
    words = ("-m", "ranks.hosted", places[0].local / "run", str(last), json.dumps(how))
    return start_ranks(places, *words)


def train(places: Sequence[Host], last: int = LAST, **how: Any) -> list[str]:  # noqa: ANN401
    """Train to step ``last`` at ``places``; return what each rank wrote."""
    return end(start(places, last, **how), *[0] * len(places))


def steps(written: str) -> dict[int, str]:
    """Return what a rank told of each step: its weights, or the bytes sent by then."""
    return {
        int(step): digest
        for step, digest in re.findall(r"^step (\d+) (\w+)$", written, re.MULTILINE)
    }


def start_of(written: Sequence[str]) -> int:
    """Return the step at which all ranks resumed."""
    (start,) = {
        step for text in written for step in re.findall(r"^resumed (\d+)$", text, re.MULTILINE)
    }
    return int(start)


def wait_for_step(step: int, rank: Program) -> None:
    """Wait until a rank has taken ``step``."""
    deadline = time.monotonic() + 60
    while step not in steps(rank.written()):
        assert time.monotonic() < deadline, rank.written()
        time.sleep(0.01)


def test_two_hosts_with_a_slow_cable_have_the_bits_of_one(hosts: Hosts) -> None:
    first, second = hosts
    (wanted,) = {tuple(steps(text).items()) for text in train([first, first])}
    first.run("rm", "-r", first.local / "run", first.local / "weights")
    before = first.sent()
    first.slow_down("20mbit")
    second.slow_down("20mbit")
    assert {tuple(steps(text).items()) for text in train([first, second])} == {wanted}
    assert len(wanted) == LAST
    assert first.sent() - before > 100_000  # weights and gradients went over the cable
    # Each host has its own part, and the whole weights are where rank 0 is.
    assert sorted(path.name for path in (first.disk / "run").iterdir()) == ["rank-0-of-2"]
    assert [path.name for path in (second.disk / "run").iterdir()] == ["rank-1-of-2"]
    assert (first.disk / "weights").exists()
    assert not (second.disk / "weights").exists()


def test_a_run_goes_on_when_a_host_was_lost(hosts: Hosts) -> None:
    first, second = hosts
    wanted = steps(train([first, first], 9)[0])
    first.run("rm", "-r", first.local / "run")
    ranks = start([first, second], 1000)
    wait_for_step(3, ranks[0])
    second.kill()
    survivor, lost = end(ranks, 1, -9)
    assert re.search(r"^\w*Error: ", survivor, re.MULTILINE)  # it did not train on alone
    assert not re.search(r"^\w*Error: ", lost, re.MULTILINE)
    hosts.restart(1)
    written = train(list(hosts), 9)
    assert start_of(written) >= 3
    assert all(steps(text).items() <= wanted.items() for text in written)
    assert 9 in steps(written[0])


def test_a_cut_cable_ends_the_ranks_and_loses_nothing(hosts: Hosts) -> None:
    ranks = start(list(hosts), 1000)
    wait_for_step(3, ranks[0])
    hosts[0].plug(into=False)
    written = end(ranks, 1, 1)
    assert all(re.search(r"^\w*Error: ", t, re.MULTILINE) for t in written), "\n".join(written)
    hosts[0].plug(into=True)
    last = max(steps(written[0])) + 2
    again = train(list(hosts), last)
    assert last - 2 <= start_of(again) + 1 <= last
    assert last in steps(again[1])


def test_hosts_in_another_order_are_told_where_the_commits_are(hosts: Hosts) -> None:
    first, second = hosts
    train([first, second])
    ranks = start([second, first], LAST + 1)
    written = end(ranks, 1, 1)
    for text in written:
        assert "Newer commits of ranks 1 than their own are on host1, where rank 0 is now" in text
    assert steps(written[0]) == steps(written[1]) == {}
    # Nothing was lost by it.
    assert list(steps(train([first, second], LAST + 1)[0])) == [LAST + 1]


def test_copies_that_are_older_do_not_take_a_run_back(hosts: Hosts) -> None:
    first, second = hosts
    train([first, second])
    # Each host gets the other's directory too, and the hosts change places for a while.
    for host, path in ((first, second.disk), (second, first.disk)):
        host.run("cp", "-rn", path / "run", host.local)
    train([second, first], LAST + 2)
    for text in end(start([first, second], LAST + 4), 1, 1):
        assert "Newer commits of ranks 1 than their own are on host0" in text
    assert start_of(train([second, first], LAST + 4)) == LAST + 2


def test_what_another_run_has_left_is_no_newer_commit(hosts: Hosts) -> None:
    first, second = hosts
    train([first, second], 2)
    for host in hosts:
        host.run("mv", host.local / "run", host.local / "kept")
    train([second, first])  # another run, which leaves a store of rank 1 on the first host
    first.run("mv", first.local / "run" / "rank-1-of-2", first.local / "kept")
    for host in hosts:
        host.run("rm", "-r", host.local / "run")
        host.run("mv", host.local / "kept", host.local / "run")
    assert start_of(train([first, second], 3)) == 2


def test_a_snapshot_of_other_ranks_is_on_every_host_or_refused(hosts: Hosts) -> None:
    first, second = hosts
    train([first], 2, snapshot="s")
    second.run("cp", "-r", first.disk / "run", second.local)
    train([first, second], 4)  # the old stores stay, because of the snapshot
    second.run("find", second.local / "run", "-maxdepth", "1", "-type", "f", "-delete")
    for text in end(start([first, second], 5, which="s"), 1, 1):
        assert "not all of its stores are there on every machine" in text
    assert start_of(train([first, second], 5)) == 4


def test_copies_of_other_numbers_of_ranks_are_of_one_moment(hosts: Hosts) -> None:
    first, second = hosts
    train([first], 4)
    second.run("cp", "-r", first.disk / "run", second.local)
    train([first])
    for text in end(start([first, second], LAST + 2), 1, 1):
        assert f"rank 0 would go on from step {LAST}, and rank 1 from step 4" in text
    second.run("rm", "-r", second.local / "run")
    second.run("cp", "-r", first.disk / "run", second.local)
    assert start_of(train([first, second], LAST + 2)) == LAST


def test_a_host_with_an_empty_disk_is_told_that_its_part_is_missing(hosts: Hosts) -> None:
    first, second = hosts
    train([first, second])
    second.run("rm", "-r", second.local / "run")
    ranks = start([first, second], LAST + 1)
    written = end(ranks, 1, 1)
    assert "RankError: The ranks have no commit in common" in written[0]
    assert f"rank 0: {LAST}; rank 1: nothing" in written[0], written[0]


def test_other_numbers_of_ranks_need_all_stores_on_every_host(hosts: Hosts) -> None:
    first, second = hosts
    train([first, second])
    ranks = start([first, first, second, second], LAST + 1)
    written = end(ranks, 1, 1, 1, 1)
    assert "not all of its stores are there on every machine: rank 0 finds" in written[0]
    # With them it goes on.
    for path in (first.disk / "run" / "rank-0-of-2", second.disk / "run" / "rank-1-of-2"):
        for host in hosts:
            host.run("cp", "-rn", path, host.local / "run")
    written = train([first, first, second, second], LAST + 1)
    assert list(steps(written[3])) == [LAST + 1]
    assert not any("could not be removed" in text for text in written), written
    # Each host's copies of the old stores are gone.
    assert [sorted(path.name for path in (host.disk / "run").iterdir()) for host in hosts] == [
        ["rank-0-of-4", "rank-1-of-4"],
        ["rank-2-of-4", "rank-3-of-4"],
    ]


def test_old_stores_on_one_host_do_not_hold_up_a_run(hosts: Hosts) -> None:
    first, second = hosts
    train([first])
    second.run("cp", "-r", first.disk / "run", second.local / "run")
    first.run("cp", "-r", first.local / "run", first.local / "kept")
    train([first, second], LAST + 1)
    first.run("cp", "-rT", first.local / "kept", first.local / "run")
    assert list(steps(train([first, second], LAST + 2)[0])) == [LAST + 2]


WAYS: list[tuple[int, dict[str, Any]]] = [
    (1, {"stage": 1, "accumulation_steps": 2, "dtype": "bfloat16"}),
    (1, {"stage": 0, "accumulation_steps": 2, "dtype": "bfloat16"}),
    (3, {"stage": 3, "replicas": 3}),
    (1, {"stage": 3}),
    (1, {"stage": 3, "accumulation_steps": 2}),
    (1, {"stage": 1, "accumulation_steps": 2}),
    (1, {"stage": 0, "accumulation_steps": 2}),
    (2, {"stage": 3}),
    (2, {"stage": 3, "replicas": 2}),
    (2, {"stage": 2}),
    (4, {"stage": 3}),
    (4, {"stage": 0}),
]


@pytest.mark.parametrize(("on_host", "way"), WAYS, ids=str)
def test_the_plan_knows_what_goes_over_the_network(
    hosts: Hosts, on_host: int, way: dict[str, Any]
) -> None:
    first, second = hosts
    places = [first] * on_host + [second] * on_host
    sent = steps(train(places, 5, **way, width=256, silent=True)[0])
    dtype = getattr(torch, way.get("dtype", "float32"))
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3))).to(dtype)
    plan = Plan(**{name: value for name, value in way.items() if name != "dtype"})
    traffic = traffic_of(
        plan, Sizes.of(units_of(model), 2 * on_host), Network(2, 1e9, is_gloo=True)
    )
    # Headers of packets, and answers to them, come on top.
    assert 1.0 <= (int(sent[5]) - int(sent[1])) / 4 / traffic.bytes < 1.06
