"""The names of tiers are what users and files write."""

import pytest

from tensorstow import Tier


def test_names() -> None:
    assert [str(tier) for tier in Tier] == ["device", "host", "disk"]


@pytest.mark.parametrize(
    ("name", "tier"),
    [
        ("cuda", Tier.DEVICE),
        ("gpu", Tier.DEVICE),
        ("cpu", Tier.HOST),
        ("ram", Tier.HOST),
        ("nvme", Tier.DISK),
    ],
)
def test_names_of_other_projects_are_taken(name: str, tier: Tier) -> None:
    assert Tier(name) is tier


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="tape"):
        Tier("tape")
