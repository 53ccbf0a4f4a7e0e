"""What a commit holds of frozen weights in files: tests/unit/fsdp/test_frozen_files.py trains."""

import pytest
import torch

from tensorstow.base.errors import DamageError, OptionError
from tensorstow.checkpoint.frozen_weights import (
    CHECKSUMS,
    checksum_of,
    is_in_files,
    is_same_bytes,
    read_checksums,
    validate_checksums,
)


def test_a_plain_tensor_is_in_no_file() -> None:
    assert not is_in_files(torch.zeros(3))


def test_other_values_are_refused_by_name() -> None:
    weight = torch.arange(12.0).view(3, 4)
    checksums = {"a": checksum_of(weight), "gone": 1}
    validate_checksums([("a", weight), ("b", torch.ones(2))], checksums)
    validate_checksums([("a", weight.t().contiguous().t())], checksums)
    weight[2, 3] += 1
    with pytest.raises(OptionError, match="a has other values than in the run"):
        validate_checksums([("a", weight)], checksums)


def test_bytes_count_and_not_values() -> None:
    zero, nan = torch.zeros(2), torch.full((2,), torch.nan)
    assert is_same_bytes(nan, nan.clone())
    assert not is_same_bytes(zero, -zero)


@pytest.mark.parametrize("found", [[], {"a": "x"}, {"a": -1}, {"a": True}, {"a": 1 << 65}])
def test_what_no_commit_has_is_damage(found: object) -> None:
    with pytest.raises(DamageError, match="cannot be"):
        read_checksums({CHECKSUMS: found})


def test_a_commit_without_files_has_no_checksums() -> None:
    assert read_checksums({}) == {}
    assert read_checksums({CHECKSUMS: {"a": 5}}) == {"a": 5}
