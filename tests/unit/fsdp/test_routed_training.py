"""Adapters beside frozen experts on disk: a step reads the experts that tokens are routed to."""

import errno
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstow
from parity.cover import crossed
from ranks.pool import Pool
from ranks.twin import ADAMW
from tensorstow import Plan
from tensorstow.base.errors import OptionError, PoisonedError
from tensorstow.checkpoint.weight_files import WeightFile
from tensorstow.fsdp import placements
from tensorstow.fsdp.report import parameter_bytes
from tensorstow.fsdp.stowed_parameter import storage_of
from tensorstow.io.files import IoFuture
from tensorstow.memory import buffer_pool
from tensorstow.memory.buffer_pool import BufferPool, PooledBuffer
from tensorstow.nn.routed_experts import is_of_experts, routed_experts
from tensorstow.tensors.dtensor import to_local
from unit.fsdp.test_experts import FAMILIES, coded, made

# peft's, of transformers
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
PLAN = Plan(parameters="disk", states="host", prefetch=1)
ATTENTION = r".*self_attn\.(q|v|q_b|kv_b)_proj"


def adapted(family: str, dtype: torch.dtype, layers: str = ATTENTION) -> Any:  # noqa: ANN401  # peft's
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415  # takes seconds

    model = made(family, dtype)
    model.config.use_cache = False
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=layers)).train()


class Reads:
    """The experts that are read of each buffer of experts, and those that calls use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes = 0
        begin = buffer_pool._begin_read

        def noted(files: object, buffer: PooledBuffer, pieces: Sequence[int]) -> int:
            self.nbytes += sum(run.nbytes for piece in pieces for run in buffer.pieces[piece])
            return begin(files, buffer, pieces)  # type: ignore[arg-type]

        monkeypatch.setattr(buffer_pool, "_begin_read", noted)


def used(model: torch.nn.Module) -> dict[str, list[tuple[frozenset[int], int]]]:
    """Note the experts of each call, and the bytes of one, by the module's name."""
    calls: dict[str, list[tuple[frozenset[int], int]]] = defaultdict(list)

    def note(name: str, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        nbytes = sum(p[0].numel() * p.element_size() for p in module.parameters())
        calls[name].append((routed_experts(module, args, {}), nbytes))

    for name, module in model.named_modules():
        if is_of_experts(module):
            module.register_forward_pre_hook(partial(note, name))
    return calls


def train(model: Any, optimizer: Any, steps: int, micro: int = 1) -> list[float]:  # noqa: ANN401
    generator, losses = torch.Generator().manual_seed(2), []
    for _ in range(steps):
        for _ in range(micro):
            tokens = torch.randint(1, 64, (1, 2), generator=generator)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def adapters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {name: torch.as_tensor(value) for name, value in state.items() if "lora_" in name}


def bytes_of(calls: dict[str, list[tuple[frozenset[int], int]]]) -> int:
    return sum(len(experts) * nbytes for c in calls.values() for experts, nbytes in c)


def pool_of(model: torch.nn.Module) -> BufferPool:
    storages = map(storage_of, model.parameters())
    return next(s.pager.pool for s in storages if s is not None and s.pager is not None)


def read_alike(
    alone: Any,  # noqa: ANN401
    model: Any,  # noqa: ANN401
    plan: Plan,
    weights: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[int, int]:
    """Train both alike; return the bytes of experts that a forward reads, and that it uses.

    Whatever is in memory leaves before each half of a step: the backward reads as many.
    """
    losses = train(alone, ADAMW(alone.named_parameters()), 3)
    model, optimizer = tensorstow.stow(model, ADAMW, plan=plan, weights=weights)
    held = parameter_bytes(model)
    assert held.disk_bytes - held.file_bytes == sum(v.nbytes for v in adapters(alone).values())
    assert train(model, optimizer, 3) == losses
    wanted = adapters(alone)
    for name, value in adapters(model).items():
        assert torch.equal(value, wanted[name]), name
    reads, calls = Reads(monkeypatch), used(alone)
    tokens = torch.tensor([[3, 5]])
    empty(model)
    loss = model(input_ids=tokens, labels=tokens).loss
    assert torch.equal(loss, alone(input_ids=tokens, labels=tokens).loss)
    once = reads.nbytes
    empty(model)
    loss.backward()
    assert reads.nbytes == 2 * once
    optimizer.close()
    return once, bytes_of(calls)


def empty(model: torch.nn.Module) -> None:
    """Let everything that is in memory leave it."""
    pool = pool_of(model)
    capacity = pool.memory.capacity
    pool.resize(0, least=0)
    pool.memory.capacity = capacity


@crossed(
    family=tuple(FAMILIES),
    dtype=(torch.float32, torch.bfloat16),
    activations=("keep", "recompute"),
)
def test_a_step_reads_routed_experts_alone(
    tmp_path: Path,
    family: str,
    dtype: torch.dtype,
    activations: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made(family, dtype).save_pretrained(tmp_path, max_shard_size="100KB")
    alone = adapted(family, dtype)
    plan = PLAN.but(activations=activations)
    once, routed = read_alike(alone, adapted(family, dtype), plan, tmp_path, monkeypatch)
    assert 0 < once == routed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Save a Mixtral."""
    made("mixtral").save_pretrained(tmp_path / "base", max_shard_size="100KB")
    return tmp_path / "base"


def stowed(folder: Path, **options: Any) -> tuple[Any, Any]:  # noqa: ANN401
    make = partial(ADAMW, durability="none")
    model, plan = adapted("mixtral", torch.float32), PLAN.but(**options)
    return tensorstow.stow(model, make, plan=plan, weights=folder, dir=folder.parent)


def test_backwards_of_other_calls_have_their_own_experts(folder: Path) -> None:
    """Two forwards, then their backwards in the order of the forwards."""
    alone = adapted("mixtral", torch.float32)
    model, optimizer = stowed(folder)
    batches = torch.tensor([[3, 5]]), torch.tensor([[7, 11]])
    for each in (alone, model):
        losses = [each(input_ids=tokens, labels=tokens).loss for tokens in batches]
        for loss in losses:
            empty(model)
            loss.backward()
    gradients = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
    assert len(gradients) == 12
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(to_local(parameter.grad), gradients[name]), name
    optimizer.close()


def test_a_backward_reads_experts_ahead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = stowed(folder)
    train(model, optimizer, 2)  # the order of units is known from then on
    in_memory: list[bool] = []
    pin = BufferPool.pin

    def noted(pool: BufferPool, buffer: PooledBuffer, **how: bool) -> None:
        if buffer.pieces and not buffer.pins:
            in_memory.append(buffer.is_in_memory)
        pin(pool, buffer, **how)

    monkeypatch.setattr(BufferPool, "pin", noted)
    tokens = torch.tensor([[3, 5]])
    empty(model)
    loss = model(input_ids=tokens, labels=tokens).loss
    assert not any(in_memory)
    empty(model)
    in_memory.clear()
    loss.backward()
    assert any(in_memory)
    optimizer.close()


def test_a_forward_reads_no_experts_of_the_one_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = adapted("mixtral", torch.float32)
    model, optimizer = stowed(folder)
    train(model, optimizer, 2)
    empty(model)
    reads, calls = Reads(monkeypatch), used(alone)
    for tokens in torch.tensor([[[3, 5]], [[7, 11]]]):  # gradients are recorded, and not used
        for each in (alone, model):
            each(input_ids=tokens, labels=tokens)
        empty(model)
    assert reads.nbytes == bytes_of(calls)
    optimizer.close()


@pytest.mark.parametrize("options", [{"micro_batches": 2}, {"activations": "disk"}], ids=str)
def test_other_plans_have_the_same_bits(folder: Path, options: dict[str, Any]) -> None:
    def trained(**plan: Any) -> list[float]:  # noqa: ANN401
        model, optimizer = stowed(folder, **plan)
        generator, losses = torch.Generator().manual_seed(3), []
        for _ in range(3):
            tokens = torch.randint(1, 64, (2, 4), generator=generator)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        optimizer.close()
        return losses

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placements, "take_experts", lambda *_: [])  # read as wholes
        whole = trained(**options)
    assert trained(**options) == whole


def test_all_experts_are_read_where_all_are_wanted(folder: Path) -> None:
    alone = adapted("mixtral", torch.float32)
    model, optimizer = stowed(folder)
    train(model, optimizer, 1)
    named = dict(tensorstow.named_weights(model))
    experts = [name for name in alone.state_dict() if ".experts." in name]
    assert len(experts) == 6
    for name in experts:
        assert torch.equal(model.state_dict()[name], alone.state_dict()[name]), name
        assert torch.equal(named[name], alone.state_dict()[name]), name
    optimizer.close()


def test_a_write_in_a_forward_has_the_experts_that_no_token_used(folder: Path) -> None:
    alone = adapted("mixtral", torch.float32)
    model, optimizer = stowed(folder)
    (name, experts), *_ = ((n, m) for n, m in model.named_modules() if is_of_experts(m))

    def scale(module: torch.nn.Module, *_: object) -> None:
        with torch.no_grad():
            module.down_proj[:] *= 2

    with torch.no_grad():
        tokens = torch.tensor([[3]])
        handle = experts.register_forward_hook(scale)
        model(input_ids=tokens)
        handle.remove()
    written = model.state_dict()[f"{name}.down_proj"]
    wanted = 2 * alone.state_dict()[f"{name}.down_proj"]
    assert torch.equal(written, wanted)
    optimizer.close()


def test_a_write_in_a_call_that_lacks_experts_is_refused(folder: Path) -> None:
    """The experts that no token used would be read from the files afterwards, without it."""
    model, optimizer = stowed(folder)
    experts = next(module for module in model.modules() if is_of_experts(module))

    def scale(module: torch.nn.Module, *_: object) -> None:
        module.down_proj.mul_(2)

    experts.register_forward_pre_hook(scale)
    with torch.no_grad(), pytest.raises(OptionError, match="the others would lack the change"):
        model(input_ids=torch.tensor([[3]]))
    with suppress(PoisonedError):
        optimizer.close()


def test_experts_that_are_loaded_after_a_forward_are_read_as_wholes(folder: Path) -> None:
    """Their buffer leaves the files, and what a backward would read of it was known already."""
    alone = adapted("mixtral", torch.float32)
    model, optimizer = stowed(folder)
    tokens = torch.tensor([[3, 5]])
    model(input_ids=tokens)
    state = {n: 2 * v if "down_proj" in n else v for n, v in alone.state_dict().items()}
    for each in (alone, model):
        each.load_state_dict(state)
    empty(model)
    losses = [each(input_ids=tokens, labels=tokens).loss for each in (alone, model)]
    assert torch.equal(*losses)
    empty(model)
    losses[1].backward()
    optimizer.close()


def test_a_hook_that_routes_tokens_to_experts_that_were_not_read_is_refused(folder: Path) -> None:
    model, optimizer = stowed(folder)
    experts = next(module for module in model.modules() if is_of_experts(module))

    def others(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, indices, weights = args
        return hidden, (indices + 1) % 8, weights

    handle = experts.register_forward_pre_hook(others)
    with pytest.raises(OptionError, match="Experts has experts"):
        model(input_ids=torch.tensor([[3, 5]]))
    handle.remove()
    alone = adapted("mixtral", torch.float32)
    assert train(model, optimizer, 1) == train(alone, ADAMW(alone.named_parameters()), 1)
    optimizer.close()


def test_a_tensor_that_experts_only_pass_on_needs_none_of_them(folder: Path) -> None:
    def pass_on(_: torch.nn.Module, args: tuple[Any, ...], output: object) -> Any:  # noqa: ANN401
        del output
        return args[0]

    alone, model = (adapted("mixtral", torch.float32) for _ in range(2))
    for each in (alone, model):
        next(m for m in each.modules() if is_of_experts(m)).register_forward_hook(pass_on)
    model, optimizer = tensorstow.stow(model, ADAMW, plan=PLAN, weights=folder)
    assert train(model, optimizer, 2) == train(alone, ADAMW(alone.named_parameters()), 2)
    optimizer.close()


def test_a_read_that_fails_is_raised(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = stowed(folder)
    train(model, optimizer, 1)
    empty(model)
    read = WeightFile.read
    nbytes = 32 * 48 * 4

    def broken(file: WeightFile, offset: int, into: torch.Tensor) -> IoFuture:
        if into.numel() % nbytes == 0:
            raise OSError(errno.EIO, "broken")
        return read(file, offset, into)

    monkeypatch.setattr(WeightFile, "read", broken)
    tokens = torch.tensor([[3, 5]])
    with pytest.raises(OSError, match="broken"):
        model(input_ids=tokens)
    monkeypatch.undo()
    with pytest.raises(PoisonedError):
        model(input_ids=tokens)
    with suppress(PoisonedError):
        optimizer.close()


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_codes_of_routed_experts_alone_are_read(
    tmp_path: Path, family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, whole = coded(tmp_path, family, kind)
    alone, model = (adapted(family, torch.bfloat16) for _ in range(2))
    values = whole.state_dict()
    for name, parameter in alone.base_model.model.named_parameters():
        if "lora_" not in name:
            parameter.data.copy_(values[name.replace("base_layer.", "")])
    once, routed = read_alike(alone, model, PLAN, target, monkeypatch)
    share = {"int8": (0.5, 0.75), "nf4": (0.25, 0.4)}[kind]
    assert share[0] * routed <= once <= share[1] * routed


def clipped(model: Any, optimizer: Any, steps: range) -> list[float]:  # noqa: ANN401
    """Train with two micro-batches a step, and clipping that always fires."""
    losses = []
    for step in steps:
        for micro in range(2):
            generator = torch.Generator().manual_seed(10 * step + micro)
            tokens = torch.randint(1, 64, (1, 3), generator=generator)
            loss = model(input_ids=tokens, labels=tokens).loss / 2
            loss.backward()
            losses.append(loss.item())
        optimizer.clip_grad_norm_(1e-3)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_a_run_that_clips_and_accumulates_goes_on(folder: Path, overlap: str) -> None:
    alone = adapted("mixtral", torch.float32)
    wanted = clipped(alone, ADAMW(alone.named_parameters()), range(4))
    plan = Plan(parameters="disk", states="disk", accumulation_steps=2, overlap=overlap)
    found = []
    for steps in (range(2), range(2, 4)):
        model = adapted("mixtral", torch.float32)
        model, optimizer = tensorstow.stow(
            model, ADAMW, plan=plan, weights=folder, dir=folder.parent / "run"
        )
        assert optimizer.resume() == (steps.start or None)
        found += clipped(model, optimizer, steps)
        optimizer.close()
    assert found == wanted
    for name, value in adapters(alone).items():
        assert torch.equal(adapters(model)[name], value), name


def of_ranks(folder: Path, tier: str) -> list[float]:
    plan = Plan(parameters=tier, states="host", prefetch=1)
    where = {"dir": folder.parent / f"run-{tier}"} if tier == "disk" else {}
    make = partial(ADAMW, **({"durability": "none"} if where else {}))
    model = adapted("mixtral", torch.float32)
    model, optimizer = tensorstow.stow(model, make, plan=plan, weights=folder, **where)
    losses = clipped(model, optimizer, range(2))
    optimizer.close()
    return losses


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_ranks_have_the_bits_of_weights_in_memory(ranks: Pool, folder: Path) -> None:
    assert ranks(2).run(of_ranks, folder, "disk") == ranks(2).run(of_ranks, folder, "host")


def test_weights_that_are_cast_or_sharded_are_read_as_wholes(folder: Path) -> None:
    alone = adapted("mixtral", torch.float32)
    model, optimizer = tensorstow.stow(
        adapted("mixtral", torch.float32),
        ADAMW,
        plan=PLAN,
        weights=folder,
        compute_dtype=torch.bfloat16,
    )
    assert not any(s.pager.pieces for s in map(storage_of, model.parameters()) if s and s.pager)
    tokens = torch.tensor([[3, 5]])
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
        assert torch.equal(logits, alone.bfloat16()(input_ids=tokens).logits)
    optimizer.close()


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern:RuntimeWarning")  # of peft
def test_adapters_of_the_experts_themselves_have_the_same_bits(folder: Path) -> None:
    """All linear layers of peft include stacked experts, to which it adds before their call."""
    alone = adapted("mixtral", torch.float32, "all-linear")
    losses = train(alone, ADAMW(alone.named_parameters()), 3)
    model = adapted("mixtral", torch.float32, "all-linear")
    assert any("experts.lora_A" in name for name, _ in model.named_parameters())
    model, optimizer = tensorstow.stow(model, ADAMW, plan=PLAN, weights=folder)
    assert train(model, optimizer, 3) == losses
    wanted = adapters(alone)
    for name, value in adapters(model).items():
        assert torch.equal(value, wanted[name]), name
    optimizer.close()
