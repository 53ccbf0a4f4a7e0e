"""The names of placements are what users and files write."""

from tensorstow.base.activation_placement import ActivationPlacement


def test_names() -> None:
    assert list(map(repr, ActivationPlacement)) == ["'keep'", "'recompute'", "'host'", "'disk'"]
    assert ActivationPlacement("ram") is ActivationPlacement.HOST
