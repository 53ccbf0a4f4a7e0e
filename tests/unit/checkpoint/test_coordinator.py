"""Meetings of ranks: all are there, or everybody learns who is not, and soon."""

import itertools
import time
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from ranks.threads import coordinators, each
from tensorstow.base.errors import RankError
from tensorstow.checkpoint import coordinator
from tensorstow.checkpoint.coordinator import Coordinator


def test_everybody_hears_everybody() -> None:
    found = each([partial(b.all_gather, "a commit", {"from": b.rank}) for b in coordinators(3)])
    assert found == [[{"from": 0}, {"from": 1}, {"from": 2}]] * 3


def test_words_do_not_pile_up() -> None:
    all_ranks = coordinators(2)
    counts = []
    for _ in range(5):
        each([partial(b.all_gather, "a commit") for b in all_ranks])
        counts.append(all_ranks[0]._store.num_keys())
    assert counts[1:] == counts[:-1]


class Counting:
    """A store that counts what is asked of it, by the number of keys."""

    def __init__(self, store: Any) -> None:  # noqa: ANN401  # torch's
        self.store, self.keys = store, 0

    def __getattr__(self, name: str) -> object:
        method = getattr(self.store, name)

        def call(*arguments: Any) -> object:  # noqa: ANN401
            first = arguments[0]
            self.keys += len(first) if isinstance(first, list) else 1
            return method(*arguments)

        return call


def keys_asked_for(world: int) -> list[int]:
    """Return for how many keys each rank asks in a gather that its last rank is late for."""
    all_ranks = coordinators(world)
    stores = [Counting(b._store) for b in all_ranks]
    for each_rank, store in zip(all_ranks, stores, strict=True):
        each_rank._store = store  # type: ignore[assignment]

    def act(coordinator: Coordinator) -> list[int]:
        time.sleep(0.3 * (coordinator.rank == world - 1))
        return coordinator.all_gather("a commit", coordinator.rank)

    assert each([partial(act, b) for b in all_ranks]) == [list(range(world))] * world
    return [store.keys for store in stores]


def test_ranks_ask_for_as_many_keys_however_many_they_are() -> None:
    few, many = keys_asked_for(4), keys_asked_for(16)
    assert max(many[1:]) < 2 * max(few[1:])  # rank 0 alone asks for all ranks' keys


def test_who_fails_may_come_to_the_next_meeting_which_costs_no_more() -> None:
    all_ranks = coordinators(2)

    def act(coordinator: Coordinator) -> tuple[list[int], bool]:
        if coordinator.rank == 1:
            coordinator.report_error("one", OSError("no"))
        else:
            with pytest.raises(RankError):
                coordinator.all_gather("one")
        gathered = coordinator.all_gather("two", coordinator.rank)
        return gathered, any(coordinator._store.check([key]) for key in ("1/trouble", "left"))

    assert each([partial(act, b) for b in all_ranks]) == [([0, 1], False)] * 2


def test_values_may_be_longer_than_one_value_of_the_store() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [server, dist.TCPStore("127.0.0.1", server.port, is_master=False)]
    with patch.object(coordinator, "_numbers", itertools.repeat(0)):
        all_ranks = [Coordinator(store, rank, 2) for rank, store in enumerate(stores)]
    value = "x" * 5_000_000
    gathered = each([partial(b.all_gather, "a commit", value) for b in all_ranks])
    assert gathered == [[value, value]] * 2
    again = each([partial(b.all_gather, "a commit") for b in all_ranks])
    assert again == [[None, None]] * 2
    assert not server.check(["tensorstow/0/0/all/0"])


def test_who_is_late_does_not_go_on_alone() -> None:
    all_ranks = coordinators(3, seconds=0.3)
    first = each([partial(all_ranks[rank].all_gather, "a commit") for rank in (0, 1)])
    assert all("Rank 2 did not come" in str(error) for error in first)
    with pytest.raises(RankError, match="failed at a commit: RankError: Rank 2 did not"):
        all_ranks[2].all_gather("a commit")


def test_who_was_to_post_all_values_is_named() -> None:
    first, last = coordinators(2, seconds=0.3)
    first._post("a commit", {"value": None})  # and then it hangs
    with pytest.raises(RankError, match="Rank 0 did not come to a commit within"):
        last.all_gather("a commit")


def test_the_first_to_fail_is_named_to_all() -> None:
    all_ranks = coordinators(3, seconds=15.0)

    def act(coordinator: Coordinator) -> object:
        if coordinator.rank == 1:
            coordinator.report_error("the commit of step 4", OSError("disk full"))
            return None
        if coordinator.rank == 2:
            time.sleep(2.0)  # nobody waits for it
        return coordinator.all_gather("the commit of step 4")

    began = time.monotonic()
    found = each([partial(act, all_ranks[rank]) for rank in (0, 1)])
    assert time.monotonic() - began < 1.5
    assert isinstance(found[0], RankError)
    assert str(found[0]).startswith("Rank 1 failed at the commit of step 4: OSError: disk full")
    with pytest.raises(RankError, match="Rank 1 failed"):
        act(all_ranks[2])


def test_who_stays_away_is_named() -> None:
    first, _, last = coordinators(3, seconds=0.3)
    for error in each([partial(b.all_gather, "a commit") for b in (first, last)]):
        assert isinstance(error, RankError)
        assert "Rank 1 did not come to a commit within 0.3 seconds" in str(error)


def test_nobody_waits_for_one_who_left() -> None:
    first, last = coordinators(2, seconds=15.0)
    began = time.monotonic()
    last.leave()
    with pytest.raises(RankError, match="Rank 1 ended before a commit"):
        first.all_gather("a commit")
    assert time.monotonic() - began < 2.0


def test_who_left_behind_a_word_was_there() -> None:
    first, last = coordinators(2)

    def act(coordinator: Coordinator) -> list[int]:
        if coordinator is first:
            time.sleep(0.2)
        words = coordinator.all_gather("a commit", coordinator.rank)
        coordinator.leave()
        return words

    assert each([partial(act, first), partial(act, last)]) == [[0, 1]] * 2


def test_rank_0_returns_when_all_have_read() -> None:
    first, last = coordinators(2)
    first._store.set("0/1", '{"at": "a commit", "value": 7}')  # by 1, which has not read
    order = []

    def read() -> None:
        time.sleep(0.3)
        order.append("read")
        last._store.add("0/read", 1)

    def gather() -> None:
        assert first.all_gather("a commit") == [None, 7]
        order.append("returned")

    each([read, gather])
    assert order == ["read", "returned"]


def test_another_call_is_told_from_this() -> None:
    first, last = coordinators(2)
    found = each([partial(first.all_gather, "a commit"), partial(last.all_gather, "drop('x')")])
    assert "Rank 1 is at drop('x') while another one is at a commit" in str(found[0])
    assert "Rank 0 is at a commit while another one is at drop('x')" in str(found[1])


def test_ids_are_common_and_never_used_twice() -> None:
    all_ranks = coordinators(2)

    def act(coordinator: Coordinator) -> list[str]:
        ids = []
        for _ in range(2):
            ids.append(coordinator.next_id())
            coordinator.all_gather("a commit")
        return ids

    one, other = each([partial(act, b) for b in all_ranks])
    assert one == other
    assert len(set(one)) == 2
    assert one[0] != coordinators(1)[0].next_id()


def test_rank_0_decides() -> None:
    first, last = coordinators(2, seconds=0.3)
    first.put("due", "3")
    assert last.wait_for("due", lambda word: int(word) >= 2, "the decision") == "3"
    with pytest.raises(RankError, match="Rank 0 did not come to the decision"):
        last.wait_for("due", lambda word: int(word) >= 4, "the decision")


class Gone:
    def set(self, *_: object) -> None:
        message = "Connection reset by peer\nException raised from recvBytes"
        raise RuntimeError(message)


def test_a_store_that_is_gone_is_said_so(caplog: pytest.LogCaptureFixture) -> None:
    (coordinator,) = coordinators(1)
    coordinator._store = Gone()  # type: ignore[assignment]
    with pytest.raises(RankError, match=r"cannot be reached for a commit.*reset by peer'.*rank 0"):
        coordinator.all_gather("a commit")
    coordinator.report_error("a commit", OSError("disk full"))  # does not hide what failed
    assert "OSError('disk full') could not be reported" in caplog.text
    coordinator.leave()
