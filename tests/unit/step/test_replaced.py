"""Memory that the native side was given stays alive without other references."""

import gc
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from parity.beside import (
    POISONED,
    blocks,
    in_ram,
    mean_square,
    optimizer_for,
    same,
    slow,
    train,
    weights,
)
from remote import make_remote
from tensorstow import AdamW, PipelinePolicy, Plan, stow
from tensorstow.base.errors import OptionError, PoisonedError
from tensorstow.io.engine import open_engine
from tensorstow.io.files import scratch_file
from tensorstow.states.layout import Family
from tensorstow.states.native_pipeline import StepKind, StepRow
from tensorstow.states.state_store import Placement, StateStore
from tensorstow.tensornvme import AsyncFileWriter, DiskOffloader

PLAIN = PipelinePolicy(chunk_elements=1024, backend="threads", depth=1)


class Watched:
    """The memory of tensors, without keeping it."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # this waits for no update
            self.refs = [StorageWeakRef(t.untyped_storage()) for t in tensors]

    @property
    def alive(self) -> list[bool]:
        return [not ref.expired() for ref in self.refs]


def under_way(directory: Path, *, policy: PipelinePolicy = PLAIN) -> tuple[AdamW, nn.Sequential]:
    """Return an optimizer and a model in whose third step nothing is updated for a while."""
    model = blocks()
    optimizer = optimizer_for(model, directory, "forward", policy=policy)
    train(optimizer, model, range(2))
    slow(optimizer, seconds=0.05)
    train(optimizer, model, [2])
    return optimizer, model


def memory_of(model: nn.Module) -> list[torch.Tensor]:
    """Return what shares the weights' memory, without waiting for anything."""
    with torch._C.DisableTorchFunctionSubclass():
        return [p.detach() for p in model.parameters()]


def replace(model: nn.Module) -> None:
    """Give every weight other memory, without a wait for the update under way."""
    with torch._C.DisableTorchFunctionSubclass():
        for p in model.parameters():
            p.data = p.data.clone()


def test_memory_of_replaced_weights_and_dropped_gradients_stays_until_the_end(
    tmp_path: Path,
) -> None:
    optimizer, model = under_way(tmp_path)
    old = Watched(memory_of(model))
    gradients = Watched([p.grad for p in model.parameters() if p.grad is not None])
    replace(model)
    model.zero_grad()
    gc.collect()
    assert all(old.alive)
    assert all(gradients.alive)
    with pytest.raises(OptionError, match=r"was replaced by other memory .* optimizer.wait\(\)"):
        optimizer.wait()
    with pytest.raises(PoisonedError):
        train(optimizer, model, [3])
    model.zero_grad()
    del optimizer
    gc.collect()
    assert not any(old.alive)
    assert not any(gradients.alive)


def test_memory_of_gradients_is_given_back_with_their_update(tmp_path: Path) -> None:
    optimizer, model = under_way(tmp_path)
    gradients = Watched([p.grad for p in model.parameters() if p.grad is not None])
    optimizer.zero_grad()
    assert all(gradients.alive)
    optimizer.wait()
    assert not any(gradients.alive)


def test_what_the_update_of_a_replaced_weight_writes_to_is_nobody_elses(tmp_path: Path) -> None:
    optimizer, model = under_way(tmp_path)
    replace(model)
    others = [torch.zeros_like(p) for p in memory_of(model) for _ in range(4)]
    with pytest.raises(OptionError, match="was replaced by other memory"):
        optimizer.wait()
    assert not any(other.any() for other in others)


@pytest.mark.parametrize("policy", [PLAIN, POISONED])
def test_a_converted_weight_gets_the_new_values(tmp_path: Path, policy: PipelinePolicy) -> None:
    want = in_ram(blocks(), range(3))
    optimizer, model = under_way(tmp_path, policy=policy)
    model.half()
    optimizer.wait()
    assert same(weights(model), {name: w.half() for name, w in want.items()})


def test_a_converted_weight_has_the_new_values_when_the_optimizer_is_dropped(
    tmp_path: Path,
) -> None:
    want = in_ram(blocks(), range(3))
    optimizer, model = under_way(tmp_path)
    model.to(torch.bfloat16)
    del optimizer
    assert same(weights(model), {name: w.bfloat16() for name, w in want.items()})


def test_a_weight_in_another_layout_gets_the_new_values(tmp_path: Path) -> None:
    def convolution() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(step))
        found: torch.Tensor = model(x).square().mean()
        return found

    want = in_ram(convolution(), range(2), loss)
    model = convolution()
    optimizer = optimizer_for(model, tmp_path, "forward", policy=PLAIN)
    train(optimizer, model, [0], loss)
    slow(optimizer)
    train(optimizer, model, [1], loss)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer.wait()
    assert same(weights(model), want)


def test_a_converted_weight_of_an_accelerator_gets_the_new_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_remote(monkeypatch)
    want = in_ram(blocks(), range(3))
    _optimizer, model = under_way(tmp_path)
    model.half()
    assert same(weights(model), {name: w.half() for name, w in want.items()})


def test_memory_that_weights_of_an_accelerator_go_up_to_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_remote(monkeypatch)
    optimizer, model = under_way(tmp_path)
    old = Watched(memory_of(model))
    replace(model)
    assert all(old.alive)
    with pytest.raises(OptionError, match="was replaced by other memory"):
        optimizer.wait()


def test_a_weight_that_is_written_while_its_update_is_under_way_is_told(tmp_path: Path) -> None:
    _optimizer, model = under_way(tmp_path)
    memory_of(model)[0].clamp_(-0.01, 0.01)
    with pytest.raises(OptionError, match="was written between"):
        mean_square(model, 3)


def test_a_weight_that_is_freed_in_place_is_told(tmp_path: Path) -> None:
    optimizer, model = under_way(tmp_path)
    pipeline = optimizer._states().pipeline
    while not all(pipeline.is_published(n) for n in range(6)):  # or it would be written to
        time.sleep(0.01)
    memory_of(model)[0].untyped_storage().resize_(0)
    with pytest.raises(OptionError, match="was freed in place"):
        optimizer.wait()


def test_a_weight_that_is_replaced_in_an_open_step_is_told_and_stays(tmp_path: Path) -> None:
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, "backward", policy=PLAIN)
    train(optimizer, model, range(2))
    slow(optimizer, seconds=0.05)
    optimizer.zero_grad()
    torch.autograd.backward(mean_square(model, 2))
    old = Watched(list(model.parameters()))
    replace(model)
    assert all(old.alive)
    with pytest.raises(OptionError, match="written or replaced between"):
        optimizer.step()
    optimizer.close()
    assert not any(old.alive)


def test_a_tensor_that_gets_other_memory_while_it_is_written(tmp_path: Path) -> None:
    with scratch_file(open_engine("threads", depth=1), tmp_path, 1 << 20) as file:
        file.engine.inject_fault("write", times=1, delay_us=50_000)
        tensor = torch.ones(1 << 18)
        memory = Watched([tensor])
        future = file.write(tensor, 0)
        tensor.data = torch.zeros(8)
        assert memory.alive == [True]
        future.wait()
        del future
        assert memory.alive == [False]
        back = torch.zeros(1 << 18)
        file.read(back, 0).wait()
        assert bool((back == 1).all())


def test_offloading_frees_what_was_written_and_nothing_else(tmp_path: Path) -> None:
    offloader = DiskOffloader(str(tmp_path))
    tensor = torch.ones(1 << 16)
    memory = Watched([tensor])
    offloader.async_write(tensor)
    tensor.data = torch.full((1 << 16,), 2.0)
    offloader.synchronize()
    assert bool((tensor == 2).all())
    gc.collect()
    assert memory.alive == [False]


def test_pinned_memory_that_is_exchanged_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with AsyncFileWriter(str(path), backend="pthread") as writer:
        assert writer._file is not None
        writer._file.engine.inject_fault("write", times=1, delay_us=50_000)
        pinned = torch.zeros(1 << 16)
        memory = Watched([pinned])
        writer.write_tensor(torch.ones(1 << 16), pinned)
        pinned.data = torch.zeros(1)
        assert memory.alive == [True]
    assert path.read_bytes() == bytes(torch.ones(1 << 16).numpy().data)


def test_the_native_side_holds_what_nobody_else_does(tmp_path: Path) -> None:
    store = StateStore(Placement(1.0, (tmp_path,), None), PLAIN)
    store.extend([4096], [Family(torch.float32, amsgrad=False)])
    engine = store.engine
    assert engine is not None
    weight, gradient = torch.ones(4096), torch.ones(4096)
    table = np.array([[0.1, 0.9, 0.1, 0.99, 0.01, 1e-8, 1.0, 1.0, 1.0, 1.0]], dtype=np.float32)
    store.pipeline.step([StepRow(weight, gradient)], table)
    store.pipeline.wait_idle()
    engine.inject_fault("read", times=-1, delay_us=50_000)
    memory = Watched([weight, gradient])
    store.pipeline.step([StepRow(weight, gradient)], table, StepKind(caller="computes"))
    del weight, gradient
    assert memory.alive == [True, True]
    store.pipeline.wait_parameters([0])
    assert memory.alive == [False, False]
    weight, gradient = torch.ones(4096), torch.ones(4096)
    memory = Watched([weight, gradient])
    store.pipeline.step([StepRow(weight, expected=True)], table, StepKind(open=True))
    store.pipeline.add_gradient(0, gradient)
    del weight, gradient
    assert memory.alive == [True, True]
    store.close()  # which ends the step by giving it up
    assert memory.alive == [False, False]


# --- other parameters in the module ---


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))


def replace_one(model: nn.Module) -> None:
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())


def train_one(model: nn.Module, optimizer: AdamW) -> None:
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_a_parameter_that_was_replaced_is_named(overlap: str, steps_before: int) -> None:
    model = layers()
    optimizer = AdamW(model.parameters(), module=model, overlap=overlap)
    for _ in range(steps_before):
        train_one(model, optimizer)
    optimizer.wait()
    replace_one(model)
    with pytest.raises(OptionError, match=r"1\.weight of module= \(Sequential\) is not the param"):
        train_one(model, optimizer)
    optimizer.close()


def test_old_gradients_hide_no_replaced_parameter() -> None:
    """Zeros of ``set_to_none=False`` stay, so that the number of gradients does not change."""
    model = layers()
    optimizer = AdamW(model.parameters(), module=model)
    train_one(model, optimizer)
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    model.load_state_dict(layers().state_dict(), assign=True)
    with pytest.raises(OptionError, match="is not the parameter"):
        train_one(model, optimizer)


def test_a_tied_name_that_gets_a_parameter_of_its_own_is_named() -> None:
    model = layers()
    model[2].weight = model[0].weight
    optimizer = AdamW(model.parameters(), module=model)
    train_one(model, optimizer)
    train_one(model, optimizer)
    model[2].weight = nn.Parameter(model[0].weight.detach().clone())
    with pytest.raises(OptionError, match=r"2\.weight of module="):
        train_one(model, optimizer)


def test_a_commit_keeps_no_parameter_that_the_model_has_not(tmp_path: Path) -> None:
    model = layers()
    with AdamW(model.parameters(), module=model, dir=tmp_path / "run") as optimizer:
        train_one(model, optimizer)
        replace_one(model)
        with pytest.raises(OptionError, match=r"1\.weight of module="):
            optimizer.commit()


def test_a_sharded_parameter_that_was_replaced_is_named() -> None:
    made = partial(AdamW, lr=1e-2)
    model, optimizer = stow(layers(), made, plan=Plan(parameters="disk", states="disk"))
    # Before the first forward, in which FSDP2 takes what it finds. Later it puts its own back.
    for layer in model:
        layer.weight = nn.Parameter(layer.weight.detach().clone())
        layer.bias = nn.Parameter(layer.bias.detach().clone())
    with pytest.raises(OptionError, match=r"0\.weight of module="):
        train_one(model, optimizer)
    optimizer.close()


def test_other_names_and_whole_parameters_in_their_place_are_not_replaced(tmp_path: Path) -> None:
    model = layers()
    optimizer = AdamW(model.parameters(), module=model)
    train_one(model, optimizer)
    model[1] = nn.Sequential(model[1])  # as adapters do: the same parameter has another name
    train_one(model, optimizer)
    model[2].requires_grad_(False)  # noqa: FBT003  # torch's; fewer gradients: the step looks
    train_one(model, optimizer)
    optimizer.close()
    made = partial(AdamW, lr=1e-2)
    plan = Plan(parameters="disk", states="disk")
    sharded, optimizer = stow(layers(), made, plan=plan, dir=tmp_path / "run")
    train_one(sharded, optimizer)
    sharded[0].unshard()
    assert not isinstance(sharded[0].weight, DTensor)
    assert optimizer.commit() == 1  # which looks
    sharded[0].reshard()
    train_one(sharded, optimizer)
    optimizer.close()
