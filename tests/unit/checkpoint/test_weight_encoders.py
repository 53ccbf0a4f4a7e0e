"""Codes that are written: in pieces, with a state of a fixed length, and of finite values alone."""

import json

import pytest
import torch

from tensorstow.base.errors import StoreFormatError
from tensorstow.checkpoint import weight_encoders
from tensorstow.checkpoint.weight_encoders import ENCODERS, copy_weight
from tensorstow.io.safetensors import Entry

KINDS = ["int8", "nf4"]


def written(kind: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    entries = ENCODERS[kind].entries("w", Entry(values.dtype, tuple(values.shape)))
    tensors = {name: torch.zeros(e.shape, dtype=e.dtype) for name, e in entries.items()}

    def put(name: str, piece: torch.Tensor, start: int) -> None:
        flat = tensors[name].view(-1)
        assert piece.dtype == flat.dtype
        assert start + piece.numel() <= flat.numel()
        flat[start : start + piece.numel()] = piece.reshape(-1)

    ENCODERS[kind].write("w", values, put)
    return tensors


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(20, 96)
    whole = written(kind, values)
    monkeypatch.setattr(weight_encoders, "_PIECE", 256)
    pieces = written(kind, values)
    assert all(torch.equal(pieces[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("scale", [1e-30, 1.0, -1.0, 123456.789, 0.0])
def test_a_state_has_the_length_that_its_table_says(scale: float) -> None:
    tensors = written("nf4", torch.randn(3, 64) * scale)
    state = json.loads(bytes(tensors["w.quant_state.bitsandbytes__nf4"].numpy()))
    assert state["shape"] == [3, 64]
    assert state["dtype"] == "float32"
    assert state["nested_offset"] == pytest.approx(state["nested_offset"])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_is_refused(kind: str) -> None:
    values = torch.ones(4, 64)
    values[2, 3] = torch.nan
    with pytest.raises(StoreFormatError, match="'w' has a value that is not finite"):
        written(kind, values)


def test_other_tensors_are_cut_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_encoders, "_PIECE", 5)
    values = torch.arange(12).view(3, 4)
    pieces: dict[int, torch.Tensor] = {}
    copy_weight("w", values, lambda _, piece, start: pieces.update({start: piece}))
    assert list(pieces) == [0, 5, 10]
    assert torch.equal(torch.cat([*pieces.values()]), values.view(-1))
