"""The values of ``Plan.activations``."""

import pytest

from tensorstow.base.activation_placement import activation_placement
from tensorstow.base.errors import OptionError


def test_ram_is_another_word_for_the_host() -> None:
    assert activation_placement("ram", "activations") == "host"
    assert activation_placement("recompute", "activations") == "recompute"


@pytest.mark.parametrize("given", ["kept", "device", None, 1])
def test_anything_else_is_refused_by_name(given: object) -> None:
    with pytest.raises(OptionError, match=r"units\['h'\]=.*'recompute'"):
        activation_placement(given, "units['h']")
