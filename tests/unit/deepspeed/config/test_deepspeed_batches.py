"""train = micro * accumulation * world: any one is derived, and all are checked."""

import pytest

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.config.reading import batch_of
from tensorstow.deepspeed.config.settings import Batch


@pytest.mark.parametrize(
    ("given", "derived"),
    [
        ((32, 4, 2), Batch(32, 4, 2)),
        ((32, 4, None), Batch(32, 4, 2)),
        ((32, None, 2), Batch(32, 4, 2)),
        ((None, 4, 2), Batch(32, 4, 2)),
        ((32, None, None), Batch(32, 8, 1)),
        ((None, 4, None), Batch(16, 4, 1)),
    ],
)
def test_what_is_missing_is_derived(
    given: tuple[int | None, int | None, int | None], derived: Batch
) -> None:
    assert batch_of(*given, world=4) == derived


@pytest.mark.parametrize(
    ("given", "arithmetic"),
    [
        ((32, 4, 4), "4 x 4 x 4 = 64"),
        ((30, None, 2), "30 / (2 x 4) is 3.75"),
        ((30, 4, None), "30 / (4 x 4) is 1.875"),
        ((2, None, None), "2 / (1 x 4) is 0.5"),
        ((None, None, 2), "Neither train_batch_size nor train_micro_batch_size_per_gpu"),
        ((None, None, None), "Neither"),
    ],
)
def test_what_does_not_come_out_is_refused_with_the_arithmetic(
    given: tuple[int | None, int | None, int | None], arithmetic: str
) -> None:
    with pytest.raises(OptionError) as caught:
        batch_of(*given, world=4)
    assert arithmetic in str(caught.value)
