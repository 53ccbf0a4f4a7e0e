"""What scripts build before they train."""

import pytest

from tensorstow.base.errors import AbsentError
from tensorstow.deepspeed import ops
from tensorstow.deepspeed.ops.aio import AsyncIOBuilder
from tensorstow.deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder


@pytest.mark.parametrize("builder", [CPUAdamBuilder, FusedAdamBuilder])
def test_kernels_are_there_already(builder: type[CPUAdamBuilder]) -> None:
    assert builder().is_compatible()
    assert ops.__compatible_ops__[builder.NAME]
    with pytest.raises(AbsentError, match=r"adam_update is a function of upstream's"):
        _ = builder().load().adam_update
    assert not hasattr(builder().load(), "__wrapped__")


def test_io_is_found_at_both_places() -> None:
    assert ops.op_builder.AsyncIOBuilder is AsyncIOBuilder


def test_other_extensions_are_not_here() -> None:
    assert not ops.__compatible_ops__["fused_lamb"]
