"""What a caller keeps with a commit comes back as it was, or is refused by its place."""

import json
import random
from argparse import Namespace
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
from tensorstow.base.errors import DTypeError
from tensorstow.checkpoint.serialize import flatten, inflate

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
    "arguments": Namespace(lr=0.1, out=Path("runs/1"), nested=Namespace(betas=(0.9, 0.95))),
    "kinds": [torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1)],
    "more marks": {"__namespace__": {}, "__dtype__": "x"},
    "bytes": [b"", b"\x00\xff", {b"key": 1}],
    "sets": [set(), {1, "a", b"b", (2.5, frozenset({3}))}, frozenset({None})],
    "numpy rng": np.random.RandomState(3).get_state(),
    "scalars": [
        np.float64(0.1),
        np.float32(0.1),
        np.int16(-3),
        np.bool_(True),  # noqa: FBT003
        np.complex64(1 + 2j),
        np.datetime64("2026-01-02T03:04", "m"),
        np.str_("ä"),
        np.str_(""),
        np.bytes_(b"z"),
        np.dtype(">i4").type(7),
    ],
    "arrays": [
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(12)[::-2],
        np.array(3.5, dtype=np.float16),
        np.zeros((0, 3)),
        np.arange(3, dtype=">u4"),
        np.array(["a", "bcd"]),
        np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array(["2026-01-02"], dtype="M8[D]"),
    ],
}


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray | np.generic):
        return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and (
        repr(a) == repr(b) or (isinstance(a, set | frozenset) and a == b)
    )


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
        ({"a": np.array([object()])}, r"extra\['a'\] is a numpy array of dtype object"),
        ({"a": np.ma.masked_array([1], [True])}, r"extra\['a'\] is a MaskedArray"),
        ({"a": [np.zeros(1, "i4,f4")[0]]}, r"extra\['a'\]\[0\] is a numpy scalar of dtype"),
        ({"a": CIRCLE}, "nested more than 100 deep, or contains itself"),
        ({"a": [1, {2, random.Random()}]}, r"extra\['a'\]\[1\]\[[01]\] is a Random"),  # noqa: S311
        ({"a": {"b": object()}}, r"extra\['a'\]\['b'\] is a object"),
        ({("k", object()): 1}, r"a key of extra\[1\] is a object"),
        ({"a": random.Random()}, r"extra\['a'\] is a Random"),  # noqa: S311
    ],
    ids=lambda given: given if isinstance(given, str) else type(given).__name__,
)
def test_what_cannot_be_kept_is_refused(value: Any, told: str) -> None:  # noqa: ANN401
    with pytest.raises(TypeError, match=told):
        flatten(value, "extra")


def test_a_state_dict_comes_back_as_a_plain_dict() -> None:
    plain, tensors = flatten({"ema": OrderedDict(nn.Linear(2, 2).state_dict())}, "extra")
    back = inflate(plain, tensors.__getitem__)
    assert type(back["ema"]) is dict
    nn.Linear(2, 2).load_state_dict(back["ema"])


@pytest.mark.parametrize("made", [torch.zeros(2, device="meta"), torch.eye(2).to_sparse()])
def test_tensors_without_plain_elements_are_refused(made: torch.Tensor) -> None:
    with pytest.raises(DTypeError, match="only dense ones"):
        flatten([made], "extra")


def test_a_commits_extra_is_checked_before_anything_is_done(tmp_path: Path) -> None:
    optimizer = AdamW([nn.Parameter(torch.ones(8))], states="disk", dir=tmp_path)
    with pytest.raises(TypeError, match=r"extra\['a'\] is a object"):
        optimizer.commit({"a": object()})
    with pytest.raises(TypeError, match="extra is a int: it is a dict"):
        optimizer.commit(3)  # type: ignore[arg-type]
    assert optimizer.commit({"a": 1}) == 0
    optimizer.close()


def test_what_extra_returns_is_checked_at_construction(tmp_path: Path) -> None:
    parameters = [nn.Parameter(torch.ones(8))]
    with pytest.raises(TypeError, match=r"extra\['a'\] is a object"):
        AdamW(parameters, states="disk", dir=tmp_path / "run", extra=lambda: {"a": object()})
    with pytest.raises(TypeError, match="extra is a list: it is a dict"):
        AdamW(parameters, states="disk", dir=tmp_path / "run", extra=list)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_extra_of_what_is_made_later_is_checked_at_the_first_step(tmp_path: Path) -> None:
    later: dict[str, Any] = {}
    parameter = nn.Parameter(torch.ones(8))
    optimizer = AdamW(
        [parameter], states="disk", dir=tmp_path, extra=lambda: {"rates": later["scheduler"]}
    )
    parameter.grad = torch.ones(8)
    with pytest.raises(KeyError, match="scheduler"):
        optimizer.step()
    later["scheduler"] = object()
    with pytest.raises(TypeError, match=r"extra\['rates'\] is a object"):
        optimizer.step()
    assert torch.equal(parameter, torch.ones(8))
    later["scheduler"] = 3
    optimizer.step()
    optimizer.commit()
    optimizer.resume()
    assert optimizer.extra == {"rates": 3}
    optimizer.close()


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.sets(st.integers() | st.binary())
        | st.dictionaries(st.text() | st.integers() | st.sampled_from(["__tuple__"]), inner)
    ),
)


@given(PLAIN)
def test_taken_apart_and_put_together(value: Any) -> None:  # noqa: ANN401
    plain, tensors = flatten(value, "extra")
    assert same(inflate(json.loads(json.dumps(plain)), tensors.__getitem__), value)


def test_a_dtype_that_this_torch_lacks_is_told() -> None:
    with pytest.raises(TypeError, match="float1000"):
        inflate({"__dtype__": "float1000"}, [].__getitem__)
