"""Budgets are sizes, read as people write them."""

import pytest

from tensorstow import Budget
from tensorstow.base.errors import OptionError


def test_sizes_are_bytes_or_text() -> None:
    budget = Budget(device="2GiB", host=30_000)
    assert budget.bytes_of("device") == 2 << 30
    assert budget.bytes_of("host") == 30_000
    assert budget.bytes_of("disk") is None


@pytest.mark.parametrize("given", [{"device": "20"}, {"device": 48}, {"host": -1}, {"disk": 1.5}])
def test_what_is_no_size_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(given))):
        Budget(**given)
