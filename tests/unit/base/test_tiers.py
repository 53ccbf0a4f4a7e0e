"""The names of tiers are what users and files write."""

from tensorstow import Tier


def test_names() -> None:
    assert [str(tier) for tier in Tier] == ["device", "host", "disk"]
