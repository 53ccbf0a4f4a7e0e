"""What a caller keeps with a commit comes back as it was, or is refused by its place."""

import json
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tensorstow import AdamW
from tensorstow.optim.checkpoints.extras import put_together, take_apart

KEPT: dict[str, Any] = {
    "numbers": [0, -1, 1 << 80, 0.1, -0.0, 1e-320, float("inf")],
    "text": "ä\n\u2028",
    "nothing": None,
    "flags": (True, False),
    "nested": {"a": ({"b": [(), [], {}]},), 3: {(1, "x"): 2}, None: 0, 1.5: "y"},
    "marks": {"__tensor__": 1, "__tuple__": [2], "__pairs__": 3},
    "python": random.Random(3).getstate(),  # noqa: S311
    "tensors": [
        torch.arange(5),
        torch.zeros(0, 3),
        torch.tensor(2.5, dtype=torch.float64),
        torch.tensor([True, False]),
        torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).t(),
        torch.tensor([1 + 2j]),
        torch.randn(7, generator=torch.Generator().manual_seed(1)).bfloat16(),
    ],
    "rng": torch.get_rng_state(),
}


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


def test_all_of_it_comes_back(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(8))
    optimizer = AdamW([weight], states="disk", dir=tmp_path, commit_every=None)
    optimizer.commit(KEPT)
    optimizer.close()
    optimizer = AdamW([weight], states="disk", dir=tmp_path, commit_every=None)
    assert optimizer.resume() == 0
    assert same(optimizer.extra, KEPT)
    optimizer.commit()
    assert optimizer.resume() == 0
    assert optimizer.extra == {}
    optimizer.close()


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"a": [1, {2, 3}]}, r"extra\['a'\]\[1\] is a set"),
        ({"a": np.float64(1)}, r"extra\['a'\] is a float64"),
        ({"a": {"b": object()}}, r"extra\['a'\]\['b'\] is a object"),
        ({("k", b"x"): 1}, r"a key of extra\[1\] is a bytes"),
        ({"a": Path()}, r"extra\['a'\] is a PosixPath"),
    ],
    ids=lambda given: given if isinstance(given, str) else type(given).__name__,
)
def test_what_cannot_be_kept_is_refused(value: Any, told: str) -> None:  # noqa: ANN401
    with pytest.raises(TypeError, match=told):
        take_apart(value, "extra")


def test_a_state_dict_comes_back_as_a_plain_dict() -> None:
    plain, tensors = take_apart({"ema": OrderedDict(nn.Linear(2, 2).state_dict())}, "extra")
    back = put_together(plain, tensors.__getitem__)
    assert type(back["ema"]) is dict
    nn.Linear(2, 2).load_state_dict(back["ema"])


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.sampled_from(["__tuple__"]), inner)
    ),
)


@given(PLAIN)
def test_taken_apart_and_put_together(value: Any) -> None:  # noqa: ANN401
    plain, tensors = take_apart(value, "extra")
    assert same(put_together(json.loads(json.dumps(plain)), tensors.__getitem__), value)
