"""``defer_untouched=True``: the bits of dense AdamW, with the bytes of what was touched."""

import copy
import errno
import io
import logging
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import tensorstow
from parity.beside import engine_of
from ranks.pool import Ranks
from tensorstow import Adam, AdamW, PipelinePolicy
from tensorstow.base.errors import OptionError, PoisonedError
from tensorstow.formats.state_format import StateFormat
from tensorstow.states.layout import LANE, Family, RowChunks
from tensorstow.step.deferred_rows import DeferredRows, readers_of
from tensorstow.step.unpublished import Unpublished
from tensorstow.tensors.dtensor import to_local
from unit.fsdp.test_experts import FAMILIES, made

WORDS, WIDTH = 300, 48
SMALL = PipelinePolicy(chunk_elements=2048)


class Words(nn.Module):
    """An embedding, some layers, and an output that is not tied."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh())
        self.head = nn.Linear(32, 5)
        self.to(dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(ids)))


def words(step: int, count: int = 12) -> torch.Tensor:
    """Return the words of a step, few of them often, as in texts."""
    generator = torch.Generator().manual_seed(step)
    return (torch.rand(count, generator=generator) ** 4 * WORDS).long()


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(words(step)).float().square().mean()


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    loss = loss_of(model, step)
    loss.backward()
    if isinstance(optimizer, Adam):
        optimizer.clip_grad_norm_(0.05)
    optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step % 7)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def optimizer_of(
    model: nn.Module, *, defers: bool, kind: type[Adam] = AdamW, **keywords: object
) -> Adam:
    chosen: dict[str, Any] = {
        "lr": 1e-2, "weight_decay": 0.1, "states": "disk", "policy": SMALL, **keywords,
    }  # fmt: skip
    return kind(model.parameters(), module=model, defer_untouched=defers, **chosen)


def lags(model: Words) -> bool:
    return isinstance(model.embed.weight, Unpublished)


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return copies of all weights and states."""
    states = optimizer.state_dict()["state"]
    weights = [p.detach().clone() for p in model.parameters()]
    return [*weights, *(states[k][n].clone() for k in states for n in sorted(states[k]))]


def assert_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def both(train: Callable[[Words, Adam], list[Any]], **keywords: object) -> list[list[Any]]:
    """Return what ``train`` finds without and with deferred updates, with values at the end."""
    found = []
    for defers in (False, True):
        chosen: dict[str, Any] = {"dtype": torch.float32, **keywords}
        model = Words(chosen.pop("dtype"))
        with optimizer_of(model, defers=defers, **chosen) as optimizer:
            seen = train(model, optimizer)
            if defers:
                assert isinstance(optimizer._runtime.schedule, DeferredRows)
            found.append([*seen, *values(model, optimizer)])
    return found


def assert_same(found: list[list[Any]]) -> None:
    dense, deferred = found
    assert len(dense) == len(deferred)
    for one, other in zip(dense, deferred, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


# --- bits ---


@pytest.mark.parametrize("kind", [AdamW, Adam])
@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"amsgrad": True},
        {"ema": 0.9},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16},
        {"dtype": torch.bfloat16, "state_format": "int8"},
        {"dtype": torch.bfloat16, "state_format": "bf16"},
        {"maximize": True},
        {"states": 0.5},
    ],
    ids=str,
)
def test_the_bits_are_those_of_dense_updates(kind: type[Adam], keywords: dict[str, Any]) -> None:
    lagged = []

    def train(model: Words, optimizer: Adam) -> list[float]:
        losses = []
        for step in range(30):
            losses.append(take_step(model, optimizer, step))
            lagged.append(lags(model))
        return losses

    assert_same(both(train, kind=kind, **keywords))
    assert not any(lagged[:30])
    assert all(lagged[31:])


def test_500_steps_with_a_resume_in_the_middle(tmp_path: Path) -> None:
    model = Words()
    with optimizer_of(model, defers=False) as optimizer:
        losses = [take_step(model, optimizer, step) for step in range(500)]
        wanted = values(model, optimizer)

    found: list[float] = []
    model = Words()
    with optimizer_of(model, defers=True, dir=tmp_path / "run", commit_every=37) as optimizer:
        found += [take_step(model, optimizer, step) for step in range(260)]
        assert lags(model)
        shutil.copytree(tmp_path / "run", tmp_path / "killed")
    model = Words()
    with optimizer_of(model, defers=True, dir=tmp_path / "killed", commit_every=37) as optimizer:
        begin = optimizer.resume()
        assert begin == 259
        del found[begin:]
        found += [take_step(model, optimizer, step) for step in range(begin, 500)]
        assert lags(model)
        assert_equal(values(model, optimizer), wanted)
    assert found == losses


def test_a_commit_has_all_rows(tmp_path: Path) -> None:
    model = Words()
    with optimizer_of(model, defers=True, dir=tmp_path, commit_every=None) as optimizer:
        for step in range(9):
            take_step(model, optimizer, step)
        assert lags(model)
        optimizer.commit({"at": 9})
        wanted = values(model, optimizer)
        for step in range(9, 14):
            take_step(model, optimizer, step)
        optimizer.snapshot("later")
        later = values(model, optimizer)
    model = Words()
    with optimizer_of(model, defers=True, dir=tmp_path) as optimizer:
        assert optimizer.resume("later") == 14
        assert_equal(values(model, optimizer), later)
    dense = Words()
    with optimizer_of(dense, defers=False) as optimizer:
        for step in range(14):
            if step == 9:
                assert_equal(values(dense, optimizer), wanted)
            take_step(dense, optimizer, step)
        assert_equal(values(dense, optimizer), later)


# --- reads between steps ---


def _saved(model: Words, _: Adam) -> list[Any]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    return [again.embed.weight.detach(), again(words(3))]


def _copied(model: Words, _: Adam) -> list[Any]:
    again = copy.deepcopy(model)
    assert type(again.embed.weight) is nn.Parameter
    return [again.embed.weight.detach(), again(words(3))]


def _rewritten(model: Words, _: Adam) -> list[Any]:
    with torch.no_grad():
        model.embed.weight[WORDS - 9 :] = 0.25
    return []


def _evaluated(model: Words, _: Adam) -> list[Any]:
    with torch.inference_mode():
        everything = model(torch.arange(WORDS))
        return [everything.clone(), model(words(1)).clone()]


def _averaged(model: Words, optimizer: Adam) -> list[Any]:
    del optimizer
    average = AveragedModel(model)
    average.update_parameters(model)
    return [p.clone() for p in average.parameters()]


def _loaded(model: Words, optimizer: Adam) -> list[Any]:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.load_state_dict({n: v * 0.5 for n, v in model.state_dict().items()})
    return []


def _state(model: Words, optimizer: Adam) -> list[Any]:
    return [optimizer.states_of(model.embed.weight)["exp_avg"].clone()]


def _released(model: Words, optimizer: Adam) -> list[Any]:
    optimizer.release()
    optimizer.wake()
    return [model(words(5))]


def _updated(model: Words, optimizer: Adam) -> list[Any]:
    """Read the weight by an operation that asks no subclass."""
    with optimizer.updated():
        return [torch.Tensor._make_subclass(torch.Tensor, model.embed.weight).clone()]


def _emptied(model: Words, optimizer: Adam) -> list[Any]:
    """Reset the states of the embedding, as the next step finds out."""
    optimizer.state[model.embed.weight].clear()
    return []


def _transplanted(model: Words, optimizer: Adam) -> list[Any]:
    optimizer.state[model.embed.weight]["exp_avg"] = torch.full((WORDS, WIDTH), 0.125)
    return []


READS = {
    "emptied": _emptied,
    "transplanted": _transplanted,
    "updated": _updated,
    "norm": lambda model, _: [model.embed.weight.norm()],
    "data": lambda model, _: [model.embed.weight.data.clone()],
    "state_dict": lambda model, _: [v.clone() for v in model.state_dict().values()],
    "numpy": lambda model, _: [torch.tensor(model.embed.weight.detach().float().numpy())],
    "row": lambda model, _: [model.embed.weight[7].detach().clone()],
    "functional": lambda model, _: [nn.functional.embedding(words(2), model.embed.weight).clone()],
    "saved": _saved,
    "copied": _copied,
    "rewritten": _rewritten,
    "evaluated": _evaluated,
    "averaged": _averaged,
    "loaded": _loaded,
    "state": _state,
    "released": _released,
    "wait": lambda model, optimizer: [optimizer.wait(None), model.embed.weight.detach().clone()],
}


@pytest.mark.parametrize("read", [*READS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reads_find_the_weights_of_dense_updates(read: str, dtype: torch.dtype) -> None:
    def train(model: Words, optimizer: Adam) -> list[Any]:
        found = []
        for step in range(9):
            found.append(take_step(model, optimizer, step))
            if step % 4 == 2:
                found += READS[read](model, optimizer)
        return found

    assert_same(both(train, dtype=dtype))


def shifted(forward: Callable[..., torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    return forward((ids + 77) % WORDS)


def test_hooks_and_forwards_of_users_find_the_weights_of_dense_updates() -> None:
    def train(model: Words, optimizer: Adam) -> list[Any]:
        found: list[Any] = []
        embed = model.embed
        embed.register_forward_pre_hook(lambda _, args: ((args[0] + 150) % WORDS,))
        embed.register_forward_hook(lambda module, *_: found.append(module.weight.sum().item()))
        embed.register_forward_pre_hook(
            lambda module, _: found.append(module.weight[3].detach().clone()), prepend=True
        )
        for step in range(8):
            if step == 5:
                embed.forward = partial(shifted, embed.forward)
            take_step(model, optimizer, step)
        return found

    assert_same(both(train))


@pytest.mark.parametrize("ids", ["vmap", "meta", "out of range"])
def test_calls_of_odd_rows_are_as_ever(ids: str) -> None:
    def train(model: Words, optimizer: Adam) -> list[Any]:
        for step in range(3):
            take_step(model, optimizer, step)
        if ids == "vmap":
            found = [torch.vmap(model.embed)(words(4).view(3, 4)).detach()]
        elif ids == "meta":
            found = [model.embed(words(4)).detach()]
            found.append(model.embed(words(4).to("meta")).shape)
        else:
            with pytest.raises(IndexError) as raised:
                model.embed(torch.tensor([0, WORDS]))
            found = [str(raised.value)]
        take_step(model, optimizer, 4)
        return found

    assert_same(both(train))


def test_an_interrupt_leaves_reads_waiting() -> None:
    model = Words()
    model.body.register_forward_pre_hook(interrupt)
    with optimizer_of(model, defers=True) as optimizer:
        Interrupting.now = False
        for step in range(4):
            take_step(model, optimizer, step)
        Interrupting.now = True
        with pytest.raises(KeyboardInterrupt):
            model(words(5))
        assert lags(model)
    dense = Words()
    with optimizer_of(dense, defers=False) as optimizer:
        for step in range(4):
            take_step(dense, optimizer, step)
    assert torch.equal(model.embed.weight, dense.embed.weight)


class Interrupting:
    """Whether the next hook is interrupted."""

    now = False


def interrupt(*_: object) -> None:
    if Interrupting.now:
        raise KeyboardInterrupt


def test_what_extra_reads_is_committed_as_with_dense_updates(tmp_path: Path) -> None:
    found = []
    for defers in (False, True):
        model = Words()

        def norm(model: Words = model) -> dict[str, float]:
            return {"norm": model.embed.weight.detach().norm().item()}

        place = {"dir": tmp_path / str(defers), "commit_every": 100, "extra": norm}
        optimizer = optimizer_of(model, defers=defers, **place)
        for step in range(5):
            take_step(model, optimizer, step)
        del optimizer  # commits what the last step's end has kept
        with optimizer_of(Words(), defers=defers, **(place | {"extra": None})) as optimizer:
            assert optimizer.resume() == 5
            found.append(optimizer.extra["norm"])
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_model_has_the_bits_of_dense_updates() -> None:
    def train(model: Words, optimizer: Adam) -> list[Any]:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager")
        for step in range(6):
            loss = compiled(words(step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [loss.item()]

    assert_same(both(train))


def test_several_calls_make_one_step() -> None:
    def train(model: Words, optimizer: Adam) -> list[float]:
        for step in range(12):
            for part in range(3):
                loss_of(model, 3 * step + part).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        return []

    assert_same(both(train))


def test_calls_are_recomputed_in_backward() -> None:
    def train(model: Words, optimizer: Adam) -> list[float]:
        for step in range(8):
            out: Any = checkpoint(model, words(step), use_reentrant=False)
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return []

    assert_same(both(train))


def test_a_step_that_is_skipped_changes_nothing() -> None:
    def train(model: Words, optimizer: Adam) -> list[float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(10):
            loss: Any = scaler.scale(loss_of(model, step))
            loss.backward()
            if step % 4 == 3:
                model.head.bias.grad.fill_(torch.inf)  # type: ignore[union-attr]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [model.embed.weight.detach().clone()]

    assert_same(both(train))


def test_a_step_that_is_refused_leaves_reads_waiting() -> None:
    model = Words()
    with optimizer_of(model, defers=True) as optimizer:
        for step in range(3):
            take_step(model, optimizer, step)
        optimizer.param_groups[0]["lr"] = -1.0
        with pytest.raises(OptionError, match="lr"):
            optimizer.step()
        assert lags(model)


def test_frozen_rows_and_words_added_later() -> None:
    def train(model: Words, optimizer: Adam) -> list[float]:
        for step in range(4):
            take_step(model, optimizer, step)
        model.embed.weight.requires_grad_(requires_grad=False)
        for step in range(4, 8):
            take_step(model, optimizer, step)
        model.embed.weight.requires_grad_()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(40))]})
        return [take_step(model, optimizer, step) for step in range(8, 12)]

    assert_same(both(train))


def test_the_last_rows_catch_up_at_the_end() -> None:
    dense, deferred, dropped = Words(), Words(), Words()
    with optimizer_of(dense, defers=False) as one:
        for step in range(6):
            take_step(dense, one, step)
    with optimizer_of(deferred, defers=True) as other:
        for step in range(6):
            take_step(deferred, other, step)
        assert lags(deferred)
    gone = optimizer_of(dropped, defers=True)
    for step in range(6):
        take_step(dropped, gone, step)
    del gone
    for model in (deferred, dropped):
        assert not lags(model)
        assert torch.equal(model.embed.weight, dense.embed.weight)


# --- bytes ---


def moved(optimizer: Adam) -> int:
    optimizer._states().pipeline.wait_idle()
    traffic = tensorstow.usage(optimizer=optimizer).traffic
    return traffic.bytes_read + traffic.bytes_written


def test_bytes_are_in_proportion_to_what_was_touched() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(2048, 1024), nn.Linear(1024, 1))
    with optimizer_of(model, defers=True) as optimizer:
        ids = torch.arange(32) * 64
        for step in range(6):
            if step == 2:
                before = moved(optimizer)
            model(ids).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = (moved(optimizer) - before) / 4
    assert found <= len(ids) * 1024 * 16 * 1.1  # moments are read and written; the rest is bias


def test_updates_are_not_deferred_where_it_does_not_pay(caplog: pytest.LogCaptureFixture) -> None:
    model = Words()
    with caplog.at_level(logging.INFO, "tensorstow"), optimizer_of(model, defers=True) as optimizer:
        for step in range(12):
            assert lags(model) == (step in range(1, 9))
            count = WORDS - 40
            model(torch.arange(count)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    (message,) = [m for m in caplog.messages if "not deferred" in m]
    assert "shape (300, 48)" in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("style", [StateFormat.FP32, StateFormat.INT8])
@pytest.mark.parametrize("row", [1, 48, 100, 768, 1024, 5000, 14336 * 4096])
def test_chunks_are_cut_between_rows(dtype: torch.dtype, style: StateFormat, row: int) -> None:
    if style == StateFormat.INT8 and dtype == torch.float32:
        dtype = torch.float16
    family = Family(dtype, amsgrad=False, format=style)
    elements = RowChunks.of(family, 1000 * row, row, 1 << 19, 0).elements
    assert elements % LANE == 0
    assert elements <= 1 << 19
    assert elements % row == 0 or row % elements == 0
    size = 60_000 * row
    assert size // RowChunks.of(family, size, row, 1 << 26, 0).elements <= 1 << 14 or row > 1 << 20


# --- experts ---


@pytest.mark.parametrize("family", [*FAMILIES])
def test_experts_without_tokens_are_left_out(family: str) -> None:
    found = []
    for defers in (False, True):
        model = made(family, torch.float32).train()
        losses = []
        with optimizer_of(model, defers=defers) as optimizer:
            for step in range(8):
                generator = torch.Generator().manual_seed(step)
                ids = torch.randint(0, 60, (1, 2), generator=generator)
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            stacks = [n for n, p in model.named_parameters() if isinstance(p, Unpublished)]
            assert any("experts" in name for name in stacks) == defers
            found.append([*losses, *values(model, optimizer)])
    assert_same(found)


class Experts(nn.Module):
    """Stacked experts, as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down_proj = nn.Parameter(torch.randn(16, 64, 96))

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.down_proj[i] @ hidden for i in top_k_index.tolist()])


@pytest.mark.parametrize("copy_by", ["deepcopy", "torch.save"])
def test_copies_of_experts_have_their_own_forward(copy_by: str) -> None:
    model = nn.Sequential(Experts())
    with optimizer_of(model, defers=True) as optimizer:
        for step in range(3):
            model[0](torch.ones(96), torch.tensor([step])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert isinstance(model[0].down_proj, Unpublished)
        if copy_by == "deepcopy":
            again = copy.deepcopy(model)
        else:
            file = io.BytesIO()
            torch.save(model, file)
            again = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        assert torch.equal(again[0].down_proj, model[0].down_proj)
        with torch.no_grad():
            again[0].down_proj.zero_()
        assert again[0](torch.ones(96), torch.tensor([1])).sum() == 0
        assert model[0](torch.ones(96), torch.tensor([1])).sum() != 0
    assert "forward" not in vars(model[0])


def test_an_interrupt_of_experts_leaves_reads_waiting() -> None:
    model = Experts()
    with optimizer_of(model, defers=True) as optimizer:
        for step in range(3):
            model(torch.ones(96), torch.tensor([step])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        broken = torch.tensor([1])
        broken.tolist = interrupt  # type: ignore[method-assign]
        Interrupting.now = True
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(96), broken)
        assert isinstance(model.down_proj, Unpublished)


@pytest.mark.parametrize("resumed", ["begun", "resumed"])
def test_bytes_are_those_of_routed_experts(resumed: str, tmp_path: Path) -> None:
    model = Experts()
    each = 64 * 96 * 4 * 2
    place = {"dir": tmp_path, "commit_every": None}
    if resumed == "resumed":
        with optimizer_of(model, defers=True, **place) as optimizer:
            model(torch.ones(96), torch.tensor([1])).sum().backward()
            optimizer.step()
            optimizer.commit()
    with optimizer_of(model, defers=True, **place) as optimizer:
        if resumed == "resumed":
            optimizer.resume()
        for step in range(9):
            if step == 3:
                before = moved(optimizer)
            model(torch.ones(96), torch.tensor([2, 5 + step % 2])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = moved(optimizer) - before
    # A step writes two experts. They are read once, and stay in memory from then on.
    assert found == (6 * 2 + 3) * each


# --- through stow(), and refusals ---


def test_stow_defers() -> None:
    found = []
    for defers in (False, True):
        model, optimizer = tensorstow.stow(
            Words(), AdamW, lr=1e-2, plan=tensorstow.Plan(states="disk"), defer_untouched=defers
        )
        with optimizer:
            for step in range(6):
                take_step(model, optimizer, step)
            assert lags(model) == defers
            found.append([to_local(p).detach().clone() for p in model.parameters()])
    assert_equal(*found)


@pytest.mark.parametrize(
    "keywords",
    [
        {"plan": tensorstow.Plan(states="disk", parameters="disk", overlap="none")},
        {"plan": tensorstow.Plan(states="disk"), "compute_dtype": torch.bfloat16},
        {"plan": tensorstow.Plan(states="disk", micro_batches=2)},
    ],
    ids=["weights on disk", "cast", "micro-batches"],
)
def test_stow_refuses_what_is_no_plain_parameter(keywords: dict[str, Any], tmp_path: Path) -> None:
    model = Words()
    with pytest.raises(OptionError, match="plain parameters in host memory"):
        tensorstow.stow(
            model, AdamW, defer_untouched=True, dir=tmp_path, durability="none", **keywords
        )


def of_ranks() -> str:
    plan = tensorstow.Plan(states="disk")
    with pytest.raises(OptionError) as told:
        tensorstow.stow(Words(), AdamW, lr=1e-2, plan=plan, defer_untouched=True)
    return str(told.value)


def test_several_ranks_are_refused(ranks: Callable[[int], Ranks]) -> None:
    for message in ranks(2).run(of_ranks):
        assert "plain parameters in host memory" in message


def test_a_failed_disk_is_an_error_of_reads() -> None:
    model = Words()
    optimizer = optimizer_of(model, defers=True)
    for step in range(4):
        take_step(model, optimizer, step)
    optimizer._states().pipeline.wait_idle()
    engine = engine_of(optimizer)
    engine.inject_fault("read", times=-1, error=errno.EIO)
    with pytest.raises(OSError, match="read"):
        model(torch.arange(WORDS))
    with pytest.raises(PoisonedError):
        model.embed.weight.sum()
    with pytest.raises(PoisonedError):
        model(words(1))
    with pytest.raises((PoisonedError, OSError)):
        optimizer.step()
    optimizer.close()
    assert not lags(model)


def test_a_step_that_fails_is_an_error_of_reads() -> None:
    model = Words()
    optimizer = optimizer_of(model, defers=True)
    for step in range(4):
        take_step(model, optimizer, step)
    optimizer.synchronize()  # what the step updates is in memory no more
    model(words(1)).square().mean().backward()
    optimizer.synchronize()
    engine = engine_of(optimizer)
    engine.inject_fault("read", times=-1, error=errno.EIO)
    with pytest.raises(OSError, match="read"):
        optimizer.step()
    with pytest.raises(PoisonedError):
        model.embed.weight.sum()
    with pytest.raises(PoisonedError):
        model(words(1))
    optimizer.close()
    assert not lags(model)


def test_a_run_that_failed_defers_again_after_resume(tmp_path: Path) -> None:
    dense = Words()
    with optimizer_of(dense, defers=False) as optimizer:
        for step in range(9):
            take_step(dense, optimizer, step)
        wanted = values(dense, optimizer)
    model = Words()
    with optimizer_of(model, defers=True, dir=tmp_path, commit_every=3) as optimizer:
        for step in range(5):
            take_step(model, optimizer, step)
        optimizer._states().pipeline.wait_idle()
        engine = engine_of(optimizer)
        engine.inject_fault("read", times=-1, error=errno.EIO)
        with pytest.raises(OSError, match="read"):
            model(torch.arange(WORDS))
        assert lags(model)
        engine.clear_faults()
        assert optimizer.resume() == 3
        for step in range(3, 9):
            take_step(model, optimizer, step)
            assert lags(model) == (step % 3 != 2)
        assert_equal(values(model, optimizer), wanted)


class Tied(Words):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WORDS)
        self.out.weight = self.embed.weight


def test_weights_that_are_read_as_a_whole_are_not_deferred() -> None:
    assert not readers_of(Tied())
    assert not readers_of(nn.Sequential(nn.Embedding(4, 4, sparse=True)))
    assert not readers_of(nn.Sequential(nn.Embedding(0, 4), nn.Embedding(4, 0)))
    assert not readers_of(nn.Sequential(nn.Embedding(4, 4).requires_grad_(requires_grad=False)))
    assert not readers_of(nn.Sequential(nn.Linear(4, 4)))
    assert list(readers_of(Words()).values())


def refusals() -> Iterator[tuple[str, nn.Module, dict[str, Any], dict[str, Any]]]:
    """Yield a message, what it refuses, and the way out that it advises."""
    words, rest = Words(), "no weight of which only some rows are read"
    yield "without module=", words, {"module": None}, {"module": words}
    yield 'overlap="backward"', Words(), {"overlap": "backward"}, {"overlap": "none"}
    yield 'overlap="forward"', Words(), {"overlap": "forward"}, {"overlap": "none"}
    yield "all states stay in host memory", Words(), {"states": "host"}, {"states": "disk"}
    yield rest, Tied(), {}, {"defer_untouched": False}
    yield rest, nn.Linear(3, 3), {}, {"defer_untouched": False}
    yield "defer_untouched='yes'", Words(), {"defer_untouched": "yes"}, {"defer_untouched": True}


@pytest.mark.parametrize(("message", "model", "keywords", "way"), [*refusals()])
def test_what_cannot_be_deferred_is_refused(
    message: str, model: nn.Module, keywords: dict[str, Any], way: dict[str, Any]
) -> None:
    chosen: dict[str, Any] = {
        "states": "disk",
        "module": model,
        "defer_untouched": True,
        **keywords,
    }
    with pytest.raises(OptionError, match=message):
        AdamW(model.parameters(), **chosen)
    AdamW(model.parameters(), **(chosen | way)).close()
