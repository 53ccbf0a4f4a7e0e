"""A checkpoint of torch.distributed's that says to run code runs none."""

import pickle
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
)
from torch.distributed.checkpoint.state_dict_saver import save

from tensorstow.base.errors import DamageError, StoreFormatError
from tensorstow.deepspeed.checkpoint import restricted_reader
from tensorstow.deepspeed.checkpoint.restricted_reader import RestrictedReader, load_tensors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


class Runs:
    """What makes a file where a pickle of it is opened."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.file.touch, ()


@pytest.fixture(name="folder")
def make_folder(tmp_path: Path) -> Path:
    save(dict(TENSORS), checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved"


def read(folder: Path) -> dict[str, torch.Tensor]:
    room = {name: torch.zeros_like(values) for name, values in TENSORS.items()}
    load_tensors(folder, room, group=None, alone=True)
    return room


def rewrite(folder: Path, change: Callable[[Any], object]) -> None:
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())  # our own
    changed = change(metadata)
    file.write_bytes(pickle.dumps(metadata if changed is None else changed))


def test_what_torch_wrote_is_read(folder: Path) -> None:
    found = read(folder)
    assert all(torch.equal(found[name], values) for name, values in TENSORS.items())
    ours = RestrictedReader(folder).read_metadata()
    theirs = FileSystemReader(folder).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data


@pytest.mark.parametrize(
    "change",
    [
        lambda _, runs: runs,
        lambda m, runs: m.storage_data.update(more=runs),
        lambda m, runs: setattr(m, "planner_data", runs),
        lambda m, _: setattr(m, "planner_data", pickle.Unpickler),
        lambda m, _: setattr(m, "planner_data", torch.load),
    ],
    ids=["all", "storage", "planner", "class", "function"],
)
def test_metadata_that_names_code_runs_none(
    folder: Path, tmp_path: Path, change: Callable[[Any, Runs], object]
) -> None:
    proof = tmp_path / "proof"
    rewrite(folder, lambda metadata: change(metadata, Runs(proof)))
    with pytest.raises(StoreFormatError, match=r"\.metadata was to be read, .* it names"):
        read(folder)
    assert not proof.exists()


class Attribute:
    """What a pickle has as ``getattr(owner, name)``: members of enumerations in Python 3.11.2."""

    def __init__(self, owner: object, name: str) -> None:
        self.said = owner, name

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return getattr, self.said


def test_members_of_enumerations_are_read_as_each_python_writes_them(folder: Path) -> None:
    member = _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST
    for written in (member, Attribute(_MEM_FORMAT_ENCODING, member.name)):
        rewrite(folder, lambda m, written=written: setattr(m, "planner_data", written))
        assert RestrictedReader(folder).read_metadata().planner_data is member


@pytest.mark.parametrize("name", ["__class__", "mro", "_member_map_"])
def test_no_other_attribute_of_an_enumeration_is_read(folder: Path, name: str) -> None:
    rewrite(folder, lambda m: setattr(m, "planner_data", Attribute(_MEM_FORMAT_ENCODING, name)))
    with pytest.raises(DamageError, match=f"it is damaged: '{name}'"):
        read(folder)


def twice(entry: Any) -> None:  # noqa: ANN401
    """Cover the first row twice and the second one not at all."""
    row = type(entry.chunks[0])(offsets=torch.Size([0, 0]), sizes=torch.Size([1, 3]))
    entry.chunks[:] = [row, row]


def outside(metadata: Metadata) -> None:
    for place in metadata.storage_data.values():
        place.relative_path = f"../{place.relative_path}"


@pytest.mark.parametrize(
    "change",
    [
        outside,
        lambda _: {"a": 1},
        lambda m: setattr(m, "storage_data", None),
        lambda m: setattr(m, "state_dict_metadata", ["a"]),
        lambda m: m.state_dict_metadata.update(a=7),
        lambda m: delattr(m, "storage_data"),
        lambda m: setattr(m.state_dict_metadata["a"], "size", [2, 3]),
        lambda m: setattr(m.state_dict_metadata["a"].chunks[0], "sizes", -1),
        lambda m: setattr(next(iter(m.storage_data.values())), "offset", -8),
        lambda m: m.storage_data.clear() or m.storage_data.update(a="a file"),
        # Elements that no chunk has would stay what memory was.
        lambda m: m.state_dict_metadata["a"].chunks.clear(),
        lambda m: setattr(m.state_dict_metadata["a"].chunks[0], "sizes", torch.Size([1, 3])),
        lambda m: setattr(m.state_dict_metadata["a"].chunks[0], "offsets", torch.Size([1, 0])),
        lambda m: setattr(m.state_dict_metadata["a"].chunks[0], "sizes", torch.Size([6])),
        lambda m: setattr(m.state_dict_metadata["a"], "size", torch.Size([1 << 40, 1 << 10])),
        lambda m: setattr(m.state_dict_metadata["a"], "size", torch.Size([-2, -3])),
        lambda m: twice(m.state_dict_metadata["a"]),
    ],
)
def test_metadata_is_checked_whole(folder: Path, change: Callable[[Any], object]) -> None:
    rewrite(folder, change)
    with pytest.raises(DamageError, match="it is not what torch"):
        read(folder)


def test_an_entry_that_is_no_tensor_is_not_unpickled(folder: Path, tmp_path: Path) -> None:
    """Torch opens it without weights_only; also one that changes after the first look."""
    proof = tmp_path / "proof"
    (data,) = folder.glob("*.distcp")
    whole = pickle.dumps(Runs(proof))
    data.write_bytes(whole)

    def change(metadata: Any) -> None:  # noqa: ANN401
        metadata.state_dict_metadata["a"] = BytesStorageMetadata()
        index = next(i for i in metadata.storage_data if i.fqn == "a")
        place = metadata.storage_data.pop(index)
        place.offset, place.length = 0, len(whole)
        metadata.storage_data[type(index)("a")] = place

    rewrite(folder, change)
    with pytest.raises(StoreFormatError, match="'a' of a checkpoint was requested, and it is mis"):
        read(folder)
    item: Any = SimpleNamespace(dest_index=SimpleNamespace(fqn="a"))
    with pytest.raises(StoreFormatError, match="'a' of a checkpoint was requested, and it is mis"):
        restricted_reader._TensorPlanner().load_bytes(item, BytesIO(whole))
    assert not proof.exists()


def test_damaged_metadata_is_an_error_of_ours_or_changes_nothing(folder: Path) -> None:
    file = folder / ".metadata"
    whole = file.read_bytes()
    outcomes = set()
    for bit in range(0, 8 * len(whole), 7):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        try:
            RestrictedReader(folder).read_metadata()
        except (StoreFormatError, DamageError):
            outcomes.add("error")
        else:
            outcomes.add("read")
    assert outcomes == {"error", "read"}
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises((StoreFormatError, DamageError)):
        RestrictedReader(folder).read_metadata()
