"""Meetings of ranks: all are there, or everybody learns who is not, and soon."""

import time
from functools import partial
from typing import Any

import pytest

from ranks.threads import coordinators, each
from tensorstow.base.errors import RankError
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
    """A store that counts the values which are read."""

    def __init__(self, store: Any) -> None:  # noqa: ANN401  # torch's
        self.store, self.read = store, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)

    def get(self, key: str) -> bytes:
        self.read += 1
        value: bytes = self.store.get(key)
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.read += len(keys)
        values: list[bytes] = self.store.multi_get(keys)
        return values


@pytest.mark.parametrize("world", [2, 4, 8])
def test_each_rank_but_one_reads_one_value(world: int) -> None:
    all_ranks = coordinators(world)
    for coordinator in all_ranks:
        coordinator._store = Counting(coordinator._store)  # type: ignore[assignment]
    gathered = each([partial(b.all_gather, "a commit", b.rank) for b in all_ranks])
    assert gathered == [list(range(world))] * world
    assert [b._store.read for b in all_ranks] == [world, *[1] * (world - 1)]  # type: ignore[attr-defined]


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


def test_who_fails_may_come_to_the_next_meeting() -> None:
    all_ranks = coordinators(2)

    def act(coordinator: Coordinator) -> list[int]:
        if coordinator.rank == 1:
            coordinator.report_error("one", OSError("no"))
        else:
            with pytest.raises(RankError):
                coordinator.all_gather("one")
        return coordinator.all_gather("two", coordinator.rank)

    assert each([partial(act, b) for b in all_ranks]) == [[0, 1]] * 2


def test_who_stays_away_is_named() -> None:
    first, _, last = coordinators(3, seconds=0.3)
    for error in each([partial(b.all_gather, "a commit") for b in (first, last)]):
        assert isinstance(error, RankError)
        assert str(error).startswith("Rank 1 did not come to a commit within 0.3 seconds")


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


def test_rank_0_stays_until_all_have_read() -> None:
    first, last = coordinators(2)
    first._store.set("0/1", '{"at": "a commit", "value": 7}')  # said by 1, which has not read
    assert first.all_gather("a commit") == [None, 7]
    left = []

    def read() -> None:
        time.sleep(0.3)
        left.append("read")
        last._store.add("0/read", 1)

    def leave() -> None:
        first.leave()
        left.append("left")

    each([read, leave])
    assert left == ["read", "left"]


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
