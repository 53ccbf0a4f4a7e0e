"""What each ``overlap=`` means."""

import pytest

from tensorstow import DelayedUpdate
from tensorstow.base.errors import OptionError
from tensorstow.base.update_on import timing_of


@pytest.mark.parametrize(
    ("overlap", "overlapped", "early", "by_module"),
    [
        ("none", False, False, False),
        ("forward", True, False, True),
        ("backward", True, True, False),
        (DelayedUpdate(3), True, False, False),
    ],
)
def test_what_follows(overlap: object, *, overlapped: bool, early: bool, by_module: bool) -> None:
    timing = timing_of(overlap)
    assert timing.is_overlapped == overlapped
    assert (timing.begins_early, timing.waits_by_module) == (early, by_module)
    word = f'"{overlap}"' if isinstance(overlap, str) else str(overlap)
    assert timing.keyword == f"overlap={word}"


@pytest.mark.parametrize("overlap", ["Backward", None, ["none"]])
def test_what_no_timing_is_is_refused(overlap: object) -> None:
    with pytest.raises(OptionError, match=r"^overlap=.* was given: it is "):
        timing_of(overlap)
