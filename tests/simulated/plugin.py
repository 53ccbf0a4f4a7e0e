"""A pytest plugin (``-p simulated.plugin``): tests run on the simulated accelerator.

A test in whose work something is out of order fails, whatever its results are.
"""

from collections.abc import Iterator

import pytest

import simulated


@pytest.fixture(autouse=True)
def _order_of_work() -> Iterator[None]:
    simulated.native.synchronize()
    simulated.take_hazards()
    yield
    simulated.check_order()
