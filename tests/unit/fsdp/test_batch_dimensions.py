"""Where the batch is in what modules take and return: from two batches, never from one."""

import re
from typing import Any

import pytest
import torch

from tensorstow.base.errors import OptionError
from tensorstow.fsdp.batch_dimensions import (
    BatchDimensions,
    ObservedCalls,
    UnknownBatchError,
    batch_of,
    samples_of,
)


def observed(
    takes: Any,  # noqa: ANN401
    returns: Any = lambda n: torch.zeros(n, 4),  # noqa: ANN401
    sizes: tuple[int, int] = (2, 3),
) -> BatchDimensions:
    """Return what two calls tell, with arguments and results that are functions of the size."""
    calls = []
    for size in sizes:
        seen = ObservedCalls()
        seen.observe("it", lambda *_, n=size, **__: returns(n), (), takes(size))
        calls.append(seen.calls["it"])
    return BatchDimensions.of(calls[0], calls[1], sizes)


def test_the_dimension_that_follows_the_batch_is_the_batch() -> None:
    found = observed(
        lambda n: {
            "hidden": torch.zeros(n, 2, 3),
            "seq_first": torch.zeros(3, n, 2),
            "rotary": (torch.zeros(1, 3), torch.zeros(3, 3)),
            "mask": None,
            "scale": torch.tensor(2.0),
            "use_cache": False,
        },
        lambda n: (torch.zeros(3, n), {"more": torch.zeros(n)}),
    )
    assert not found.unknown
    assert {name: d.batch for name, d in found.arguments.items()} == {
        "hidden": 0,
        "seq_first": 1,
        "rotary[0]": None,
        "rotary[1]": None,
        "scale": None,
    }
    assert {name: d.batch for name, d in found.returned.items()} == {
        "output 0[0]": 1,
        "output 0[1]['more']": 0,
    }
    whole = {
        "hidden": torch.arange(24.0).view(4, 2, 3),
        "seq_first": torch.arange(24.0).view(3, 4, 2),
        "rotary": (torch.ones(1, 3), torch.ones(3, 3)),
        "mask": None,
        "scale": torch.tensor(2.0),
        "use_cache": False,
    }
    parts = found.split((), whole, 2)
    assert [kwargs["hidden"].shape[0] for _, kwargs in parts] == [2, 2]
    assert all(kwargs["rotary"][1] is whole["rotary"][1] for _, kwargs in parts)  # type: ignore[index]
    joined = found.concatenate(
        [(kwargs["seq_first"][..., 0], {"more": kwargs["hidden"][:, 0, 0]}) for _, kwargs in parts]
    )
    assert torch.equal(joined[0], whole["seq_first"][..., 0])  # type: ignore[call-overload, index]
    assert torch.equal(joined[1]["more"], whole["hidden"][:, 0, 0])  # type: ignore[call-overload, index]


@pytest.mark.parametrize(
    ("takes", "returns", "why"),
    [
        (lambda n: {"x": torch.zeros(4 * n)}, None, "x is of shape .* share a dimension"),
        (lambda n: {"x": torch.zeros(n, n)}, None, "x is of shape"),
        (lambda n: {"x": torch.zeros(*[1] * n)}, None, "x is of shape"),
        (lambda n: {"x": torch.zeros(n), "cache": object()}, None, "cache is an object"),
        (lambda n: {"x": torch.zeros(n), "count": n}, None, "count is 2 with one batch and 3"),
        (lambda _: {"x": torch.zeros(2)}, None, "no tensor that has the batch"),
        (lambda n: {"x": torch.zeros(n)}, lambda _: torch.zeros(()), "without the batch"),
        (lambda n: {"x": torch.zeros(n)}, lambda n: torch.zeros(n * 4), "output 0 is of shape"),
    ],
)
def test_what_cannot_be_divided_is_named(takes: Any, returns: Any, why: str) -> None:  # noqa: ANN401
    found = observed(takes, returns) if returns else observed(takes)
    assert re.search(why, found.unknown)


def test_another_kind_of_argument_than_was_observed_is_not_divided() -> None:
    found = observed(lambda n: {"x": torch.zeros(n, 3), "mask": torch.zeros(1, 3)})
    x, mask = torch.zeros(4, 3), torch.zeros(1, 3)
    assert len(found.split((), {"x": x, "mask": mask}, 4)) == 4
    for other, why in (
        ({"x": x, "mask": torch.zeros(4, 3)}, "mask is of shape"),  # shared then, not now
        ({"x": x, "mask": mask, "late": x}, "late is of shape"),
        ({"x": x, "mask": mask, "cache": object()}, "cache is a object"),
        ({"mask": mask}, "none of its arguments"),
    ):
        with pytest.raises(UnknownBatchError, match=why):
            found.split((), other, 2)
    with pytest.raises(OptionError, match="x has 4 samples"):
        found.split((), {"x": x, "mask": mask}, 3)
    with pytest.raises(OptionError, match="unlike in the first forward"):
        found.concatenate([torch.zeros(2, 4, 1)] * 2)
    with pytest.raises(OptionError, match="differs from micro-batch"):
        found.concatenate([1, 2])
    with pytest.raises(OptionError, match="other structures"):
        found.concatenate([(x,), x])


def test_the_batch_of_a_model_is_dimension_0() -> None:
    tokens = torch.zeros(6, 5)
    shared = torch.zeros(1, 5)
    assert batch_of((tokens,), {"mask": None, "positions": shared}) == 6
    assert batch_of((), {"positions": shared}) == 1
    args, kwargs = samples_of((tokens,), {"both": [tokens, shared]}, 6, 2)
    assert args[0].shape == (2, 5)
    assert [t.shape[0] for t in kwargs["both"]] == [2, 1]
    with pytest.raises(OptionError, match=r"6 \(argument 0\) and 5 \(positions\)"):
        batch_of((tokens,), {"positions": torch.zeros(5)})
    with pytest.raises(OptionError, match=r"a object \(cache\)"):
        batch_of((tokens,), {"cache": object()})
