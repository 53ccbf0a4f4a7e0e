"""TensorNVMe's names that are not here say what to use instead."""

import pytest

import tensorstow.tensornvme
from tensorstow.base.errors import AbsentAttributeError, AbsentError


@pytest.mark.parametrize("name", ["Offloader", "get_backends", "probe_backend"])
def test_the_extension_is_refused_with_advice(name: str) -> None:
    with pytest.raises(
        AbsentError, match=f"{name} is not in .*: .*DiskOffloader.*tensorstow doctor"
    ):
        exec(f"from tensorstow.tensornvme._C import {name}")  # noqa: S102


def test_other_names_are_no_attributes() -> None:
    with pytest.raises(AbsentAttributeError, match=r"_C is not in tensorstow\.tensornvme"):
        tensorstow.tensornvme._C  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        tensorstow.tensornvme.Nothing  # noqa: B018
