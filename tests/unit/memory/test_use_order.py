"""What comes next, and what leaves first."""

from hypothesis import given
from hypothesis import strategies as st

from tensorstow.memory.use_order import UseOrder, in_order_of_leaving

NAMES = st.lists(st.sampled_from("abcdef"), max_size=9)


def test_a_forward_and_its_backward_are_told_apart() -> None:
    order: UseOrder[str] = UseOrder()
    for _ in range(2):
        for used in "abcba":
            order.record(used)
    order.record("a")
    order.record("b")
    following = order.following()
    assert "".join(next(following) for _ in range(8)) == "cbaabcba"


@given(NAMES, NAMES)
def test_nothing_leaves_before_what_is_used_later(
    candidates: list[str], upcoming: list[str]
) -> None:
    candidates = list(dict.fromkeys(candidates))
    leaving = in_order_of_leaving(candidates, upcoming)
    unused = [c for c in candidates if c not in upcoming]
    used = leaving[len(unused) :]
    assert leaving[: len(unused)] == unused
    assert sorted(leaving) == sorted(candidates)
    assert [upcoming.index(c) for c in used] == sorted(map(upcoming.index, used), reverse=True)
