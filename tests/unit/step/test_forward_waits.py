"""``overlap="forward"``: reads of a weight see the new one. Old ones are NaN here."""

import copy
import ctypes
import errno
import gc
import io
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from models import TiedModel
from parity.beside import (
    DELAY_S,
    POISONED,
    blocks,
    engine_of,
    in_ram,
    mean_square,
    optimizer_for,
    same,
    slow,
    train,
    weights,
)
from tensorstow import AdamW, PipelinePolicy
from tensorstow.base.errors import OptionError, PoisonedError, TransferError
from tensorstow.step.forward_waits import ForwardWaits, blocks_of
from tensorstow.step.unpublished import Unpublished


class Attention(nn.Module):
    """Reads its children's parameters itself: ``out_proj.forward`` is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.head = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(0)
        mixed, _ = self.attention(x, x, x, need_weights=False)
        head: Tensor = self.head(mixed)
        return head


class Tied(TiedModel):
    """Takes what the other models take for tokens."""

    def __init__(self) -> None:
        super().__init__(50, 32)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x.abs() * 10).long().clamp(max=49)).mean(1)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return x


class Past(nn.Module):
    """Its forward reads a block's weight and never calls the block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])

    def forward(self, x: Tensor) -> Tensor:
        called: Tensor = self.layers[1](x)
        return functional.linear(called, self.layers[0].weight, self.layers[0].bias)


class Bare(nn.Module):
    """Parameters of the root's own beside blocks and a module that is no block."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))
        self.norm = nn.LayerNorm(32)
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(self.norm(x)) * self.scale
        return out


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS = {
    "sequential": blocks,
    "attention": Attention,
    "tied": Tied,
    "twice": Twice,
    "past": Past,
    "bare": Bare,
    "encoder": encoder,
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def by_two_dimensions(model: nn.Module, step: int) -> Tensor:
    """Give an encoder its three dimensions."""
    if not isinstance(model, nn.TransformerEncoder):
        return mean_square(model, step)
    x = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(step))
    loss: Tensor = model(x).square().mean()
    return loss


@pytest.fixture
def under_way(tmp_path: Path) -> Iterator[tuple[AdamW, nn.Sequential, dict[str, Tensor]]]:
    """Give an optimizer whose last step is still under way, and the weights it will leave."""
    want = in_ram(blocks(), range(3))
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, "forward")
    train(optimizer, model, range(2))
    slow(optimizer)
    train(optimizer, model, [2])
    assert any(w.isnan().any() for w in weights(model).values())
    yield optimizer, model, want
    optimizer.close()


UnderWay = tuple[AdamW, nn.Sequential, dict[str, Tensor]]


@pytest.mark.parametrize("name", MODELS)
def test_models_of_all_kinds_give_the_same_bits(name: str, tmp_path: Path) -> None:
    want = in_ram(made(name), range(5), by_two_dimensions)
    model = made(name)
    optimizer = optimizer_for(model, tmp_path, "forward")
    train(optimizer, model, range(2), by_two_dimensions)
    slow(optimizer, seconds=0.005)
    train(optimizer, model, range(2, 5), by_two_dimensions)
    optimizer.wait()
    assert same(weights(model), want)
    optimizer.close()


def test_a_block_waits_for_its_own_weights_alone(under_way: UnderWay) -> None:
    _, model, want = under_way
    model[0](torch.ones(1, 32))
    now = weights(model)
    assert torch.equal(now["0.weight"], want["0.weight"])
    assert now["2.weight"].isnan().all()


def test_step_does_not_wait(tmp_path: Path) -> None:
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, "forward")
    train(optimizer, model, range(2))
    slow(optimizer)
    optimizer.zero_grad()
    torch.autograd.backward(mean_square(model, 2))
    began = time.monotonic()
    optimizer.step()
    assert time.monotonic() - began < DELAY_S
    optimizer.close()


def test_updates_follow_the_order_of_the_last_forward(tmp_path: Path) -> None:
    """Of parameters that were given the other way round."""
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, "forward", params=list(model.parameters())[::-1])
    train(optimizer, model, range(2))
    optimizer.synchronize()
    optimizer.start_trace()
    train(optimizer, model, [2])
    optimizer.wait()
    updated = [event.chunk for event in optimizer.trace() if event.lane == "update"]
    assert updated == [2, 3, 1, 0]  # the first block's weight is in two of them
    optimizer.close()


@pytest.mark.parametrize("grad", [True, False])
def test_evaluation_waits_too(under_way: UnderWay, *, grad: bool) -> None:
    _, model, want = under_way
    model.eval()
    with torch.set_grad_enabled(grad):
        model(torch.ones(1, 32))
    assert same(weights(model), want)


def test_a_model_s_state_dict_is_of_new_weights(under_way: UnderWay) -> None:
    _, model, want = under_way
    assert same(dict(model.state_dict()), want)


def test_a_block_s_state_dict_is_of_new_weights(under_way: UnderWay) -> None:
    _, model, want = under_way
    saved = model[2].state_dict()
    assert torch.equal(saved["weight"], want["2.weight"])
    assert torch.equal(saved["bias"], want["2.bias"])


def test_an_optimizer_s_state_dict_is_of_the_step(under_way: UnderWay) -> None:
    optimizer, model, want = under_way
    assert all(entry["step"] == 3 for entry in optimizer.state_dict()["state"].values())
    assert same(weights(model), want)


@pytest.mark.parametrize("part", ["model", "block"])
def test_loaded_weights_are_not_overwritten_by_what_is_under_way(
    under_way: UnderWay, part: str
) -> None:
    optimizer, model, want = under_way
    other = blocks(depth=3)
    if part == "model":
        model.load_state_dict(other.state_dict())
        want = weights(other)
    else:
        model[2].load_state_dict(other[2].state_dict())
        want |= {"2.weight": other[2].weight.detach(), "2.bias": other[2].bias.detach()}
    optimizer.wait()
    assert same(weights(model), want)


def test_a_copy_of_a_model_has_the_new_weights_and_waits_for_nothing(under_way: UnderWay) -> None:
    optimizer, model, want = under_way
    twin = copy.deepcopy(model)
    assert same(weights(twin), want)
    train(optimizer, model, [3])
    twin(torch.ones(1, 32))
    assert same(weights(twin), want)
    assert any(w.isnan().any() for w in weights(model).values())


def test_a_saved_model_has_the_new_weights(under_way: UnderWay) -> None:
    _, model, want = under_way
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    loaded(torch.ones(1, 32))
    assert same(weights(loaded), want)


def test_an_average_of_weights_waits(tmp_path: Path) -> None:
    def averaged(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
        average = {n: torch.zeros_like(w) for n, w in weights(model).items()}
        for step in range(4):
            train(optimizer, model, [step])
            optimizer.wait()
            for name, weight in model.named_parameters():
                average[name].lerp_(weight.detach(), 0.1)
        optimizer.close()
        return average

    model = blocks()
    want = averaged(model, AdamW(model.parameters(), lr=1e-2))
    model = blocks()
    assert same(averaged(model, optimizer_for(model, tmp_path, "forward")), want)


def test_gradients_are_zeroed_in_place_only_when_they_are_used(tmp_path: Path) -> None:
    def trained(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
        for step in range(4):
            torch.autograd.backward(mean_square(model, step))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        optimizer.close()
        return weights(model)

    model = blocks()
    want = trained(model, AdamW(model.parameters(), lr=1e-2))
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, "forward")
    slow(optimizer, seconds=0.005)
    assert same(trained(model, optimizer), want)


def test_gradients_that_change_while_they_are_used_are_refused(under_way: UnderWay) -> None:
    """Else a part of the weights would be updated by them and a part by something else.

    Autograd adds to them without an operation that could wait.
    """
    optimizer, model, _ = under_way
    gradient = model[2].weight.grad
    assert gradient is not None
    torch.autograd.graph.increment_version(gradient)
    with pytest.raises(OptionError, match=r"changed in place .*backward that added"):
        optimizer.wait()
    with pytest.raises(PoisonedError):
        optimizer.step()


def test_a_parameter_outside_of_the_module_is_new_when_step_returns(tmp_path: Path) -> None:
    """Nobody could wait for it."""
    temperature = nn.Parameter(torch.ones(1))

    def loss(model: nn.Module, step: int) -> Tensor:
        return mean_square(model, step) * temperature.exp()

    model = blocks()
    params = [temperature, *model.parameters()]
    train(AdamW(params, lr=1e-2), model, range(4), loss)
    want = {**weights(model), "t": temperature.detach().clone()}
    with torch.no_grad():
        temperature.fill_(1.0)
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, "forward", params=[temperature, *model.parameters()])
    train(optimizer, model, range(2), loss)
    slow(optimizer)
    there = ctypes.c_float.from_address(temperature.data_ptr())  # which waits for nobody
    train(optimizer, model, range(2, 4), loss)
    assert there.value == want["t"].item()
    optimizer.wait()
    assert same({**weights(model), "t": temperature.detach()}, want)
    optimizer.close()


def test_a_module_that_comes_later_is_new_when_step_returns(tmp_path: Path) -> None:
    """It has no hooks that could wait."""
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, "forward")
    train(optimizer, model, range(2))
    model.append(nn.Linear(32, 32))
    optimizer.add_param_group({"params": model[3].parameters()})
    train(optimizer, model, [2])
    slow(optimizer)
    train(optimizer, model, range(3, 5))
    assert not model[3].weight.isnan().any()
    optimizer.close()


def test_parts_that_are_called_without_their_root_leave_nothing_behind(tmp_path: Path) -> None:
    model = blocks()

    def by_parts(model: nn.Module, step: int) -> Tensor:
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        for part in model.children():
            x = part(x)
        return x.square().mean()

    want = in_ram(blocks(), range(20))
    optimizer = optimizer_for(model, tmp_path, "forward")
    train(optimizer, model, range(20), by_parts)
    assert optimizer._runtime.waits is not None
    assert len(optimizer._runtime.waits._calls) <= 3
    optimizer.wait()
    assert same(weights(model), want)
    optimizer.close()


# --- the end ---


def test_closing_ends_the_step_that_is_under_way(under_way: UnderWay) -> None:
    optimizer, model, want = under_way
    optimizer.close()
    assert same(weights(model), want)


def test_a_model_that_outlives_its_optimizer_has_the_new_weights(tmp_path: Path) -> None:
    want = in_ram(blocks(), range(3))

    def fine_tuned() -> nn.Module:
        model = blocks()
        optimizer = optimizer_for(model, tmp_path, "forward")
        train(optimizer, model, range(2))
        slow(optimizer)
        train(optimizer, model, [2])
        return model

    model = fine_tuned()
    gc.collect()
    assert same(weights(model), want)
    assert all(not m._forward_pre_hooks for m in model.modules())
    train(AdamW(model.parameters()), model, [3])  # its hooks are gone too


def test_nothing_keeps_an_optimizer_alive(tmp_path: Path) -> None:
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, "forward")
    train(optimizer, model, range(2))
    gone = weakref.ref(optimizer)
    del optimizer
    assert gone() is None


def test_a_failure_beside_forward_is_raised_where_weights_are_waited_for(
    under_way: UnderWay,
) -> None:
    optimizer, model, _ = under_way
    optimizer.wait()
    engine = engine_of(optimizer)
    engine.clear_faults()
    torch.autograd.backward(mean_square(model, 3))
    optimizer.synchronize()
    engine.inject_fault("read", after=2, error=errno.EIO)
    optimizer.step()
    with pytest.raises(TransferError):
        model(torch.ones(1, 32))
    for _ in range(2):  # not only the first: half of the weights are old
        with pytest.raises(PoisonedError):
            model(torch.ones(1, 32))
    failed = [p for p in model.parameters() if isinstance(p, Unpublished)]
    assert failed
    for parameter in failed:
        with pytest.raises(PoisonedError):
            parameter.sum()
    with pytest.raises(PoisonedError):
        optimizer.step()
    optimizer.close()
    for parameter in failed:
        assert type(parameter) is nn.Parameter


def test_an_interrupt_of_whoever_waits_ends_nothing(
    under_way: UnderWay, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, model, want = under_way

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(optimizer._states().pipeline, "wait_parameters", stop)
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(1, 32))
    model.zero_grad()  # the updates go on reading them
    assert not model(torch.ones(1, 32)).isnan().any()  # for it waits as ever
    assert same(weights(model), want)


def test_a_failure_beside_forward_is_raised_by_the_next_step(under_way: UnderWay) -> None:
    optimizer, model, _ = under_way
    optimizer.wait()
    engine = engine_of(optimizer)
    engine.clear_faults()
    torch.autograd.backward(mean_square(model, 3))
    optimizer.synchronize()
    engine.inject_fault("read", after=2, error=errno.EIO)
    optimizer.step()
    with pytest.raises(TransferError):
        optimizer.step()
    with pytest.raises(PoisonedError):
        optimizer.step()


# --- compiled ---


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_model_waits(tmp_path: Path) -> None:
    want = in_ram(blocks(), range(5))
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, "forward")
    compiled = torch.compile(model, backend="eager")
    train(optimizer, compiled, range(2))
    slow(optimizer, seconds=0.005)
    train(optimizer, compiled, range(2, 5))
    optimizer.wait()
    assert same(weights(model), want)
    optimizer.close()


# --- which are the blocks ---


def test_blocks_are_the_children_of_the_outermost_containers() -> None:
    encoder = made("encoder")
    assert blocks_of(encoder) == list(encoder.get_submodule("layers").children())
    bare = made("bare")
    assert blocks_of(bare) == list(bare.get_submodule("layers").children())
    assert blocks_of(nn.Linear(2, 2)) == []
    alone = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert blocks_of(alone) == list(alone[0])


def test_nothing_is_waited_for_twice() -> None:
    model = blocks()
    asked: list[int] = []
    waits = ForwardWaits(model, lambda ids: asked.extend(ids or ()))
    model(torch.ones(1, 32))  # nobody has seen the blocks: the root waits for all
    assert set(asked) == {id(p) for p in model.parameters()}
    asked.clear()
    model(torch.ones(1, 32))
    assert len(asked) == len(set(asked)) == 6
    waits.close()
    waits.close()
    asked.clear()
    model(torch.ones(1, 32))
    assert asked == []


def test_unpoisoned_weights_are_the_old_ones(tmp_path: Path) -> None:
    model = blocks()
    policy = PipelinePolicy(chunk_elements=1024, backend="threads", depth=1)
    assert POISONED.nan_until_published
    optimizer = optimizer_for(model, tmp_path, "forward", policy=policy)
    train(optimizer, model, range(2))
    optimizer.wait()
    before = weights(model)
    slow(optimizer)
    train(optimizer, model, [2])
    assert torch.equal(weights(model)["2.weight"], before["2.weight"])
    optimizer.wait()
    assert not torch.equal(model[2].weight, before["2.weight"])
    optimizer.close()
