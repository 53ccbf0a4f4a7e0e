"""What a manifest says is checked, whatever its digests say."""

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attacks.rows import redigest
from powerloss.contents import SHAPE, make_content
from tensorstow.base.errors import DamageError, DTypeError, StoreFormatError
from tensorstow.io.engine import open_engine
from tensorstow.store import bounds
from tensorstow.store.bounds import (
    check_disjoint,
    check_generation,
    check_inside,
    without_overlaps,
)
from tensorstow.store.records import Extent, Generation, chunk_shapes
from tensorstow.store.store import Store

BLOCKS = 4 * SHAPE.blocks


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Generation:
    with Store.open([tmp_path_factory.mktemp("good")], open_engine("threads")) as store:
        store.commit(make_content(store, 1, extra={}))
        store.add_snapshot("a")
        generation = store.generation()
    assert generation is not None
    return generation


def check(generation: Generation) -> None:
    check_generation(generation, chunk_shapes(generation.layout), 1)


def chunk_with(**changed: Any) -> Callable[[Generation], Generation]:  # noqa: ANN401
    return lambda g: replace(g, chunks=[replace(g.chunks[0], **changed), *g.chunks[1:]])


def tensor_with(**changed: Any) -> Callable[[Generation], Generation]:  # noqa: ANN401
    return lambda g: replace(g, tensors=[replace(g.tensors[0], **changed)])


def generation_with(**changed: Any) -> Callable[[Generation], Generation]:  # noqa: ANN401
    return lambda g: replace(g, **changed)


IMPOSSIBLE = [
    generation_with(step=-1),
    generation_with(step=1 << 60),
    generation_with(step="1"),
    generation_with(number=0),
    generation_with(created=float("nan")),
    generation_with(created=-1.0),
    generation_with(created=1e300),
    generation_with(created="now"),
    generation_with(names=("\x1b[2J",)),
    generation_with(names=(3,)),
    chunk_with(chunk=3),
    chunk_with(chunk=-1),
    chunk_with(chunk="0"),
    chunk_with(extent=Extent(1, 12288, 32768)),
    chunk_with(extent=Extent(-1, 12288, 32768)),
    chunk_with(extent=Extent(0, 0, 0)),
    chunk_with(extent=Extent(0, 8192, 32768)),
    chunk_with(extent=Extent(0, 12289, 32768)),
    chunk_with(extent=Extent(0, 12288, 32769)),
    chunk_with(extent=Extent(0, 12288, SHAPE.nbytes - 4096)),
    chunk_with(extent=Extent(0, 1 << 60, 32768)),
    chunk_with(extent=Extent(0, "x", 32768)),  # type: ignore[arg-type]
    chunk_with(checksums=b""),
    chunk_with(checksums=b"\1" * (BLOCKS - 1)),
    chunk_with(checksums="x" * BLOCKS),
    chunk_with(weight_checksums=b""),
    chunk_with(blank=True, checksums=b"\1" * BLOCKS),
    chunk_with(blank=True, checksums=b"\0" * (BLOCKS + 4)),
    tensor_with(dtype="quint8"),
    tensor_with(dtype="Tensor"),
    tensor_with(dtype=b"int64"),
    tensor_with(shape=(-7,)),
    tensor_with(shape=(7.0,)),
    tensor_with(shape=(1 << 50, 0)),
    tensor_with(shape=(7, 1000)),
    tensor_with(shape=(7,) + (1,) * 70),
    tensor_with(extent=Extent(0, 12288, 8192)),
    tensor_with(checksum=-1),
    tensor_with(checksum=1 << 32),
    tensor_with(checksum=1.0),
    tensor_with(kind=None),
    tensor_with(name=b"count"),
]


@pytest.mark.parametrize("change", IMPOSSIBLE, ids=range(len(IMPOSSIBLE)))
def test_what_cannot_be_is_an_error(
    change: Callable[[Generation], Generation], good: Generation
) -> None:
    check(good)
    altered = change(good)
    if altered == good:
        pytest.fail("nothing was changed")
    with pytest.raises((DamageError, StoreFormatError), match=r"cannot be|none of those"):
        check(altered)


def test_a_blank_chunk_has_no_checksums_of_states_or_zeros(good: Generation) -> None:
    check(chunk_with(blank=True, checksums=b"")(good))
    check(chunk_with(blank=True, checksums=b"\0" * BLOCKS)(good))


def test_extents_are_the_same_or_apart(good: Generation) -> None:
    check_disjoint([good, replace(good, number=2)])
    first, second = (chunk.extent for chunk in good.chunks[:2])
    with pytest.raises(DamageError, match="two records of generation 1 are at one place"):
        check_disjoint([chunk_with(extent=second)(good)])
    shifted = Extent(first.file, first.offset + 4096, first.nbytes)
    with pytest.raises(DamageError, match="bytes in common"):
        check_disjoint([good, replace(chunk_with(extent=shifted)(good), number=2)])


def test_extents_end_inside_of_their_file(good: Generation) -> None:
    (tensor,) = good.tensors
    end = tensor.extent.offset + 7 * 8  # of which the rest of the page is nobody's
    check_inside(good, [end])
    with pytest.raises(DamageError, match=r"of states-0\.bin, which ends at .* cut short"):
        check_inside(good, [end - 1])


def test_a_file_that_was_cut_short_is_found_before_a_byte_is_read(tmp_path: Path) -> None:
    with Store.open([tmp_path], open_engine("threads")) as store:
        content = make_content(store, 1)
        store.commit(content)
        store.add_snapshot("old")
        store.commit(make_content(store, 2))
        end = max(extent.end for extent in content.extents())
    with (tmp_path / "states-0.bin").open("r+b") as file:
        file.truncate(end)
    with Store.open([tmp_path], open_engine("threads")) as store:
        with pytest.raises(DamageError, match=r"Generation 2 .* cut short"):
            store.generation()
        assert store.generation("old") is not None


STATEMENTS = [
    "CREATE VIEW more AS SELECT 1",
    "CREATE TRIGGER t AFTER INSERT ON generations BEGIN DELETE FROM generations; END",
    "CREATE INDEX i ON chunks (file)",
    "CREATE TABLE stranger (x)",
    "INSERT INTO files VALUES (1, '/etc')",
    "UPDATE files SET directory = '../x'",
    "UPDATE files SET file = 3",
    "UPDATE files SET directory = x'00'",
    "UPDATE meta SET value = '-1' WHERE key = 'transaction'",
    "UPDATE meta SET value = '99999999999999999999' WHERE key = 'transaction'",
    "UPDATE meta SET value = char(27) || 'c' WHERE key = 'writer'",
    "UPDATE snapshots SET generation = 77",
    "UPDATE snapshots SET name = char(10)",
    "UPDATE generations SET chunks = chunks + 1",
    "UPDATE generations SET bytes = 0",
    "UPDATE chunks SET blank = 2",
    "UPDATE chunks SET offset = offset - 4096 WHERE chunk = 2",
    "INSERT INTO chunks SELECT 99, chunk, file, offset, nbytes, 0, x'', x'' FROM chunks LIMIT 1",
    "UPDATE sqlite_sequence SET seq = 9223372036854775807",
    "UPDATE sqlite_sequence SET seq = 'x'",
    "DELETE FROM sqlite_sequence",
]


@pytest.mark.parametrize("statement", STATEMENTS)
def test_rows_with_digests_that_were_computed_anew(statement: str, tmp_path: Path) -> None:
    with Store.open([tmp_path], open_engine("threads")) as store:
        store.commit(make_content(store, 1))
        store.add_snapshot("a")
    (tmp_path / "manifest-copy.sqlite").unlink()
    connection = sqlite3.connect(tmp_path / "manifest.sqlite", isolation_level=None)
    redigest(connection)
    connection.close()
    Store.open([tmp_path], open_engine("threads")).close()
    (tmp_path / "manifest-copy.sqlite").unlink()
    connection = sqlite3.connect(tmp_path / "manifest.sqlite", isolation_level=None)
    connection.execute(statement)
    redigest(connection)
    connection.close()
    with pytest.raises(DamageError, match="is damaged"):
        Store.open([tmp_path], open_engine("threads"))


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
def test_what_is_not_read_back_is_not_written(tmp_path: Path) -> None:
    with Store.open([tmp_path], open_engine("threads")) as store:
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
        with pytest.raises(DTypeError, match="only dense ones with plain elements"):
            store.write_tensor("extra", "0", quantized)


def test_of_two_with_bytes_in_common_the_newer_is_kept(
    good: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = good.chunks[0].extent
    shifted = Extent(first.file, first.offset + 4096, first.nbytes)
    others = [replace(good, number=number) for number in (2, 3)]
    chunk = replace(good.chunks[0], extent=shifted)
    newest = replace(good, number=4, chunks=[chunk], tensors=[])
    assert without_overlaps([good, *others, newest]) == [newest]
    assert without_overlaps([newest, good, *others]) == [good, *others]
    assert without_overlaps([]) == []
    compared = 0

    def counted(generations: list[Generation]) -> None:
        nonlocal compared
        compared += len(generations)

    monkeypatch.setattr(bounds, "check_disjoint", counted)
    assert without_overlaps([good, *others]) == [good, *others]
    assert compared == 3  # each once
