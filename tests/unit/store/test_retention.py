"""Which generations are meant, and which may go."""

import pytest

from tensorstow.base.errors import OptionError
from tensorstow.store.records import Summary
from tensorstow.store.retention import check_name, droppable, find

KEPT = [
    Summary(number, number, 0.0, names, 0, 0)
    for number, names in ((2, ("a",)), (3, ()), (5, ("b", "c")), (6, ()), (7, ()))
]


@pytest.mark.parametrize(("keep", "gone"), [(None, [3, 6, 7]), (3, [6, 7]), (5, [3, 6, 7])])
def test_what_a_commit_replaces(keep: int | None, gone: list[int]) -> None:
    assert droppable(KEPT, keep) == gone


def test_by_number_or_name() -> None:
    assert find(KEPT, 6).number == 6
    assert find(KEPT, "c").number == 5
    with pytest.raises(OptionError, match=r"snapshot 'd' .* There are: 2 \(a\), 3, 5 \(b, c\), 6"):
        find(KEPT, "d")
    with pytest.raises(OptionError, match=r"generation 1 .* none at all"):
        find([], 1)


def test_what_may_be_named() -> None:
    assert check_name(KEPT, "new", None).number == 7
    assert check_name(KEPT, "new", 2).number == 2
    for kept, name, told in ((KEPT, "a", "has that name"), (KEPT, "7", "letter"), ([], "x", "yet")):
        with pytest.raises(OptionError, match=told):
            check_name(kept, name, None)
