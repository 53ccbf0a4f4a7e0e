"""Python's collector is off inside, and afterwards as it was."""

import gc

import pytest

from tensorstow.cli.collector import collector_paused


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_afterwards_as_it_was(was_on: bool) -> None:  # noqa: FBT001
    before = gc.isenabled()
    (gc.enable if was_on else gc.disable)()
    try:
        with collector_paused():
            inside = gc.isenabled()
        assert not inside
        assert gc.isenabled() == was_on
    finally:
        (gc.enable if before else gc.disable)()
