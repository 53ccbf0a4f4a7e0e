"""States of moving bytes: only legal moves, and no move while a transfer fails."""

from itertools import product

import pytest

from tensorstow.memory.moving_bytes import LEGAL, ByteState, MovingBytes


class Transfer:
    """A transfer that is over when it was waited for, perhaps with an error."""

    def __init__(self, error: OSError | None = None) -> None:
        self.error = error
        self.is_over = False

    def done(self) -> bool:
        return self.is_over

    def wait(self) -> None:
        self.is_over = True
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(("before", "after"), [*product(ByteState, repeat=2)])
def test_a_move_that_is_not_in_the_table_is_an_error(before: ByteState, after: ByteState) -> None:
    moving = MovingBytes()
    moving.state = before
    if after in LEGAL[before]:
        moving.move(after)
    else:
        with pytest.raises(AssertionError, match=f"{before.name} cannot become {after.name}"):
            moving.move(after)
    assert moving.state is (after if after in LEGAL[before] else before)


def test_every_transfer_is_waited_for_and_the_first_error_raised_again() -> None:
    moving, transfers = MovingBytes(), [Transfer(), Transfer(OSError("first")), Transfer(OSError())]
    moving.begin(ByteState.READING, *transfers)  # type: ignore[arg-type]
    assert not moving.is_over()
    for _ in range(2):
        with pytest.raises(OSError, match="first"):
            moving.settle()
        assert (moving.state, moving.is_over()) == (ByteState.READING, True)


def test_memory_is_left_when_no_transfer_uses_it() -> None:
    moving, transfers = MovingBytes(), [Transfer(OSError()), Transfer()]
    moving.begin(ByteState.READING, *transfers)  # type: ignore[arg-type]
    moving.leave()
    assert (moving.state, moving.transfers) == (ByteState.ABSENT, [])
    assert all(transfer.is_over for transfer in transfers)


def test_bytes_are_present_once_they_are_checked() -> None:
    moving = MovingBytes()
    moving.begin(ByteState.READING, Transfer())  # type: ignore[arg-type]
    states: list[ByteState] = []
    for _ in range(2):
        moving.settle(lambda: states.append(moving.state))
    assert (states, moving.state) == ([ByteState.READING], ByteState.PRESENT)
