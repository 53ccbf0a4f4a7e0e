"""Adapters over a frozen base that is stored as codes: decoded unit by unit, and never copied."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tensorstow
from ranks.pool import Pool
from ranks.twin import ADAMW, Twins, whole
from tensorstow import Plan
from tensorstow.base.errors import DamageError, OptionError
from tensorstow.checkpoint.pretrained import PretrainedFiles
from tensorstow.checkpoint.weight_encoders import ENCODERS
from tensorstow.checkpoint.weight_files import WeightFile
from tensorstow.fsdp.initialization import InitialValues
from tensorstow.fsdp.report import parameter_bytes
from tensorstow.fsdp.stowed_parameter import storage_of
from tensorstow.fsdp.units import units_of
from tensorstow.io.files import ALIGN
from tensorstow.io.safetensors import Entry
from tensorstow.planner.bounds import SHARD_ALIGN
from tensorstow.planner.placement import Conditions, Item, items_of
from tensorstow.planner.sizes import Sizes
from unit.fsdp.test_frozen_files import BLOCKS, WORDS, Block, loss, train

WIDTH = 44
"""So many columns that rows begin inside blocks of 64 elements."""
KINDS = ["int8", "nf4"]
DISK, HOST = Plan(parameters="disk", prefetch=1), Plan(parameters="host", prefetch=1)


class Model(nn.Module):
    """Blocks between a frozen embedding and a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.embedding.requires_grad_(requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made() -> Model:
    torch.manual_seed(0)
    return Model().to(torch.bfloat16)


def save(path: Path, kind: str) -> Path:
    """Save a model whose frozen matrices are codes."""
    tensors: dict[str, torch.Tensor] = {}

    def put(name: str, values: torch.Tensor, start: int) -> None:
        flat = tensors[name].view(-1)
        flat[start : start + values.numel()] = values.reshape(-1)

    for name, values in made().state_dict().items():
        if not name.endswith("base.weight"):
            tensors[name] = values
            continue
        for part, entry in ENCODERS[kind].entries(name, Entry(values.dtype, values.shape)).items():
            tensors[part] = torch.zeros(entry.shape, dtype=entry.dtype)
        ENCODERS[kind].write(name, values, put)
    save_file(tensors, path)
    return path


def decoded(path: Path) -> Model:
    """Return a model in memory with the values that the codes stand for."""
    model, files = made(), PretrainedFiles(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(files.reader([name], parameter)(0, parameter.shape[0]))
    return model


def placed(path: Path, **options: Any) -> tuple[nn.Module, Any]:  # noqa: ANN401
    return tensorstow.stow(
        made(), options.pop("optimizer", ADAMW), weights=path, **{"plan": DISK, **options}
    )


def in_memory(path: Path, steps: range) -> list[float]:
    return train(*tensorstow.stow(decoded(path), ADAMW, plan=Plan()), steps)


def code_bytes(path: Path) -> int:
    """Return the bytes of codes and scales that are read for one pass over the base."""
    tensors = load_file(path)
    ends = ("base.weight", "base.weight_scale", "base.weight.absmax")
    return sum(tensor.nbytes for name, tensor in tensors.items() if name.endswith(ends))


# --- parity ---


def trained_as_in_memory(path: Path, plan: Plan) -> tuple[int, int]:
    both = Twins(partial(decoded, path), loss, plan, ADAMW, weights=path)
    both.train(range(3))
    both.compare()
    held = parameter_bytes(both.stowed)
    both.close()
    return held.file_bytes, held.host_bytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2])
def test_adapters_train_as_over_the_values_in_memory(
    ranks: Pool, tmp_path: Path, kind: str, world: int
) -> None:
    path = save(tmp_path / "model.safetensors", kind)
    on_disk = [
        DISK,
        DISK.but(states="disk", overlap="backward"),
        DISK.but(activations="recompute"),
    ]
    for plan in on_disk if world == 2 else on_disk[:1]:
        held = ranks(world).run(trained_as_in_memory, path, plan)
        # Rows begin in the middle of blocks: ranks may read a block and a scale twice.
        whole_file = code_bytes(path) + (BLOCKS + WORDS) * WIDTH * 2
        slack = world * BLOCKS * 128 + world * WIDTH * 2
        assert whole_file <= sum(nbytes for nbytes, _ in held) <= whole_file + slack
    held = ranks(world).run(trained_as_in_memory, path, HOST)
    assert {nbytes for nbytes, _ in held} == {0}


def decoded_by_rows(path: Path, plan: Plan) -> None:
    model, optimizer = placed(path, plan=plan)
    train(model, optimizer, range(1))
    for name, parameter in decoded(path).named_parameters():
        if not parameter.requires_grad:
            assert torch.equal(whole(model.get_parameter(name)), parameter), name
    optimizer.close()


@pytest.mark.parametrize("kind", KINDS)
def test_uneven_rows_are_decoded(ranks: Pool, tmp_path: Path, kind: str) -> None:
    path = save(tmp_path / "model.safetensors", kind)
    for plan in (DISK, HOST):
        ranks(3).run(decoded_by_rows, path, plan)


def planned_items(path: Path, plan: Plan) -> list[Item]:
    model = made()
    units, values = units_of(model), InitialValues(model, path)
    sizes = Sizes.of(units, 1, values.coded_bytes(units, 1))
    return items_of(plan, sizes, Conditions(device_is_host=True))


@pytest.mark.parametrize("kind", KINDS)
def test_codes_in_host_memory_stay_codes(tmp_path: Path, kind: str) -> None:
    path = save(tmp_path / "model.safetensors", kind)
    model, optimizer = placed(path, plan=HOST)
    held = parameter_bytes(model)
    coded = BLOCKS * WIDTH * WIDTH * 2
    rest = sum(p.nbytes for p in model.parameters()) - coded
    assert rest < held.host_bytes <= rest + code_bytes(path)
    (planned,) = [i for i in planned_items(path, HOST) if i.purpose == "parameters"]
    assert abs(planned.nbytes - held.host_bytes) <= SHARD_ALIGN * len(list(model.parameters()))
    assert train(model, optimizer, range(3)) == in_memory(path, range(3))
    held = parameter_bytes(model)
    assert (held.bytes_read, held.bytes_written, held.file_bytes) == (0, 0, 0)
    assert held.most_buffer_pool_bytes < BLOCKS * 4096  # a block's values have less than a page
    optimizer.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_is_read_twice_a_step_and_never_written(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "model.safetensors", kind)
    before, read = path.read_bytes(), []
    read_file = WeightFile.read

    def counted(file: WeightFile, offset: int, into: torch.Tensor) -> Any:  # noqa: ANN401
        read.append(into.numel())
        return read_file(file, offset, into)

    monkeypatch.setattr(WeightFile, "read", counted)
    model, optimizer = placed(path, plan=DISK.but(activations="recompute"))
    assert train(model, optimizer, range(2)) == in_memory(path, range(2))
    read.clear()
    train(model, optimizer, range(2, 6))
    nbytes = parameter_bytes(model).file_bytes
    assert 4 * nbytes < sum(read) <= 4 * 2.02 * nbytes
    optimizer.close()
    assert path.read_bytes() == before


@pytest.mark.parametrize("kind", KINDS)
def test_units_on_all_tiers_and_below_stage_3(tmp_path: Path, kind: str) -> None:
    path = save(tmp_path / "model.safetensors", kind)
    want = in_memory(path, range(3))
    mixed = Plan(parameters="host", parameter_units={"blocks.1": "disk", "": "disk"})
    for plan in (mixed, Plan(parameters="device"), HOST.but(stage=1)):
        model, optimizer = placed(path, plan=plan)
        assert train(model, optimizer, range(3)) == want
        optimizer.close()


# --- what else is done to them ---


@pytest.mark.parametrize("plan", [DISK, HOST])
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_is_written_to_is_like_any_other(
    tmp_path: Path, kind: str, plan: Plan
) -> None:
    path = save(tmp_path / "model.safetensors", kind)
    before, want = path.read_bytes(), decoded(path).blocks[2].base.weight.detach() * 2
    model, optimizer = placed(path, plan=plan)
    weight = dict(model.named_parameters())["blocks.2.base.weight"]
    with torch.no_grad():
        weight.mul_(2.0)
    train(model, optimizer, range(2))
    assert torch.equal(whole(weight), want)
    weight.requires_grad_(requires_grad=True)
    train(model, optimizer, range(2, 4))
    assert not torch.equal(whole(weight), want)
    optimizer.close()
    assert path.read_bytes() == before


@pytest.mark.parametrize("plan", [DISK, HOST])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_over_the_same_codes_alone(tmp_path: Path, kind: str, plan: Plan) -> None:
    path = save(tmp_path / "model.safetensors", kind)
    want = in_memory(path, range(4))
    durable = partial(tensorstow.AdamW, lr=1e-2, dir=tmp_path / "run", commit_every=1)
    model, optimizer = placed(path, plan=plan, optimizer=durable)
    assert train(model, optimizer, range(2)) == want[:2]
    optimizer.close()
    model, optimizer = placed(path, plan=plan, optimizer=durable)
    assert optimizer.resume() == 2
    assert train(model, optimizer, range(2, 4)) == want[2:]
    optimizer.close()
    tensors = load_file(path)
    tensors["blocks.1.base.weight"] = tensors["blocks.1.base.weight"].flip(0)
    save_file(tensors, tmp_path / "other.safetensors")
    model, optimizer = placed(tmp_path / "other.safetensors", plan=plan, optimizer=durable)
    with pytest.raises(OptionError, match=r"blocks\.1\.base\.weight has other values"):
        optimizer.resume()
    optimizer.close()


def test_a_file_that_changes_meanwhile_is_an_error(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", "int8")
    model, optimizer = placed(path)
    train(model, optimizer, range(1))
    path.write_bytes(path.read_bytes()[:-8] + b"\1" * 8)
    with pytest.raises(DamageError, match="was changed"):
        train(model, optimizer, range(1, 3))


def test_buffers_hold_codes_and_values_within_the_bound(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", "int8")
    model, optimizer = placed(path)
    train(model, optimizer, range(2))
    (pool,) = {s.pager.pool for p in model.parameters() if (s := storage_of(p)) and s.pager}
    held = parameter_bytes(model)
    assert held.most_buffer_pool_bytes <= pool.memory.capacity < pool.total_bytes
    purpose = "parameters from disk, in memory"
    (planned,) = [i for i in planned_items(path, DISK) if i.purpose == purpose]
    assert abs(planned.nbytes - pool.memory.capacity) <= 2 * ALIGN * (BLOCKS + 1)
    optimizer.close()


def test_release_gives_back_values_and_keeps_codes_only_where_it_may(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", "nf4")
    want = in_memory(path, range(2))
    for plan in (DISK, HOST.but(parameter_units={"": "disk"})):
        model, optimizer = placed(path, plan=plan.but(states="disk"))
        assert train(model, optimizer, range(1)) == want[:1]
        if plan is DISK:
            optimizer.release(host=True)
            assert parameter_bytes(model).buffer_pool_bytes == 0
        else:
            with pytest.raises(OptionError, match="of weights live in CPU memory"):
                optimizer.release(host=True)
            optimizer.release()
        optimizer.wake()
        assert train(model, optimizer, range(1, 2)) == want[1:]
        optimizer.close()
