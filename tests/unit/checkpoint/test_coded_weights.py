"""Codes in files: which tensors are taken for codes, and what does not fit together."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tensorstow.base.errors import StoreFormatError
from tensorstow.checkpoint.coded_weights import CodedWeight, coded_weights
from tensorstow.checkpoint.weight_encoders import ENCODERS
from tensorstow.io.safetensors import Entry

SHAPE = (12, 44)
KINDS = ["int8", "nf4"]


def tensors_of(kind: str, shape: tuple[int, int] = SHAPE) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    values = torch.randn(shape).bfloat16()
    entries = ENCODERS[kind].entries("w", Entry(values.dtype, shape))
    tensors = {name: torch.zeros(e.shape, dtype=e.dtype) for name, e in entries.items()}

    def put(name: str, piece: torch.Tensor, start: int) -> None:
        tensors[name].view(-1)[start : start + piece.numel()] = piece.reshape(-1)

    ENCODERS[kind].write("w", values, put)
    return tensors


def coded(tensors: Mapping[str, torch.Tensor]) -> dict[str, CodedWeight]:
    entries = {name: Entry(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    return coded_weights(entries, tensors.__getitem__)


def rows(
    weight: CodedWeight, tensors: Mapping[str, torch.Tensor], start: int, stop: int
) -> torch.Tensor:
    into = torch.empty((stop - start, weight.shape[1]))
    parts = []
    for part in weight.parts(start, stop):
        data = tensors[part.source].reshape(-1).view(torch.uint8)
        data = data[part.entry.offset : part.entry.offset + part.entry.nbytes].clone()
        parts.append(data.view(part.entry.dtype).view(part.entry.shape))
    weight.decode(parts, start, stop, into)
    return into


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_whole(kind: str) -> None:
    tensors = tensors_of(kind)
    (weight,) = coded(tensors).values()
    assert weight.shape == SHAPE
    assert set(weight.sources) == tensors.keys()
    whole = rows(weight, tensors, 0, 12)
    for start, stop in ((0, 1), (1, 5), (5, 12), (11, 12), (4, 4), (12, 12)):
        assert torch.equal(rows(weight, tensors, start, stop), whole[start:stop])


def test_rows_behind_the_first_scale_of_scales() -> None:
    tensors = tensors_of("nf4", (600, 64))  # a block for each row, and 256 of them in a group
    (weight,) = coded(tensors).values()
    whole = rows(weight, tensors, 0, 600)
    for start, stop in ((200, 300), (300, 500), (599, 600)):
        assert torch.equal(rows(weight, tensors, start, stop), whole[start:stop])


def test_what_is_read_is_no_more_than_the_rows() -> None:
    (weight,) = coded(tensors_of("int8")).values()
    assert sum(part.entry.nbytes for part in weight.parts(3, 5)) == 2 * (44 + 4)
    (weight,) = coded(tensors_of("nf4", (64, 64))).values()
    assert sum(part.entry.nbytes for part in weight.parts(3, 5)) == 2 * (32 + 1)


@pytest.mark.parametrize(
    "scale",
    [torch.ones(11), torch.ones(1), torch.ones(12, 2), torch.ones(12, dtype=torch.int32)],
    ids=["fewer", "one", "groups", "whole"],
)
def test_other_scales_make_no_coded_weight(scale: torch.Tensor) -> None:
    assert coded({"w": torch.zeros(SHAPE, dtype=torch.int8), "w_scale": scale}) == {}


def test_a_column_of_scales_is_one_for_each_row() -> None:
    tensors = {"w": torch.ones(SHAPE, dtype=torch.int8), "w_scale": torch.arange(12.0)[:, None]}
    (weight,) = coded(tensors).values()
    assert torch.equal(rows(weight, tensors, 2, 4), torch.tensor([[2.0], [3.0]]).expand(2, 44))


def test_scales_that_are_not_codes() -> None:
    tensors = tensors_of("nf4")
    state = json.loads(bytes(tensors["w.quant_state.bitsandbytes__nf4"].numpy()))
    plain = {k: v for k, v in state.items() if not k.startswith("nested")}
    text = bytearray(json.dumps(plain).encode())
    single = {
        "w": tensors["w"],
        "w.absmax": torch.rand(9),
        "w.quant_map": tensors["w.quant_map"],
        "w.quant_state.bitsandbytes__nf4": torch.frombuffer(text, dtype=torch.uint8),
    }
    (weight,) = coded(single).values()
    table = single["w.quant_map"]
    two = torch.stack([tensors["w"].view(-1) >> 4, tensors["w"].view(-1) & 15], 1).view(-1)
    wanted = table[two.int()] * single["w.absmax"][torch.arange(528) // 64]
    assert torch.equal(rows(weight, single, 0, 12), wanted.view(SHAPE))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("w", torch.zeros(10, 1, dtype=torch.uint8)),
        ("w.absmax", torch.zeros(8, dtype=torch.uint8)),
        ("w.absmax", torch.zeros(9)),
        ("w.quant_map", torch.zeros(15)),
        ("w.nested_absmax", None),
        ("w.nested_quant_map", torch.zeros(256, dtype=torch.float64)),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name: str, tensor: torch.Tensor | None) -> None:
    tensors = tensors_of("nf4")
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    with pytest.raises(StoreFormatError, match=rf"'{name}' is .*damaged"):
        coded(tensors)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [12]},
        {"shape": [12, -44]},
        {"shape": None},
        {"blocksize": 0},
        {"blocksize": 63},
        {"blocksize": "64"},
        {"nested_offset": "x"},
        {"nested_blocksize": True},
    ],
    ids=str,
)
def test_a_state_that_is_none_is_refused(change: dict[str, Any]) -> None:
    tensors = tensors_of("nf4")
    name = "w.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[name].numpy())) | change
    text = bytearray(json.dumps(state).encode())
    tensors[name] = torch.frombuffer(text, dtype=torch.uint8)
    with pytest.raises(StoreFormatError, match="state of 'w' in 4 bits cannot be read"):
        coded(tensors)
    tensors[name] = torch.full((20,), 255, dtype=torch.uint8)
    with pytest.raises(StoreFormatError, match="state of 'w' in 4 bits cannot be read"):
        coded(tensors)
