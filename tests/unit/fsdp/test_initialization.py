"""First values: of modules on the meta device, of tensors that are there, from files."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tensorstow import AdamW, save_safetensors, stow
from tensorstow.base.errors import DamageError, OptionError, StoreFormatError, StowError
from tensorstow.fsdp.initialization import (
    InitialValues,
    initialize_buffers,
    initialize_unit,
    reader_of,
)
from tensorstow.fsdp.units import Unit, units_of
from tensorstow.io import digest_list


def unit_of(model: nn.Module) -> Unit:
    (unit,) = units_of(model, [])
    return unit


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4)
        self.head.weight = self.embedding.weight


def test_a_tied_parameter_keeps_what_its_first_module_gave_it() -> None:
    torch.manual_seed(0)
    want = nn.Embedding(4, 3).weight
    with torch.device("meta"):
        model = Tied()
    parameter = model.head.weight
    torch.manual_seed(0)
    initialize_unit(unit_of(model), None)
    assert torch.equal(model.embedding.weight, want)
    assert model.head.weight is model.embedding.weight is parameter
    assert not model.head.bias.is_meta


def test_an_initialiser_is_called_with_children_first_and_with_those_above_them() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.LayerNorm(2))
    called = []

    def init(module: nn.Module) -> None:
        called.append(type(module).__name__)
        for parameter in module.parameters(recurse=False):
            parameter.fill_(1.0)
        if isinstance(module, nn.Sequential) and isinstance(module[0], nn.Linear):
            module[0].weight.mul_(3.0)

    initialize_unit(unit_of(model), init)
    assert called == ["Linear", "Sequential", "LayerNorm", "Sequential"]
    assert (model[0][0].weight == 3.0).all()


def test_an_initialiser_is_not_called_with_what_reaches_into_another_unit() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.LayerNorm(2))
    units = {unit.name: unit for unit in units_of(model, [model[0][1]])}
    called = []

    def init(module: nn.Module) -> None:
        called.append(module)
        for parameter in module.parameters(recurse=False):
            parameter.fill_(1.0)

    initialize_unit(units[""], init)
    assert called == [model[0][0], model[1]]
    assert model[0][1].weight.is_meta


def test_buffers_of_a_module_are_initialised_with_it() -> None:
    with torch.device("meta"):
        model = nn.BatchNorm1d(3)
    initialize_unit(unit_of(model), None)
    assert torch.equal(model.running_var, torch.ones(3))
    assert model.num_batches_tracked.item() == 0


def test_what_has_no_initialiser_is_refused_by_its_whole_name() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Sequential(nn.PReLU(), nn.Module()))
        model[0][1].gain = nn.Parameter(torch.ones(2))
    (unit,) = [u for u in units_of(model, [model[0]]) if u.name]
    with pytest.raises(OptionError, match=r"^0\.1 \(Module\) .*init=.*weights="):
        initialize_unit(unit, None)


class Rotary(nn.Module):
    """Has buffers and nothing else."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("inverse", torch.ones(3).to(dtype), persistent=False)
        self.register_buffer("scale", torch.ones(()), persistent=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_a_buffer_that_nothing_gives_values_is_refused_by_name(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        module = Rotary(dtype)

    def init(module: nn.Module) -> None:
        module.scale.fill_(2.0)

    with pytest.raises(OptionError, match=r"^layers\.rotary\.inverse of Rotary") as caught:
        initialize_buffers(module, "layers.rotary", init)
    assert "init=" in str(caught.value)
    assert "weights=" in str(caught.value)
    assert "get_submodule('layers.rotary').inverse = " in str(caught.value)


def test_buffers_without_parameters_are_given_values() -> None:
    with torch.device("meta"):
        module = Rotary()

    def init(module: nn.Module) -> None:
        module.inverse.copy_(torch.arange(3))
        module.scale.fill_(2.0)

    initialize_buffers(module, "rotary", init)
    assert module.inverse.tolist() == [0.0, 1.0, 2.0]
    assert module.scale.item() == 2.0


def test_loaded_parameters_are_not_initialised_again_for_a_buffer() -> None:
    module = nn.Linear(2, 2)
    with torch.device("meta"):
        module.register_buffer("mask", torch.ones(2))
    with pytest.raises(OptionError, match="mask of Linear"):
        initialize_buffers(module, "", lambda m: m.reset_parameters())


def values(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def test_rows_of_a_tensor_are_rows_and_a_scalar_is_whole() -> None:
    whole = nn.Parameter(values(4, 2))
    assert reader_of(whole)(1, 3).tolist() == values(4, 2)[1:3].tolist()
    assert not reader_of(whole)(0, 4).requires_grad
    assert reader_of(torch.tensor(7.0))(0, 0).item() == 7.0


def test_sources_fill_what_is_there_and_what_is_on_the_meta_device(tmp_path: Path) -> None:
    wanted = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    wanted[1].running_mean.fill_(4.0)
    save_file(wanted.state_dict(), tmp_path / "model.safetensors")
    for device in ("cpu", "meta"):
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(device)
        sources = InitialValues(model, tmp_path)
        sources.check(units_of(model))
        sources.fill(units_of(model))
        sources.buffers(model)
        for name, value in wanted.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), (device, name)


def test_what_nothing_gives_values_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    save_file({"0.weight": values(2, 3), "0.bias": values(2)}, tmp_path / "model.safetensors")
    with pytest.raises(StoreFormatError, match=r"no tensor '1\.weight'"):
        InitialValues(model, tmp_path).check(units_of(model))
    with torch.device("meta"):
        model.gain = nn.Parameter(torch.ones(2))
    with pytest.raises(OptionError, match="on the meta device and has no reset_parameters"):
        InitialValues(model, None).check(units_of(model))


def test_files_that_are_changed_while_they_are_read_are_refused(tmp_path: Path) -> None:
    model = nn.BatchNorm1d(4)
    path = tmp_path / "model.safetensors"
    save_file(model.state_dict(), path)
    facts = path.stat()
    values = InitialValues(model, path)
    values.buffers(model)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    with pytest.raises(DamageError, match=r"model\.safetensors was changed while"):
        values.buffers(model)
    with pytest.raises(DamageError, match=r"model\.safetensors was changed while"):
        values.files.validate_unchanged()


def damaged(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))


@pytest.mark.parametrize("most", [100, 1 << 30])
@pytest.mark.parametrize("is_read_only", [False, True])
def test_weights_are_verified_by_their_digests(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    *,
    is_read_only: bool,
) -> None:
    monkeypatch.setattr(digest_list, "_warned_unlisted", set())
    save_safetensors(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), tmp_path, max_shard_bytes=most
    )

    def load(weights: Path) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        before = [p.detach().clone() for p in model.parameters()]
        try:
            _, optimizer = stow(model, None if is_read_only else AdamW, weights=weights)
        except StowError:
            assert all(map(torch.equal, before, model.parameters()))
            raise
        if optimizer is not None:
            optimizer.close()

    load(tmp_path)
    assert "has no list" not in caplog.text
    files = sorted(tmp_path.glob("*.safetensors"))
    for path in [*files, *tmp_path.glob("*.digests")]:
        whole = path.read_bytes()
        damaged(path)
        with pytest.raises(DamageError, match=path.name):
            load(tmp_path)
        path.write_bytes(whole)
    for index in tmp_path.glob("*.index.json"):
        index.write_bytes(index.read_bytes() + b" ")
        with pytest.raises(DamageError, match=index.name):
            load(tmp_path)
    damaged(files[-1])
    with pytest.raises(DamageError, match=files[-1].name):
        load(tmp_path if files[1:] else files[0])
    for path in tmp_path.glob("*.digests"):
        path.unlink()
    for _ in range(2):  # damaged, and nothing says so
        load(tmp_path)
    assert caplog.text.count("has no list of digests") == 1
