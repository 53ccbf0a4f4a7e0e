"""First values: from files by name and in slices, from tensors; refused where there are none."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tensorstow.base.errors import OptionError, StoreFormatError
from tensorstow.fsdp.loading import Files, Sources, of_tensor
from tensorstow.fsdp.units import aliases_of, units_of


def values(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def test_slices_are_read_in_the_dtype_that_is_asked(tmp_path: Path) -> None:
    save_file({"w": values(5, 3), "scale": torch.tensor(2.5)}, tmp_path / "one.safetensors")
    files = Files(tmp_path / "one.safetensors")
    assert (files.has("w"), files.has("v")) == (True, False)
    read = files.rows(["w"], torch.empty(5, 3, dtype=torch.bfloat16, device="meta"))
    assert read(1, 3).dtype == torch.bfloat16
    assert read(1, 3).tolist() == values(5, 3)[1:3].tolist()
    assert read(5, 5).shape == (0, 3)
    assert files.rows(["scale"], torch.empty(()))(0, 0).item() == 2.5


def test_the_first_known_name_of_a_tied_parameter_is_taken(tmp_path: Path) -> None:
    save_file({"head.weight": values(2, 2)}, tmp_path / "model.safetensors")
    read = Files(tmp_path).rows(["embedding.weight", "head.weight"], torch.empty(2, 2))
    assert torch.equal(read(0, 2), values(2, 2))


def test_an_index_says_which_files_count(tmp_path: Path) -> None:
    save_file({"a": values(1)}, tmp_path / "first.safetensors")
    save_file({"b": values(2)}, tmp_path / "second.safetensors")
    save_file({"a": values(3), "old": values(3)}, tmp_path / "left_over.safetensors")
    assert Files(tmp_path).has("old")  # without an index all of a directory do
    index = {"weight_map": {"a": "first.safetensors", "b": "second.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    files = Files(tmp_path)
    assert [files.has(name) for name in ("a", "b", "old")] == [True, True, False]
    assert files.rows(["a"], torch.empty(1))(0, 1).tolist() == [0.0]


def test_what_is_not_there_is_told_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(StoreFormatError, match="neither a safetensors file nor a directory"):
        Files(tmp_path)
    save_file({"layer.weight": values(2, 2)}, tmp_path / "model.safetensors")
    files = Files(tmp_path)
    with pytest.raises(StoreFormatError, match=r"no tensor 'layers\.weight'.*'layer\.weight'"):
        files.rows(["layers.weight"], torch.empty(2, 2))
    with pytest.raises(StoreFormatError, match="no tensor 'x', nor any like it"):
        files.rows(["x"], torch.empty(2, 2))
    with pytest.raises(StoreFormatError, match=r"is \(2, 2\) and the model's is \(2, 3\)"):
        files.rows(["layer.weight"], torch.empty(2, 3))


def test_rows_of_a_tensor_are_rows_and_a_scalar_is_whole() -> None:
    whole = nn.Parameter(values(4, 2))
    assert of_tensor(whole)(1, 3).tolist() == values(4, 2)[1:3].tolist()
    assert not of_tensor(whole)(0, 4).requires_grad
    assert of_tensor(torch.tensor(7.0))(0, 0).item() == 7.0


def test_sources_fill_what_is_there_and_what_is_on_the_meta_device(tmp_path: Path) -> None:
    wanted = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    wanted[1].running_mean.fill_(4.0)
    save_file(wanted.state_dict(), tmp_path / "model.safetensors")
    for device in ("cpu", "meta"):
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(device)
        sources = Sources(tmp_path, None, None)
        units, aliases = units_of(model), aliases_of(model)
        sources.check(units, aliases)
        sources.fill(units, aliases)
        sources.buffers(model)
        for name, value in wanted.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), (device, name)


def test_what_nothing_gives_values_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    save_file({"0.weight": values(2, 3), "0.bias": values(2)}, tmp_path / "model.safetensors")
    with pytest.raises(StoreFormatError, match=r"no tensor '1\.weight'"):
        Sources(tmp_path, None, None).check(units_of(model), {})
    with torch.device("meta"):
        model.gain = nn.Parameter(torch.ones(2))
    with pytest.raises(OptionError, match="on the meta device and has no reset_parameters"):
        Sources(None, None, None).check(units_of(model), {})
