"""Tensors of every kind go to disk and come back the same bits."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tensorstow.base.errors import DTypeError, StoreFormatError
from tensorstow.io.engine import open_engine
from tensorstow.store import tensors as tensors_module
from tensorstow.store.store import Store

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.int16,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open([tmp_path_factory.mktemp("store")], open_engine()) as opened:
        yield opened


def bits(tensor: torch.Tensor) -> bytes:
    return (
        tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    )


def round_trip(store: Store, tensor: torch.Tensor) -> torch.Tensor:
    record = store.write_tensor("extra", "x", tensor)
    back = store.read_tensor(record)
    assert (back.dtype, back.shape, back.device.type) == (tensor.dtype, tensor.shape, "cpu")
    assert bits(back) == bits(tensor)
    return back


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7, 11), (5000,)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape(store: Store, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
    if dtype != torch.bool:
        raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    round_trip(store, raw.view(dtype).reshape(shape))


@pytest.mark.parametrize("piece", [4096, 4 << 20])
def test_tensors_of_many_pieces(store: Store, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors_module, "PIECE_BYTES", piece)
    count = 5 * piece // 8 + 3
    round_trip(store, torch.arange(count).flip(0))
    round_trip(store, torch.arange(count)[1:])  # no alignment to hope for


def test_views_parameters_and_bits_of_nan(store: Store) -> None:
    round_trip(store, torch.rand(30, 40).t())
    round_trip(store, torch.rand(3).expand(4, 3))
    round_trip(store, torch.rand(8, dtype=torch.complex64).conj())
    round_trip(store, torch.nn.Parameter(torch.rand(5)))
    round_trip(
        store, torch.tensor([0x7FC01234, 1 << 31, 0x7F800001]).to(torch.int32).view(torch.float32)
    )


def test_tensors_without_plain_elements(store: Store) -> None:
    for wrong in (torch.rand(2, 2).to_sparse(), torch.rand(2, device="meta")):
        with pytest.raises(DTypeError, match="only dense ones"):
            store.write_tensor("extra", "x", wrong)


def test_a_dtype_of_the_future(store: Store) -> None:
    record = store.write_tensor("extra", "x", torch.rand(2))
    with pytest.raises(StoreFormatError, match="float3_e1m1"):
        store.read_tensor(replace(record, dtype="float3_e1m1"))


def test_the_extent_is_the_callers(store: Store, tmp_path: Path) -> None:
    assert tmp_path  # another directory than the store's
    record = store.write_tensor("extra", "x", torch.rand(2000))
    assert record.extent.nbytes == 8192
    store.release(record.extent)
