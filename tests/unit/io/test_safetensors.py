"""Our writing and reading of safetensors against the library's."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from tensorstow.base.errors import OptionError
from tensorstow.io.digest_list import DigestList
from tensorstow.io.mapped import Mapped, new_safetensors
from tensorstow.io.safetensors import Entry, lay_out, read_table

TENSORS = {
    "odd.bool": torch.tensor([True, False, True]),
    "half": torch.randn(3).to(torch.float16),
    "brain": torch.randn(5, 1).to(torch.bfloat16),
    "a scalar": torch.tensor(7.5),
    "nothing": torch.zeros(0, 4),
    'ünïcode."quoted"': torch.randn(2, 3, 4, dtype=torch.float64),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "whole": torch.arange(3),
}


def write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    table = lay_out({n: Entry(t.dtype, tuple(t.shape)) for n, t in tensors.items()}, metadata)
    with new_safetensors(path, table, DigestList(path)) as file:
        for name, tensor in tensors.items():
            file.put(name, tensor)


def test_the_library_reads_what_is_written_here(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, TENSORS, {"format": "pt", "note": "ü"})
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "ü"}


def test_every_tensor_lies_at_a_multiple_of_its_width() -> None:
    table = lay_out({n: Entry(t.dtype, tuple(t.shape)) for n, t in TENSORS.items()}, {})
    assert len(table.header) % 8 == 0
    assert all(e.offset % e.dtype.itemsize == 0 for e in table.entries.values())


def test_what_the_library_writes_is_read_here(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path, {"note": "ü"})
    table = read_table(path)
    assert table.metadata == {"note": "ü"}
    mapped = Mapped.read(path)
    for name, tensor in TENSORS.items():
        entry = table.entries[name]
        assert torch.equal(mapped.tensor(entry.offset, entry.shape, entry.dtype), tensor)


def header(rows: object, data: int = 0) -> bytes:
    text = json.dumps(rows).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def row(begin: int, end: int, shape: object, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "contents",
    [
        b"",
        b"PK\x03\x04 a pickle of torch's",
        (1 << 60).to_bytes(8, "little"),
        (100).to_bytes(8, "little") + b"{}",
        header([1]),
        header({"a": 3}),
        header({"a": row(0, 8, [2])}, 7),
        header({"a": row(0, 8, [2])}, 9),
        header({"a": row(0, 8, [3])}, 8),
        header({"a": row(0, 8, [-1, -2])}, 8),
        header({"a": row(0, 8, [2]), "b": row(4, 12, [2])}, 12),
        header({"a": row(4, 12, [2])}, 12),
        header({"a": row(0, 8, [2], "F31")}, 8),
        header({"a": row(0, 8, [2.0])}, 8),
    ],
)
def test_what_is_none_is_refused_here_and_there(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(contents)
    with pytest.raises(SafetensorError):
        load_file(path)
    with pytest.raises(OptionError, match="was to be read as safetensors"):
        read_table(path)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([], "its table is no JSON object (list was found)"),
        (None, "its table is no JSON object (NoneType was found)"),
        ("F32", "its table is no JSON object (str was found)"),
        ({"a": 3}, "'a' is no JSON object (int was found)"),
        ({"__metadata__": [1]}, "__metadata__ is no JSON object (list was found)"),
    ],
)
def test_json_that_is_no_table_is_told_by_what_it_is(
    rows: object, told: str, tmp_path: Path
) -> None:
    path = tmp_path / "x"
    path.write_bytes(header(rows))
    with pytest.raises(OptionError, match=r"take the original") as caught:
        read_table(path)
    assert told in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="No such file"):
        read_table(tmp_path / "x")


def test_a_dtype_without_a_name_is_refused() -> None:
    with pytest.raises(OptionError, match=r"complex64.*torch\.save"):
        lay_out({"z": Entry(torch.complex64, (2,))}, {})
