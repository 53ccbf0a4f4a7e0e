"""Frozen weights that are in the user's files: read from there, never copied, never written."""

import copy
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tensorstow
from ranks.pool import Pool
from ranks.twin import ADAMW, Twins, mesh_here, whole
from tensorstow import Plan
from tensorstow.base.errors import DamageError, OptionError, PoisonedError
from tensorstow.fsdp.report import parameter_bytes
from tensorstow.fsdp.stowed_parameter import storage_of
from tensorstow.io.engine import open_engine
from tensorstow.io.safetensors import read_table
from tensorstow.store.store import Store
from torch_versions import RESETS_FSDP

WIDTH, WORDS, BLOCKS, RANK = 48, 70, 8, 4
ON_DISK = Plan(parameters="disk", prefetch=1)


class Block(nn.Module):
    """A frozen matrix and bias, with a trained update of low rank beside it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.down = nn.Linear(width, RANK, bias=False)
        self.up = nn.Linear(RANK, width, bias=False)
        self.base.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class Model(nn.Module):
    """Blocks between an embedding and a head that are one frozen weight; the norm is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.head.requires_grad_(requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def made(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


def save(path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Save a model, whose tied weight has one name."""
    state = made(dtype).state_dict()
    del state["head.weight"]
    save_file(state, path)
    return path


def mapped(path: Path) -> Model:
    """Return a model whose frozen weights are mapped from a file, as of from_pretrained."""
    values = load_file(path)
    model = made(values["embedding.weight"].dtype)
    for module_name, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            key = f"{module_name}.{name}".replace("head", "embedding")
            if parameter is not None and not parameter.requires_grad:
                module._parameters[name] = nn.Parameter(values[key], requires_grad=False)
    model.head.weight = model.embedding.weight
    return model


def loss(model: nn.Module, rank: int, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + batch)
    tokens = torch.randint(WORDS, (2, 8), generator=generator)
    logits = model(tokens).float().flatten(0, 1)
    return nn.functional.cross_entropy(logits, tokens.flatten())


def frozen_bytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters() if not p.requires_grad)


def placed(path: Path, way: str, **options: Any) -> tuple[nn.Module, Any]:  # noqa: ANN401
    """Return a model with weights on disk, by ``weights=`` or mapped."""
    given = {"weights": path} if way == "weights" else {}
    model = mapped(path) if way == "mapped" else made()
    plan = options.pop("plan", ON_DISK)
    return tensorstow.stow(model, options.pop("optimizer", ADAMW), plan=plan, **given, **options)


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:  # noqa: ANN401
    losses = []
    for step in steps:
        found = loss(model, 0, step)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.item())
    return losses


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """Yield a file of weights, which nothing may write to."""
    path = save(tmp_path / "model.safetensors")
    before = path.read_bytes()
    yield path
    assert path.read_bytes() == before


# --- parity ---


def trained_as_in_memory(path: Path, way: str, plan: Plan, dtype: torch.dtype) -> None:
    options = {"weights": path} if way == "weights" else {}
    make = partial(mapped, path) if way == "mapped" else partial(made, dtype)
    both = Twins(make, loss, plan, ADAMW, **options)
    held = parameter_bytes(both.stowed)
    shares = frozen_bytes(both.alone) // both.world
    assert shares <= held.file_bytes <= shares + WIDTH * WIDTH * 4
    both.train(range(3))
    both.compare()
    trained = sum(p.nbytes for p in both.alone.parameters() if p.requires_grad)
    moved = parameter_bytes(both.stowed)
    # The first values, and each update's: of what is trained, rounded up to blocks.
    assert moved.bytes_written <= 4 * (trained + (BLOCKS + 1) * 4096)
    assert moved.bytes_read >= moved.file_bytes
    both.close()


PLANS = [
    ON_DISK,
    Plan(parameters="disk", states="disk"),
    Plan(parameters="disk", states="disk", overlap="backward"),
    Plan(parameters="host", parameter_units={"blocks.1": "disk", "": "disk"}),
]


@pytest.mark.parametrize("way", ["weights", "mapped"])
@pytest.mark.parametrize("world", [1, 2])
def test_adapters_train_as_over_weights_in_memory(
    ranks: Pool, file: Path, way: str, world: int
) -> None:
    for plan in PLANS[:3]:
        ranks(world).run(trained_as_in_memory, file, way, plan, torch.float32)


@pytest.mark.parametrize("world", [1, 2])
def test_in_bf16(ranks: Pool, tmp_path: Path, world: int) -> None:
    path = save(tmp_path / "half.safetensors", torch.bfloat16)
    for way in ("weights", "mapped"):
        ranks(world).run(trained_as_in_memory, path, way, ON_DISK, torch.bfloat16)


@pytest.mark.parametrize("way", ["weights", "mapped"])
def test_memory_is_bounded_whatever_the_model_is(file: Path, way: str) -> None:
    model, optimizer = placed(file, way)
    train(model, optimizer, range(2))
    held = parameter_bytes(model)
    assert held.file_bytes >= frozen_bytes(model)
    (pool,) = {s.pager.pool for p in model.parameters() if (s := storage_of(p)) and s.pager}
    assert held.most_buffer_pool_bytes <= pool.memory.capacity < pool.total_bytes
    assert held.bytes_read > 2 * held.file_bytes
    optimizer.close()


def test_units_in_memory_and_units_in_files(file: Path) -> None:
    want = train(*placed(file, "", plan=Plan()), range(3))
    for way in ("weights", "mapped"):
        model, optimizer = placed(file, way, plan=PLANS[3])
        block = frozen_bytes(made().blocks[0])
        assert parameter_bytes(model).file_bytes == block + WORDS * WIDTH * 4
        assert train(model, optimizer, range(3)) == want


# --- what is not in a file as it is ---


def test_a_mapped_weight_that_was_written_to_is_copied(file: Path) -> None:
    model = mapped(file)
    with torch.no_grad():
        model.blocks[1].base.weight[3, 5] += 1.0
    want = model.blocks[1].base.weight.clone()
    model, optimizer = tensorstow.stow(model, ADAMW, plan=ON_DISK)
    assert parameter_bytes(model).file_bytes == frozen_bytes(made()) - want.nbytes
    train(model, optimizer, range(2))
    assert torch.equal(whole(dict(model.named_parameters())["blocks.1.base.weight"]), want)


def test_a_mapped_weight_with_the_negative_bit_is_copied(file: Path) -> None:
    model = mapped(file)
    layer = model.blocks[1].base
    want = -layer.weight
    layer.weight = nn.Parameter(torch._neg_view(layer.weight.detach()), requires_grad=False)
    model, optimizer = tensorstow.stow(model, ADAMW, plan=ON_DISK)
    assert parameter_bytes(model).file_bytes == frozen_bytes(made()) - want.nbytes
    train(model, optimizer, range(2))
    assert torch.equal(whole(dict(model.named_parameters())["blocks.1.base.weight"]), want)


def test_weights_in_another_dtype_are_copied_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(tmp_path / "half.safetensors", torch.bfloat16)
    with caplog.at_level(logging.INFO, "tensorstow"):
        model, _ = placed(path, "weights")
    assert parameter_bytes(model).file_bytes == 0
    (said,) = [r.getMessage() for r in caplog.records if "frozen weights are copied" in r.message]
    assert "files in the model's dtype" in said


def test_nothing_is_said_where_nothing_is_copied(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tensorstow"):
        for way in ("weights", "mapped"):
            placed(file, way)
    assert "are copied" not in caplog.text


def test_a_file_without_a_name_is_copied(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    other.write_bytes(file.read_bytes())
    model = mapped(other)
    other.unlink()
    model, optimizer = tensorstow.stow(model, ADAMW, plan=ON_DISK)
    assert parameter_bytes(model).file_bytes == 0
    assert train(model, optimizer, range(2)) == train(*placed(file, "", plan=Plan()), range(2))


def from_other_files(path: Path, other: Path) -> None:
    import torch.distributed as dist  # noqa: PLC0415  # in ranks alone

    model = mapped(path if dist.get_rank() == 0 else other)
    model, _ = tensorstow.stow(model, ADAMW, plan=ON_DISK, mesh=mesh_here())
    for name, values in load_file(path).items():
        assert torch.equal(whole(dict(model.named_parameters())[name]), values), name


def test_the_first_ranks_values_count_if_files_differ(
    ranks: Pool, file: Path, tmp_path: Path
) -> None:
    values = load_file(file)
    values["blocks.1.base.weight"] = values["blocks.1.base.weight"] + 1
    save_file(values, tmp_path / "other.safetensors")
    ranks(2).run(from_other_files, file, tmp_path / "other.safetensors")


# --- changes later ---


def write_unseen(path: Path) -> None:
    """Write to a file, and set its time back."""
    seen = path.stat()
    with path.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"x")
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def placed_over(path: Path, way: str, plan: Plan) -> tuple[Any, Any]:
    """Return a model whose frozen weights are in the file, in memory too."""
    if way == "mapped":
        return tensorstow.stow(mapped(path), ADAMW, plan=plan)
    with torch.device("meta"):
        model = Model()
    return tensorstow.stow(model, ADAMW, plan=plan, weights=path)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(parameters="disk", prefetch=0),
        Plan(parameters="host"),
        Plan(parameters="device"),
        Plan(states="disk", overlap="backward"),
    ],
    ids=["disk", "host", "device", "backward"],
)
@pytest.mark.parametrize("way", ["weights", "mapped"])
@RESETS_FSDP
def test_a_file_that_changes_meanwhile_is_an_error(tmp_path: Path, way: str, plan: Plan) -> None:
    path = save(tmp_path / "model.safetensors")
    model, optimizer = placed_over(path, way, plan)
    train(model, optimizer, range(1))
    write_unseen(path)
    with pytest.raises(DamageError, match="was changed while a model is computed with"):
        train(model, optimizer, range(1, 3))
    with suppress(DamageError, PoisonedError):  # of updates that were under way
        optimizer.close()


def test_a_file_that_a_read_only_model_is_mapped_from_is_watched(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors")
    values, padding = load_file(path), 0
    while read_table(path).entries["embedding.weight"].offset % 64:  # unaligned ones are copied
        padding += 1
        save_file(values, path, {"padding": "x" * padding})
    model, _ = tensorstow.stow(mapped(path), None, plan=Plan())
    loss(model, 0, 0)
    write_unseen(path)
    with pytest.raises(DamageError, match="was changed while a model is computed with"):
        loss(model, 0, 0)


def test_copies_of_a_model_have_nothing_of_the_file(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors")
    model, _ = placed_over(path, "weights", Plan())
    expected = loss(model, 0, 0)
    other = copy.deepcopy(model)
    write_unseen(path)
    assert torch.equal(loss(other, 0, 0), expected)
    with pytest.raises(DamageError):
        loss(model, 0, 0)


def test_a_new_file_of_the_same_name_leaves_the_mapped_one(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors")
    model, optimizer = placed_over(path, "weights", Plan())
    before = train(model, optimizer, range(1))
    (tmp_path / "new").write_bytes(b"x")
    (tmp_path / "new").rename(path)
    assert before == train(*placed(save(tmp_path / "other.safetensors"), "weights"), range(1))
    train(model, optimizer, range(1, 3))


def from_other_memory(path: Path) -> None:
    import torch.distributed as dist  # noqa: PLC0415  # in ranks alone

    model, optimizer = placed_over(path, "weights", Plan(stage=1))
    train(model, optimizer, range(1))
    dist.barrier()
    if dist.get_rank() == 0:
        write_unseen(path)
    dist.barrier()
    with pytest.raises(DamageError, match="was changed"):
        train(model, optimizer, range(1, 2))


def test_every_rank_sees_that_a_file_changed(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(from_other_memory, save(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("way", ["weights", "mapped"])
def test_a_weight_that_is_unfrozen_later_is_trained(file: Path, way: str) -> None:
    def unfrozen(model: nn.Module, optimizer: Any) -> tuple[list[float], Any]:  # noqa: ANN401
        losses = train(model, optimizer, range(2))
        dict(model.named_parameters())["blocks.1.base.weight"].requires_grad_(requires_grad=True)
        losses += train(model, optimizer, range(2, 5))
        return losses, whole(dict(model.named_parameters())["blocks.1.base.weight"])

    want, weight = unfrozen(*placed(file, "", plan=Plan()))
    got, ours = unfrozen(*placed(file, way))
    assert got == want
    assert torch.equal(ours, weight)
    assert not torch.equal(weight, load_file(file)["blocks.1.base.weight"])


@pytest.mark.parametrize("way", ["weights", "mapped"])
def test_writes_to_a_frozen_weight_leave_the_file_alone(
    file: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = placed(file, way)
    weight = dict(model.named_parameters())["blocks.2.base.weight"]
    with torch.no_grad(), caplog.at_level(logging.INFO, "tensorstow"):
        weight.mul_(2.0)
    assert "weights that were frozen were written to" in caplog.text
    before = parameter_bytes(model).file_bytes
    assert before == frozen_bytes(made()) - frozen_bytes(made().blocks[2])
    train(model, optimizer, range(3))
    want = load_file(file)["blocks.2.base.weight"] * 2
    assert torch.equal(whole(weight), want)
    weights = {n: p.detach() for n, p in made().named_parameters()}
    model.load_state_dict(weights | {"head.weight": weights["embedding.weight"]})
    assert torch.equal(whole(weight), weights["blocks.2.base.weight"])
    optimizer.close()


# --- commits ---


def run_of(tmp_path: Path, path: Path, way: str, **options: Any) -> tuple[nn.Module, Any]:  # noqa: ANN401
    """Return a model and its optimizer, which commits each step."""
    make = partial(tensorstow.AdamW, lr=1e-2, dir=tmp_path / "run", commit_every=1)
    return placed(path, way, optimizer=make, **options)


@pytest.mark.parametrize("way", ["weights", "mapped"])
def test_a_commit_has_no_bytes_of_files_and_a_run_goes_on(
    file: Path, tmp_path: Path, way: str
) -> None:
    want = train(*placed(file, "", plan=Plan()), range(4))
    model, optimizer = run_of(tmp_path, file, way)
    assert train(model, optimizer, range(2)) == want[:2]
    optimizer.close()
    store = Store.open([tmp_path / "run"], open_engine())
    generation = store.generation()
    store.close()
    assert generation is not None
    names = {record.name for record in generation.tensors}
    assert not any("base" in name or "embedding" in name for name in names)
    model, optimizer = run_of(tmp_path, file, way)
    assert optimizer.resume() == 2
    assert parameter_bytes(model).file_bytes >= frozen_bytes(model)
    assert train(model, optimizer, range(2, 4)) == want[2:]
    optimizer.close()


def test_a_run_goes_on_with_weights_in_memory_and_back(file: Path, tmp_path: Path) -> None:
    want = train(*placed(file, "", plan=Plan()), range(4))
    options = [{"way": "mapped"}, {"way": "", "plan": Plan()}, {"way": "weights"}]
    for number, each in enumerate(options):
        model, optimizer = run_of(tmp_path, file, **each)
        assert (optimizer.resume() or 0) == number
        assert train(model, optimizer, range(number, number + 1)) == want[number : number + 1]
        if each["way"]:  # what the run committed is what the file has: no copy is made of it
            assert parameter_bytes(model).file_bytes >= frozen_bytes(model)
        optimizer.close()


@pytest.mark.parametrize("way", ["weights", "mapped", ""])
def test_a_run_over_another_base_is_refused(file: Path, tmp_path: Path, way: str) -> None:
    model, optimizer = run_of(tmp_path, file, "weights")
    train(model, optimizer, range(1))
    optimizer.close()
    values = load_file(file)
    values["blocks.1.base.weight"] = values["blocks.1.base.weight"] + 1
    save_file(values, tmp_path / "other.safetensors")
    other = tmp_path / "other.safetensors"
    model = mapped(other)
    model.load_state_dict(values, strict=False)
    make = partial(tensorstow.AdamW, lr=1e-2, dir=tmp_path / "run", commit_every=1)
    given = {"weights": other} if way == "weights" else {}
    plan = ON_DISK if way else Plan()
    model, optimizer = tensorstow.stow(model, make, plan=plan, **given)
    with pytest.raises(OptionError, match=r"blocks\.1\.base\.weight has other values"):
        optimizer.resume()
    optimizer.close()


def test_a_weight_that_was_written_to_is_committed(file: Path, tmp_path: Path) -> None:
    model, optimizer = run_of(tmp_path, file, "mapped")
    with torch.no_grad():
        dict(model.named_parameters())["blocks.2.base.bias"].add_(1.0)
    train(model, optimizer, range(2))
    optimizer.close()
    model, optimizer = run_of(tmp_path, file, "mapped")
    assert optimizer.resume() == 2
    bias = whole(dict(model.named_parameters())["blocks.2.base.bias"])
    assert torch.equal(bias, load_file(file)["blocks.2.base.bias"] + 1)
    optimizer.close()
