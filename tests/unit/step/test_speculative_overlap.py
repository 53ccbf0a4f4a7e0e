"""``overlap="speculative"``: the bits of a step without overlap, whether it is clipped or not."""

import errno
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parity.beside import (
    ALWAYS,
    NEVER,
    PLAIN,
    SCHEDULES,
    blocks,
    engine_of,
    mean_square,
    optimizer_for,
    same,
    slow,
    states_of,
    weights,
)
from tensorstow import AdamW, Plan, named_weights, stow, usage
from tensorstow.base.errors import OptionError, PoisonedError, TransferError
from tensorstow.optim.options import Durability
from tensorstow.tensors.placeholder import ConsumedGradient


def backward(
    model: nn.Module, step: int, scaled: Callable[[Tensor], Tensor] = lambda loss: loss
) -> None:
    first = next(model.parameters())
    width = first.shape[1]
    x = torch.randn(8, width, generator=torch.Generator().manual_seed(step)).to(first.dtype)
    torch.autograd.backward(scaled(model(x).float().square().mean()))


def train(optimizer: AdamW, model: nn.Module, norms: Sequence[float]) -> list[float]:
    found = []
    for step, most in enumerate(norms):
        optimizer.zero_grad()
        backward(model, step)
        found.append(optimizer.clip_grad_norm_(most).item())
        optimizer.step()
    optimizer.wait()
    return found


def speculating(model: nn.Module, directory: Path, **given: Any) -> AdamW:  # noqa: ANN401
    return optimizer_for(model, directory, "speculative", **given)


def updated(optimizer: AdamW) -> int:
    """Return how many chunks were updated so far."""
    return int(optimizer._states().pipeline.handle.live().counters()["chunks_updated"])


@pytest.mark.parametrize("norms", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [False, True])
def test_it_gives_the_same_bits(
    norms: Sequence[float],
    dtype: torch.dtype,
    hidden: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    model = blocks().to(dtype)
    plain = AdamW(model.parameters(), lr=1e-2, state_format="fp32")
    want = train(plain, model, norms), weights(model), states_of(plain)
    other = blocks().to(dtype)
    given = {} if hidden else {"policy": PLAIN}
    optimizer = speculating(other, tmp_path, state_format="fp32", **given)
    assert train(optimizer, other, norms) == want[0]
    assert same(weights(other), want[1])
    assert all(map(torch.equal, states_of(optimizer), want[2]))
    optimizer.close()


def test_what_stays_in_memory_waits_for_the_norm(tmp_path: Path) -> None:
    norms = SCHEDULES["in turns"]
    model = blocks()
    want = train(AdamW(model.parameters(), lr=1e-2), model, norms), weights(model)
    other = blocks()
    optimizer = AdamW(
        other.parameters(),
        lr=1e-2,
        states=0.5,
        dir=tmp_path,
        durability="none",
        overlap="speculative",
        module=other,
        policy=PLAIN,
    )
    assert train(optimizer, other, norms) == want[0]
    assert same(weights(other), want[1])
    optimizer.close()


def placed(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    durability: Durability = "none",
    **fields: Any,  # noqa: ANN401  # of the plan
) -> tuple[nn.Module, AdamW]:
    """Return a model of six blocks, whose updates ``step()`` may undo."""
    plan = Plan(states="disk", overlap="speculative", **fields)
    model, optimizer = stow(
        blocks(64, 6).to(dtype),
        AdamW,
        lr=1e-2,
        durability=durability,
        dir=directory,
        plan=plan,
        # A small ring leaves room for states in memory.
        policy=replace(
            PLAIN, chunk_elements=512, schedule="naive" if "ram_budget" in fields else "pipelined"
        ),
    )
    assert isinstance(optimizer, AdamW)
    return model, optimizer


def plain_run(
    norms: Sequence[float], dtype: torch.dtype = torch.float32
) -> tuple[list[float], dict[str, Tensor], list[Tensor]]:
    """Return norms, weights and states of training without overlap, in memory."""
    model = blocks(64, 6).to(dtype)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    return train(optimizer, model, norms), weights(model), states_of(optimizer)


PLACES: dict[str, dict[str, Any]] = {
    "host": {"parameters": "host"},
    "disk": {"parameters": "disk"},
    "both": {"parameters": "host", "parameter_units": {"1": "disk", "4": "disk"}},
    "some states in memory": {"parameters": "disk", "ram_budget": 180_000},
    "read ahead": {"parameters": "disk", "prefetch": 2, "weight_ram_budget": 80_000},
}
"""Plans, by the place of the weights."""


def cases() -> Iterator[tuple[str, torch.dtype, str]]:
    """Return places, dtypes and schedules of norms: every pair of two."""
    for row, place in enumerate(PLACES):
        for column, schedule in enumerate(SCHEDULES):
            dtype = (torch.float32, torch.bfloat16)[(row + column) % 2]
            if place == "disk" or schedule in {"in turns", "at first"}:
                yield place, dtype, schedule


@pytest.mark.parametrize(("place", "dtype", "schedule"), list(cases()))
def test_a_placed_model_has_the_same_bits(
    place: str, dtype: torch.dtype, schedule: str, tmp_path: Path
) -> None:
    norms = SCHEDULES[schedule]
    want = plain_run(norms, dtype)
    model, optimizer = placed(tmp_path, dtype, **PLACES[place])
    in_memory = usage(optimizer=optimizer).states.ram_bytes
    assert (in_memory > 0) == (place == "some states in memory")
    slow(optimizer, seconds=0.0005)
    assert train(optimizer, model, norms) == want[0]
    assert same(dict(named_weights(model)), want[1])
    whole = [s.full_tensor() if isinstance(s, DTensor) else s for s in states_of(optimizer)]
    assert all(map(torch.equal, whole, want[2]))
    optimizer.close()


def test_weights_on_disk_are_put_back_without_a_step(tmp_path: Path) -> None:
    model, optimizer = placed(tmp_path, parameters="disk")
    train(optimizer, model, [NEVER])
    before = dict(named_weights(model))
    optimizer.zero_grad()
    for step in range(3):
        since = updated(optimizer)
        backward(model, step)
        assert updated(optimizer) > since
        optimizer.zero_grad()
        assert same(dict(named_weights(model)), before)
    backward(model, 2)
    optimizer.close()
    assert same(dict(named_weights(model)), before)


def test_sums_of_micro_batches_are_clipped(tmp_path: Path) -> None:
    def train_twice(optimizer: AdamW, model: nn.Module) -> dict[str, Tensor]:
        for step, most in enumerate(SCHEDULES["in turns"]):
            optimizer.zero_grad()
            backward(model, 2 * step)
            backward(model, 2 * step + 1)
            optimizer.clip_grad_norm_(most)
            optimizer.step()
        optimizer.wait()
        return weights(model)

    model = blocks()
    want = train_twice(AdamW(model.parameters(), lr=1e-2), model)
    other = blocks()
    optimizer = speculating(other, tmp_path, accumulation_steps=2)
    assert same(train_twice(optimizer, other), want)
    optimizer.close()


def test_updates_run_before_the_norm_is_known(tmp_path: Path) -> None:
    model = blocks()
    optimizer = speculating(model, tmp_path)
    train(optimizer, model, [NEVER])
    before = updated(optimizer)
    optimizer.zero_grad()
    backward(model, 1)
    pipeline = optimizer._states().pipeline
    for param in model.parameters():
        pipeline.wait_parameters([optimizer._params().get(param).number])
    assert updated(optimizer) == before + len(optimizer._states().chunks)
    assert optimizer.clip_grad_norm_(NEVER) > 0
    optimizer.step()
    optimizer.wait()
    assert updated(optimizer) == before + len(optimizer._states().chunks)
    optimizer.close()


def test_after_two_clipped_steps_updates_wait_for_one_that_is_not(tmp_path: Path) -> None:
    model = blocks()
    optimizer = speculating(model, tmp_path)

    def begins_in_backward(most: float) -> bool:
        optimizer.zero_grad()
        backward(model, 0)
        begun = all(isinstance(p.grad, ConsumedGradient) for p in model.parameters())
        optimizer.clip_grad_norm_(most)
        optimizer.step()
        return begun

    most = [NEVER, ALWAYS, NEVER, ALWAYS, ALWAYS, ALWAYS, NEVER, NEVER]
    assert list(map(begins_in_backward, most)) == [True] * 5 + [False] * 2 + [True]
    optimizer.close()


def drop_batch(optimizer: AdamW, model: nn.Module) -> None:
    backward(model, 99)
    optimizer.zero_grad()


def drop_infinite(optimizer: AdamW, model: nn.Module) -> None:
    torch.autograd.backward(mean_square(model, 99) * torch.inf)
    with pytest.raises(RuntimeError, match="not finite"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    optimizer.zero_grad()


@pytest.mark.parametrize("drop", [drop_batch, drop_infinite])
def test_zero_grad_undoes_an_open_step(
    drop: Callable[[AdamW, nn.Module], None], tmp_path: Path
) -> None:
    model = blocks()
    want = train(AdamW(model.parameters(), lr=1e-2), model, [NEVER] * 3), weights(model)
    other = blocks()
    optimizer = speculating(other, tmp_path)
    found = []
    for step in range(3):
        drop(optimizer, other)
        assert all(p.grad is None for p in other.parameters())
        backward(other, step)
        found.append(optimizer.clip_grad_norm_(NEVER).item())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    assert (found, True) == (want[0], same(weights(other), want[1]))
    optimizer.close()


def failing(model: nn.Module) -> None:
    """Run a backward that raises when the last block has its gradients."""

    def fail(_: Tensor) -> None:
        message = "in backward"
        raise RuntimeError(message)

    first = next(model.parameters())
    hook = first.register_hook(fail)
    with pytest.raises(RuntimeError, match="in backward"):
        backward(model, 5)
    hook.remove()


def test_zero_grad_undoes_a_step_whose_backward_has_raised(tmp_path: Path) -> None:
    model = blocks()
    want = train(AdamW(model.parameters(), lr=1e-2), model, [NEVER] * 2), weights(model)
    other = blocks()
    optimizer = speculating(other, tmp_path, policy=PLAIN)
    failing(other)
    with pytest.raises(OptionError, match="has not ended"):
        optimizer.clip_grad_norm_(1.0)
    assert (train(optimizer, other, [NEVER] * 2), True) == (want[0], same(weights(other), want[1]))
    optimizer.close()


def test_a_weight_that_was_written_stays_as_it_was_written(tmp_path: Path) -> None:
    model = blocks()
    optimizer = speculating(model, tmp_path, policy=PLAIN)
    backward(model, 0)
    with torch._C.DisableTorchFunctionSubclass():  # so it is not seen as the parameter's
        next(model.parameters()).detach().fill_(7.0)
    with pytest.raises(OptionError, match="a weight was written"):
        optimizer.zero_grad()
    optimizer.close()
    assert torch.equal(next(model.parameters()), torch.full((32, 32), 7.0))


def test_close_undoes_an_open_step(tmp_path: Path) -> None:
    model = blocks()
    before = weights(model)
    optimizer = speculating(model, tmp_path)
    pipeline = optimizer._states().pipeline
    backward(model, 0)
    for param in model.parameters():
        pipeline.wait_parameters([optimizer._params().get(param).number])
    optimizer.close()
    assert same(weights(model), before)


@pytest.mark.parametrize("most", [NEVER, ALWAYS])
def test_a_gradient_of_what_was_frozen_takes_the_step_again(most: float, tmp_path: Path) -> None:
    model, other = blocks(), blocks()
    plain = AdamW(model.parameters(), lr=1e-2)
    optimizer = speculating(other, tmp_path, policy=PLAIN)
    for net, each in ((model, plain), (other, optimizer)):
        frozen = next(net.parameters())
        frozen.requires_grad = False
        backward(net, 0)
        frozen.grad = torch.ones_like(frozen)
        each.clip_grad_norm_(most)
        each.step()
        frozen.requires_grad = True
        train(each, net, [NEVER] * 2)
    assert same(weights(other), weights(model))
    assert all(map(torch.equal, states_of(optimizer), states_of(plain)))
    optimizer.close()


def test_several_backwards_add_up_where_updates_wait_for_step(tmp_path: Path) -> None:
    """After two clipped steps, as without overlap."""
    model, other = blocks(), blocks()
    plain, optimizer = AdamW(model.parameters(), lr=1e-2), speculating(other, tmp_path)
    for net, each in ((model, plain), (other, optimizer)):
        train(each, net, [ALWAYS] * 2)
        each.zero_grad()
        backward(net, 7)
        backward(net, 8)
        each.clip_grad_norm_(NEVER)
        each.step()
        each.wait()
    assert same(weights(other), weights(model))
    optimizer.close()


def test_it_counts_what_it_holds_twice(tmp_path: Path) -> None:
    model = blocks()
    plain = usage(optimizer=optimizer_for(model, tmp_path, "backward")).states
    other = blocks()
    optimizer = speculating(other, tmp_path)
    train(optimizer, other, [NEVER])
    memory = usage(optimizer=optimizer).states
    assert memory.file_bytes == 2 * plain.file_bytes
    assert memory.host_weight_bytes == sum(p.nbytes for p in other.parameters())
    assert memory.gradient_bytes == memory.host_weight_bytes
    optimizer.close()


def test_a_failed_write_is_raised_where_the_step_is_undone(tmp_path: Path) -> None:
    model = blocks()
    optimizer = speculating(model, tmp_path)
    train(optimizer, model, [NEVER])
    engine = engine_of(optimizer)
    optimizer.synchronize()
    engine.inject_fault("write", times=-1, error=errno.EIO, delay_us=2000)
    optimizer.zero_grad()
    backward(model, 1)
    pipeline = optimizer._states().pipeline
    optimizer.clip_grad_norm_(ALWAYS)

    def end_step() -> None:
        for param in model.parameters():
            pipeline.wait_parameters([optimizer._params().get(param).number])
        optimizer.step()

    with pytest.raises(TransferError):
        end_step()
    with pytest.raises(PoisonedError):
        optimizer.step()
    optimizer.close()


def test_states_in_memory_cannot_be_undone() -> None:
    with pytest.raises(OptionError, match=r"all states in host memory.*forward"):
        AdamW(blocks().parameters(), lr=1e-2, overlap="speculative", states="host")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "states in host memory"),
        ({"states": "disk", "parameters": "device", "update_on": "device"}, 'update_on="device"'),
    ],
)
def test_plans_that_cannot_be_undone_are_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(OptionError, match=f"{why}.*forward"):
        Plan(**fields, overlap="speculative")


Loop = Callable[[AdamW, nn.Module, int], object]


def clipped_by_torch(optimizer: AdamW, model: nn.Module, step: int) -> None:
    backward(model, step)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def two_micro_batches(optimizer: AdamW, model: nn.Module, step: int) -> None:
    backward(model, step)
    backward(model, step + 10)
    optimizer.clip_grad_norm_(0.01)
    optimizer.step()


def evaluated(optimizer: AdamW, model: nn.Module, step: int) -> float:
    """Clip before the loss is measured: the step is clipped none the less."""
    backward(model, step)
    optimizer.clip_grad_norm_(0.01)
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        width = next(model.parameters()).shape[1]
        loss = model(torch.ones(8, width, dtype=dtype)).sum().item()
    optimizer.step()
    return float(loss)


def scheduled_late(optimizer: AdamW, model: nn.Module, step: int) -> None:
    backward(model, step)
    optimizer.param_groups[0]["lr"] *= 0.5
    optimizer.step()


def looked_at(optimizer: AdamW, model: nn.Module, step: int) -> list[float]:
    backward(model, step)
    seen = [p.grad.detach().abs().max().item() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    return seen


def averaged(optimizer: AdamW, model: nn.Module, step: int) -> list[float]:
    backward(model, step)
    seen = [p.double().sum().item() for p in model.parameters()]
    optimizer.step()
    return seen


def decayed_by_hand(optimizer: AdamW, model: nn.Module, step: int) -> None:
    backward(model, step)
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)
    optimizer.step()


@pytest.mark.parametrize(
    "loop",
    [
        clipped_by_torch,
        two_micro_batches,
        evaluated,
        scheduled_late,
        looked_at,
        averaged,
        decayed_by_hand,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_others_do_between_backward_and_step_has_the_same_bits(
    loop: Loop, dtype: torch.dtype, tmp_path: Path
) -> None:
    model, other = blocks().to(dtype), blocks().to(dtype)
    plain = AdamW(model.parameters(), lr=1e-2, state_format="fp32")
    optimizer = speculating(other, tmp_path, state_format="fp32")
    for step in range(4):
        plain.zero_grad()
        optimizer.zero_grad()
        assert loop(optimizer, other, step) == loop(plain, model, step)
    optimizer.wait()
    assert same(weights(other), weights(model))
    assert all(map(torch.equal, states_of(optimizer), states_of(plain)))
    optimizer.close()


def scaled_training(
    optimizer: AdamW, model: nn.Module, scaler: torch.amp.GradScaler, *, unscales: bool, most: float
) -> list[object]:
    """Train five steps, of which the third overflows; return norms and scales."""
    seen: list[object] = []
    for step in range(6):
        optimizer.zero_grad()
        times = torch.inf if step == 2 else 1.0
        backward(model, step, lambda loss, times=times: scaler.scale(loss * times))
        if unscales:
            scaler.unscale_(optimizer)
        scale = 1.0 if unscales else scaler.get_scale()
        seen.append(str(optimizer.clip_grad_norm_(most, loss_scale=scale).item()))
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    optimizer.wait()
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("most", [NEVER, 0.01])
@pytest.mark.parametrize("scale", [2.0**16, 1000.0])
def test_a_grad_scaler_has_the_same_bits(
    dtype: torch.dtype,
    unscales: bool,  # noqa: FBT001
    most: float,
    scale: float,
    tmp_path: Path,
) -> None:
    if unscales and dtype == torch.float16:
        return  # torch refuses it
    model, other = blocks().to(dtype), blocks().to(dtype)
    plain = AdamW(model.parameters(), lr=1e-2, state_format="fp32")
    optimizer = speculating(other, tmp_path, state_format="fp32")
    one, two = (torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2) for _ in range(2))
    want = scaled_training(plain, model, one, unscales=unscales, most=most)
    assert scaled_training(optimizer, other, two, unscales=unscales, most=most) == want
    assert same(weights(other), weights(model))
    assert all(map(torch.equal, states_of(optimizer), states_of(plain)))
    optimizer.close()


@pytest.mark.parametrize(
    ("place", "loop"),
    [
        *itertools.product(("host", "disk"), (two_micro_batches, evaluated, scheduled_late)),
        ("host", averaged),
        ("host", decayed_by_hand),
    ],
)
def test_what_others_do_with_a_placed_model_has_the_same_bits(
    loop: Loop, place: str, tmp_path: Path
) -> None:
    model = blocks(64, 6)
    plain = AdamW(model.parameters(), lr=1e-2)
    other, optimizer = placed(tmp_path, **PLACES[place])
    for step in range(4):
        plain.zero_grad()
        optimizer.zero_grad()
        assert loop(optimizer, other, step) == loop(plain, model, step)
    assert same(dict(named_weights(other)), weights(model))
    optimizer.close()


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_placed_model_has_the_same_bits_with_a_grad_scaler(
    place: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = blocks(64, 6).to(dtype)
    plain = AdamW(model.parameters(), lr=1e-2)
    other, optimizer = placed(tmp_path, dtype, **PLACES[place])
    one, two = (torch.amp.GradScaler("cpu", growth_interval=3) for _ in range(2))
    want = scaled_training(plain, model, one, unscales=False, most=0.01)
    assert scaled_training(optimizer, other, two, unscales=False, most=0.01) == want
    assert same(dict(named_weights(other)), weights(model))
    optimizer.close()


def test_a_scale_that_stays_is_confirmed(tmp_path: Path) -> None:
    model = blocks()
    optimizer = speculating(model, tmp_path, policy=PLAIN)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step, scaler.scale)
        scaler.step(optimizer)
        scaler.update()
        is_confirmed = all(isinstance(p.grad, ConsumedGradient) for p in model.parameters())
        assert is_confirmed == (step > 0)  # the scale is known from the first step on
    optimizer.close()


def test_a_gradient_that_was_confirmed_is_gone(tmp_path: Path) -> None:
    model = blocks()
    optimizer = speculating(model, tmp_path, policy=PLAIN)
    backward(model, 0)
    optimizer.step()
    with pytest.raises(OptionError, match="used already"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.close()


def test_an_inf_that_was_found_elsewhere_stays(tmp_path: Path) -> None:
    """GradScaler looks at the gradients of each dtype on a device in turn."""
    model = blocks().to(torch.bfloat16)
    late = nn.Parameter(torch.ones(4))
    optimizer = speculating(model, tmp_path, params=[late, *model.parameters()])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for grad in (torch.ones(4), torch.full((4,), torch.inf)):
        optimizer.zero_grad()
        backward(model, 0, scaler.scale)
        before = late.detach().clone()
        late.grad = grad
        scaler.step(optimizer)
        scaler.update()
        optimizer.wait()
    assert torch.equal(late, before)
    assert scaler.get_scale() == 2.0
    optimizer.close()


def test_a_gradient_of_an_earlier_step_is_gone(tmp_path: Path) -> None:
    model = blocks()
    optimizer = speculating(model, tmp_path, policy=PLAIN)
    backward(model, 0)
    earlier = next(model.parameters()).grad
    assert earlier is not None
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 1)
    with pytest.raises(OptionError, match="used already"):
        earlier.abs()
    assert optimizer._runtime.schedule.is_open
    optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("replaced", [None, 2.0])
def test_a_gradient_that_is_replaced_takes_the_step_again(
    replaced: float | None, tmp_path: Path
) -> None:
    model, other = blocks(), blocks()
    plain, optimizer = AdamW(model.parameters(), lr=1e-2), speculating(other, tmp_path)
    for net, each in ((model, plain), (other, optimizer)):
        for step in range(3):
            each.zero_grad()
            backward(net, step)
            first = next(net.parameters())
            first.grad = None if replaced is None else torch.full_like(first, replaced)
            each.step()
        each.wait()
    assert same(weights(other), weights(model))
    optimizer.close()


def test_a_weight_is_read_as_it_was_before_the_step(tmp_path: Path) -> None:
    model = blocks()
    optimizer = speculating(model, tmp_path)
    before = {name: weight.clone() for name, weight in weights(model).items()}
    backward(model, 0)
    kinds = {type(p) for p in model.parameters()}
    assert [tuple(p.shape) for p in model.parameters()]  # asks for no bytes
    assert {type(p) for p in model.parameters()} == kinds != {nn.Parameter}
    assert same({name: p.detach() for name, p in model.named_parameters()}, before)
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 1)  # a step of its own after the first reader: it begins in step()
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    optimizer.close()


def test_a_step_that_nobody_looks_into_leaves_parameters_as_they_were(tmp_path: Path) -> None:
    model = blocks()
    optimizer = speculating(model, tmp_path)
    for step in range(2):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.clip_grad_norm_(NEVER)
        assert {type(p) for p in model.parameters()} != {nn.Parameter}  # it may still be undone
        optimizer.step()
    optimizer.wait()
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    for end in (optimizer.zero_grad, optimizer.close):
        optimizer.zero_grad()
        backward(model, 2)
        end()
        assert {type(p) for p in model.parameters()} == {nn.Parameter}


def test_threads_that_read_weights_see_those_of_before(tmp_path: Path) -> None:
    model, other = blocks(), blocks()
    plain, optimizer = AdamW(model.parameters(), lr=1e-2), speculating(other, tmp_path)
    slow(optimizer, "write")  # an undo takes a while
    for net in (model, other):
        backward(net, 0)
    want = [p.sum().item() for p in model.parameters()]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda p: p.sum().item(), other.parameters())) == want
    for each in (plain, optimizer):
        each.step()
        each.wait()
    assert same(weights(other), weights(model))
    optimizer.close()


def test_a_step_that_is_confirmed_is_not_undone_for_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has asked for a weight before ``step()``, and goes on while that confirms the updates."""
    model, other = blocks(), blocks()
    plain, optimizer = AdamW(model.parameters(), lr=1e-2), speculating(other, tmp_path)
    schedule: Any = optimizer._runtime.schedule
    has_asked, may_go_on = Event(), Event()
    undo, step = schedule._undo_for_reader, schedule.step

    def undo_later(why: str) -> None:
        has_asked.set()
        assert may_go_on.wait(10)
        undo(why)

    with ThreadPoolExecutor(1) as thread:
        for net in (model, other):
            backward(net, 0)
        monkeypatch.setattr(schedule, "_undo_for_reader", undo_later)
        reading = thread.submit(lambda: next(other.parameters()).sum().item())
        assert has_asked.wait(10)

        def step_beside_the_thread(*given: object) -> None:
            may_go_on.set()
            reading.result()
            step(*given)

        monkeypatch.setattr(schedule, "step", step_beside_the_thread)
        plain.step()
        optimizer.step()
    optimizer.wait()
    assert same(weights(other), weights(model))
    optimizer.close()


def test_weights_are_those_of_before_where_a_second_backward_has_failed(tmp_path: Path) -> None:
    model = blocks()
    optimizer = speculating(model, tmp_path)
    before = weights(model)
    loss = mean_square(model, 0)
    loss.backward(retain_graph=True)
    with pytest.raises((OptionError, RuntimeError)):
        loss.backward()
    assert same({name: p.detach() for name, p in model.named_parameters()}, before)
    optimizer.close()


def test_weights_are_those_of_before_where_step_has_failed(tmp_path: Path) -> None:
    model = blocks()
    optimizer = speculating(model, tmp_path)
    before = weights(model)
    backward(model, 0)
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(OptionError, match="lr"):
        optimizer.step()
    assert same({name: p.detach() for name, p in model.named_parameters()}, before)
    optimizer.close()


def test_a_weight_that_a_second_backward_reads_is_refused(tmp_path: Path) -> None:
    model = blocks()
    optimizer = speculating(model, tmp_path)
    first = next(model.parameters())
    other = torch.ones((), requires_grad=True)
    out = other * 2
    out.register_hook(lambda gradient: gradient * first.sum().detach())
    backward(model, 0)
    with pytest.raises(OptionError, match="backward has ended, and step"):
        out.backward()
    optimizer.step()
    optimizer.close()


def test_what_needs_whole_states_has_the_step_undone(tmp_path: Path) -> None:
    model, other = blocks(), blocks()
    plain = AdamW(model.parameters(), lr=1e-2)
    optimizer = speculating(other, tmp_path, durability="commit", commit_every=None, policy=PLAIN)
    for step in range(3):
        for net, each in ((model, plain), (other, optimizer)):
            each.zero_grad()
            backward(net, step)
        assert optimizer.commit() == step
        assert all(map(torch.equal, states_of(optimizer), states_of(plain)))
        plain.step()
        optimizer.step()
    optimizer.wait()
    assert same(weights(other), weights(model))
    optimizer.close()


def test_threads_that_read_gradients_undo_the_step_once(tmp_path: Path) -> None:
    model, other = blocks(), blocks()
    plain, optimizer = AdamW(model.parameters(), lr=1e-2), speculating(other, tmp_path)
    for net, each in ((model, plain), (other, optimizer)):
        backward(net, 0)
        with ThreadPoolExecutor(4) as threads:
            grads = [p.grad for p in net.parameters() if p.grad is not None]
            norms = [norm.item() for norm in threads.map(torch.linalg.vector_norm, grads)]
        assert all(norm > 0 for norm in norms)
        each.step()
        each.wait()
    assert same(weights(other), weights(model))
    optimizer.close()


def test_a_thread_that_reads_a_gradient_in_backward_is_refused(tmp_path: Path) -> None:
    model, other = blocks(), blocks()
    plain, optimizer = AdamW(model.parameters(), lr=1e-2), speculating(other, tmp_path)
    seen: list[str] = []
    first, last = next(other.parameters()), other[-1].weight

    def look(_: Tensor) -> None:
        gradient = last.grad
        assert isinstance(gradient, ConsumedGradient)
        with ThreadPoolExecutor(1) as threads, pytest.raises(OptionError, match="used already"):
            threads.submit(gradient.abs).result()
        seen.append("once")

    hook = first.register_hook(look)
    backward(other, 0)
    hook.remove()
    assert seen
    optimizer.step()
    backward(model, 0)
    plain.step()
    optimizer.wait()
    assert same(weights(other), weights(model))
    optimizer.close()


def test_memory_of_old_weights_is_freed_where_no_step_begins_any_more(tmp_path: Path) -> None:
    model = blocks()
    optimizer = speculating(model, tmp_path, policy=PLAIN)
    pipeline = optimizer._states().pipeline
    before = len(pipeline.memory)
    backward(model, 0)
    assert usage(optimizer=optimizer).states.host_weight_bytes > 0
    assert len(pipeline.memory) > before
    mean_square(model, 0)
    assert usage(optimizer=optimizer).states.host_weight_bytes == 0
    assert len(pipeline.memory) == before
    optimizer.step()
    optimizer.close()


def test_a_step_of_fewer_micro_batches_leaves_no_count(tmp_path: Path) -> None:
    model, other = blocks(), blocks()
    plain = AdamW(model.parameters(), lr=1e-2)
    optimizer = speculating(other, tmp_path, policy=PLAIN, accumulation_steps=2)
    for net, each in ((model, plain), (other, optimizer)):
        for batches in (1, 2, 2):
            for batch in range(batches):
                backward(net, batch)
            each.step()
            net.zero_grad()
        each.wait()
    assert optimizer._runtime.schedule.begins_now  # type: ignore[attr-defined]
    assert same(weights(other), weights(model))
    optimizer.close()
