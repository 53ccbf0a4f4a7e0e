"""Objects belong to the process that made them, and the first failure ends their use."""

import os
import traceback

import pytest

from tensorstow.base.errors import ForkError, PoisonedError
from tensorstow.base.health import Health


def test_a_sound_object_may_be_used() -> None:
    health = Health("forked")
    health.check()
    assert health.is_ours
    assert health.owner == os.getpid()


def test_the_first_failure_is_the_cause_of_every_later_error() -> None:
    health = Health("forked", "It failed: {} Make another.")
    first = ValueError("the disk is full.")
    health.poison(first)
    health.poison(KeyError("later"))
    for _ in range(2):
        with pytest.raises(PoisonedError, match=r"It failed: the disk is full\. Make") as caught:
            health.check()
        assert caught.value.__cause__ is first


def test_a_failure_without_a_text_is_named() -> None:
    health = Health("forked")
    health.poison(KeyboardInterrupt())
    with pytest.raises(PoisonedError, match="KeyboardInterrupt was raised in it"):
        health.check()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_may_not_use_it() -> None:
    health = Health("made in the parent")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for check in (health.check, health.check_process):
                with pytest.raises(ForkError, match="made in the parent"):
                    check()
            status = int(health.is_ours)
        except BaseException:  # noqa: BLE001  # the child must not return into pytest
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
