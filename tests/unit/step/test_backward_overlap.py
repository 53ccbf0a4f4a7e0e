"""``overlap="backward"``: each gradient is used when it is final; what cannot be exact says so."""

import errno
import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pagers import let_attributes_be_pagers
from parity.beside import (
    CHUNK,
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
from tensorstow.base.errors import DTypeError, OptionError, PoisonedError, TransferError
from tensorstow.base.update_on import Overlap
from tensorstow.step.backward_overlap import ConsumedGradients
from tensorstow.tensors.placeholder import ConsumedGradient


def backward(model: nn.Module, step: int = 0) -> None:
    torch.autograd.backward(mean_square(model, step))


@pytest.mark.parametrize("states", ["ram", "disk"])
def test_it_gives_the_same_bits(states: str, tmp_path: Path) -> None:
    want = in_ram(blocks(), range(5))
    model = blocks()
    given: dict[str, Any] = {"states": "ram"} if states == "ram" else {}
    if states == "ram":
        optimizer = AdamW(model.parameters(), lr=1e-2, overlap="backward", module=model, **given)
    else:
        optimizer = optimizer_for(model, tmp_path, "backward")
        slow(optimizer, seconds=0.002)
    train(optimizer, model, range(4))
    optimizer.zero_grad()
    backward(model, 4)
    assert all(isinstance(p.grad, ConsumedGradient) for p in model.parameters())
    optimizer.step()
    assert same(weights(model), want)
    optimizer.close()


def test_states_in_ram_are_updated_before_the_last_gradient_is_there() -> None:
    model = blocks()
    policy = PipelinePolicy(chunk_elements=CHUNK)
    optimizer = AdamW(model.parameters(), lr=1e-2, overlap="backward", module=model, policy=policy)
    first, *_, last = model.parameters()
    number = optimizer._params().get(last).number
    updated: list[bool] = []

    def look(_: Tensor) -> None:
        deadline = time.monotonic() + 10
        pipeline = optimizer._states().pipeline
        while not pipeline.is_published(number) and time.monotonic() < deadline:
            time.sleep(0.001)
        updated.append(pipeline.is_published(number))

    first.register_post_accumulate_grad_hook(look)
    backward(model)
    optimizer.step()
    assert updated == [True]
    optimizer.close()


# --- what looks at gradients that are gone ---


def by_scaler(_: nn.Module, optimizer: AdamW) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)


def by_unscale(_: nn.Module, optimizer: AdamW) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)


def grad_of(model: nn.Module) -> Any:  # noqa: ANN401  # what is done with it is what is tested
    return next(iter(model.parameters())).grad


LOOKS: dict[str, Callable[[nn.Module, AdamW], object]] = {
    "clip_grad_norm_": lambda m, _: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "clip_grad_norm_, a loop": lambda m, _: nn.utils.clip_grad_norm_(
        m.parameters(), 1.0, foreach=False
    ),
    "clip_grad_value_": lambda m, _: nn.utils.clip_grad_value_(m.parameters(), 1.0),
    "ours": lambda _, o: o.clip_grad_norm_(1.0),
    "GradScaler.step": by_scaler,
    "GradScaler.unscale_": by_unscale,
    "mul_": lambda m, _: grad_of(m).mul_(0.5),
    "norm": lambda m, _: grad_of(m).norm(),
    "isfinite": lambda m, _: torch.isfinite(grad_of(m)).all(),
    "clone": lambda m, _: grad_of(m).clone(),
    "data.mul_": lambda m, _: grad_of(m).data.mul_(0.5),
    "item": lambda m, _: grad_of(m)[0, 0].item(),
    "numpy": lambda m, _: grad_of(m).numpy(),
    "all_reduce by hand": lambda m, _: torch.cat([p.grad.view(-1) for p in m.parameters()]),  # type: ignore[union-attr]
    "zero_grad": lambda _, o: o.zero_grad(),
    "zero_grad in place": lambda _, o: o.zero_grad(set_to_none=False),
    "a second backward": lambda m, _: backward(m, 1),
    "a forward": lambda m, _: mean_square(m, 1),
    "a block's forward": lambda m, _: m.get_submodule("1")(torch.ones(1, 32)),
    "the model's state_dict": lambda m, _: m.state_dict(),
    "the optimizer's state_dict": lambda _, o: o.state_dict(),
    "synchronize": lambda _, o: o.synchronize(),
    "wait": lambda _, o: o.wait(),
    "load_state_dict": lambda _, o: o.load_state_dict({"state": {}, "param_groups": []}),
    "add_param_group": lambda _, o: o.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
}


@pytest.mark.parametrize("name", LOOKS)
def test_what_would_not_be_exact_is_refused(name: str, tmp_path: Path) -> None:
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, "backward")
    train(optimizer, model, [0])
    optimizer.zero_grad()
    backward(model, 1)
    with pytest.raises((OptionError, RuntimeError), match=r'overlap="backward"|not supported'):
        LOOKS[name](model, optimizer)
    optimizer.close()


CHANGES: dict[str, Callable[[nn.Module, AdamW], object]] = {
    "lr": lambda _, o: o.param_groups[0].update(lr=0.5),
    "betas": lambda _, o: o.param_groups[0].update(betas=(0.5, 0.5)),
    "weight_decay": lambda _, o: o.param_groups[0].update(weight_decay=0.5),
    "maximize": lambda _, o: o.param_groups[0].update(maximize=True),
    "model.zero_grad": lambda m, _: m.zero_grad(),
    "a gradient of one's own": lambda m, _: [
        setattr(p, "grad", torch.ones_like(p)) for p in m.parameters()
    ],
    "a weight": lambda m, _: nn.init.zeros_(m.get_parameter("1.bias")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_before_step_is_refused_by_it(name: str, tmp_path: Path) -> None:
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, "backward")
    train(optimizer, model, [0])
    optimizer.zero_grad()
    backward(model, 1)
    CHANGES[name](model, optimizer)
    with pytest.raises(OptionError, match='overlap="backward"'):
        optimizer.step()
    optimizer.close()


def test_an_lr_that_is_put_back_is_no_change(tmp_path: Path) -> None:
    want = in_ram(blocks(), range(2))
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, "backward")
    train(optimizer, model, [0])
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(OptionError, match="lr"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-2
    optimizer.step()
    assert same(weights(model), want)
    optimizer.close()


def test_several_ranks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, "backward")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    with pytest.raises(OptionError, match="several ranks"):
        backward(model)  # begun after the optimizer was made
    with pytest.raises(OptionError, match="several ranks"):
        optimizer_for(blocks(), tmp_path, "backward")
    optimizer.close()


def test_a_wrapped_model_is_refused(tmp_path: Path) -> None:
    model = blocks()
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    with pytest.raises(OptionError, match="several ranks"):
        AdamW(model.parameters(), overlap="backward", module=wrapped)
    del tmp_path


# --- backward of all kinds ---


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool | None) -> None:
        super().__init__()
        self.layers = blocks(depth=4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def test_checkpointing_that_is_not_reentrant_is_exact(tmp_path: Path) -> None:
    want = in_ram(Checkpointed(reentrant=None), range(4))
    model = Checkpointed(reentrant=False)
    optimizer = optimizer_for(model, tmp_path, "backward")
    slow(optimizer, seconds=0.002)
    train(optimizer, model, range(4))
    assert same(weights(model), want)
    optimizer.close()


def test_reentrant_checkpointing_is_refused(tmp_path: Path) -> None:
    model = Checkpointed(reentrant=True)
    optimizer = optimizer_for(model, tmp_path, "backward")
    with pytest.raises(OptionError, match="use_reentrant=True"):
        backward(model)
    optimizer.close()


def test_parameters_without_a_gradient_stay(tmp_path: Path) -> None:
    def part(model: nn.Module, step: int) -> Tensor:
        x = torch.ones(4, 32)
        for index in (0, 1, 2) if step % 2 else (0, 2):
            x = model.get_submodule(str(index))(x)
        return x.square().mean()

    want = in_ram(blocks(), range(5), part)
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, "backward")
    train(optimizer, model, range(5), part)
    assert same(weights(model), want)
    assert optimizer.state[model[1].weight]["step"] == 2
    assert optimizer.state[model[0].weight]["step"] == 5
    optimizer.close()


def accumulated(model: nn.Module, optimizer: AdamW, how: str) -> dict[str, Tensor]:
    """Train with three micro-batches per step; the middle block is in two of them or one."""
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(3):
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + micro))
            for index, block in enumerate(model.children()):
                if index != 1 or micro == step % 3 or micro == 0:
                    x = block(x)
            loss = x.square().mean() / 3
            if how == "context" and micro < 2:
                with optimizer.accumulate():
                    torch.autograd.backward(loss)
            else:
                torch.autograd.backward(loss)
        optimizer.step()
    optimizer.close()
    return weights(model)


@pytest.mark.parametrize("how", ["counted", "context"])
def test_parameters_of_some_micro_batches(how: str, tmp_path: Path) -> None:
    model = blocks()
    want = accumulated(model, AdamW(model.parameters(), lr=1e-2), "counted")
    model = blocks()
    steps = 3 if how == "counted" else 1
    optimizer = optimizer_for(model, tmp_path, "backward", accumulation_steps=steps)
    assert same(accumulated(model, optimizer, how), want)


def test_more_backward_passes_than_were_said_are_refused(tmp_path: Path) -> None:
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, "backward", accumulation_steps=2)
    backward(model, 0)
    assert not any(isinstance(p.grad, ConsumedGradient) for p in model.parameters())
    backward(model, 1)
    assert all(isinstance(p.grad, ConsumedGradient) for p in model.parameters())
    with pytest.raises(OptionError, match="accumulation_steps"):
        mean_square(model, 2)
    with pytest.raises(OptionError, match="at least 1"):
        optimizer_for(model, tmp_path, "backward", accumulation_steps=0)
    optimizer.close()


@pytest.mark.parametrize("accumulate", [False, True])
def test_two_losses_with_graphs_of_their_own(tmp_path: Path, *, accumulate: bool) -> None:
    """Neither reads a weight after the first backward, so nothing but the count can tell."""
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, "backward")
    first, second = mean_square(model, 0), mean_square(model, 1)
    if accumulate:
        with optimizer.accumulate():
            torch.autograd.backward(first)
        torch.autograd.backward(second)
        optimizer.step()
    else:
        torch.autograd.backward(first)
        with pytest.raises((OptionError, RuntimeError), match=r"backward|inplace"):
            torch.autograd.backward(second)
    optimizer.close()


def test_a_graph_that_needs_an_old_weight_says_so(tmp_path: Path) -> None:
    """``x`` gets its gradient through a weight whose own gradient does not wait for it."""
    weight = nn.Parameter(torch.eye(32))
    first = nn.Parameter(torch.ones(4, 32))

    model = nn.ParameterList([weight, first])
    optimizer = optimizer_for(model, tmp_path, "backward")
    x = first * 2  # reached last
    used = (x.detach() @ weight).square().mean()
    silent = (x @ weight.detach()).square().mean()
    torch.autograd.backward(used, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(silent)
    optimizer.close()


def test_retained_graphs_are_not_gone_through_again(tmp_path: Path) -> None:
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, "backward")
    loss = mean_square(model, 0)
    torch.autograd.backward(loss, retain_graph=True)
    with pytest.raises((RuntimeError, OptionError)):
        torch.autograd.backward(loss)
    optimizer.step()
    optimizer.close()


def test_closures(tmp_path: Path) -> None:
    want = in_ram(blocks(), range(3))
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, "backward")
    for step in range(3):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            loss = mean_square(model, step)
            torch.autograd.backward(loss)
            return loss.item()

        assert optimizer.step(closure) > 0
    assert same(weights(model), want)
    optimizer.close()


def test_gradients_given_by_hand(tmp_path: Path) -> None:
    def by_hand(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return weights(model)

    model, other = blocks(), blocks()
    for m in (model, other):
        m[1].weight.requires_grad = False  # torch takes the gradient of a frozen parameter too
    want = by_hand(model, AdamW(model.parameters(), lr=1e-2))
    assert same(by_hand(other, optimizer_for(other, tmp_path, "backward")), want)


def test_frozen_then_unfrozen(tmp_path: Path) -> None:
    def trained(model: nn.Sequential, optimizer: AdamW) -> dict[str, Tensor]:
        model[1].requires_grad_(requires_grad=False)
        train(optimizer, model, range(2))
        model[1].requires_grad_()
        train(optimizer, model, range(2, 4))
        model[1].requires_grad_(requires_grad=False)
        train(optimizer, model, range(4, 6))
        optimizer.close()
        return weights(model)

    for late in (False, True):  # frozen when the optimizer is made, or afterwards
        model = blocks()
        model[1].requires_grad_(requires_grad=not late)
        want = trained(model, AdamW(model.parameters(), lr=1e-2))
        model = blocks()
        model[1].requires_grad_(requires_grad=not late)
        assert same(trained(model, optimizer_for(model, tmp_path, "backward")), want)


def test_a_sparse_gradient_is_named_inside_backward(tmp_path: Path) -> None:
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = optimizer_for(model, tmp_path, "backward")
    with pytest.raises(DTypeError, match="sparse"):
        torch.autograd.backward(model(torch.tensor([1, 2])).sum())
    optimizer.close()


@pytest.mark.parametrize("closed", [True, False])
def test_an_optimizer_may_go_between_backward_and_step(tmp_path: Path, *, closed: bool) -> None:
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, "backward")
    train(optimizer, model, range(2))
    slow(optimizer)
    optimizer.zero_grad()
    backward(model, 2)
    gone = weakref.ref(optimizer)
    if closed:
        optimizer.close()
    del optimizer
    gc.collect()
    assert gone() is None
    for parameter in model.parameters():
        parameter.grad = None
    mean_square(model, 3).backward()  # type: ignore[no-untyped-call]
    assert type(model[0].weight.grad) is Tensor


def test_a_failure_beside_backward_is_raised_by_step_and_ever_after(tmp_path: Path) -> None:
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, "backward")
    train(optimizer, model, range(2))
    optimizer.synchronize()
    engine = engine_of(optimizer)
    engine.inject_fault("read", error=errno.EIO)
    optimizer.zero_grad()
    backward(model, 2)
    with pytest.raises(TransferError) as caught:
        optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    for _ in range(2):  # without zero_grad()
        with pytest.raises(PoisonedError, match=r"by resume\(\)") as again:
            backward(model, 3)
        assert again.value.__cause__ is caught.value
    optimizer.close()


# --- a backward that does not end ---


def interrupt(error: type[BaseException], where: nn.Module) -> None:
    """Raise ``error`` in the next backward, where it comes to the weight of ``where``."""
    weight: Any = where.weight

    def fail(_: Tensor) -> None:
        hook.remove()
        raise error

    hook = weight.register_post_accumulate_grad_hook(fail)


def broken_off(directory: Path, error: type[BaseException]) -> tuple[nn.Sequential, AdamW]:
    """Return a run with two steps committed and a third whose backward was broken off."""
    model = blocks()
    given: dict[str, Any] = {"durability": "commit", "commit_every": None}
    optimizer = optimizer_for(model, directory, "backward", **given)
    train(optimizer, model, range(2))
    optimizer.commit()
    slow(optimizer)
    interrupt(error, model[1])
    optimizer.zero_grad()
    with pytest.raises(error):
        backward(model, 2)
    return model, optimizer


every_end = pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])


@every_end
def test_a_backward_that_does_not_end_is_left_by_resume(
    error: type[BaseException], tmp_path: Path
) -> None:
    want = in_ram(blocks(), range(5))
    model, optimizer = broken_off(tmp_path, error)
    uses: list[Callable[[], object]] = [
        optimizer.step,
        optimizer.zero_grad,
        optimizer.state_dict,
        optimizer.commit,
        lambda: mean_square(model, 2),
    ]
    for use in uses:
        with pytest.raises(OptionError, match=r"has not ended.*resume\(\).*last commit"):
            use()
    assert optimizer.resume() == 2
    assert all(p.grad is None for p in model.parameters())
    train(optimizer, model, range(2, 5))
    assert same(weights(model), want)
    optimizer.close()


def test_resume_to_look_at_a_model_alone(tmp_path: Path) -> None:
    """It asks for the number of a backward, and in this mode torch records none."""
    want = in_ram(blocks(), range(2))
    model, optimizer = broken_off(tmp_path, RuntimeError)
    with torch.inference_mode():
        assert optimizer.resume() == 2
    assert same(weights(model), want)
    optimizer.close()


def test_an_interrupt_while_a_gradient_is_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = in_ram(blocks(), range(4))
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, "backward", durability="commit", commit_every=1)
    train(optimizer, model, range(2))

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    optimizer.zero_grad()
    with monkeypatch.context() as patch:
        patch.setattr(optimizer._states().pipeline, "add_gradient", stop)
        with pytest.raises(KeyboardInterrupt):
            backward(model, 2)
    uses: list[Callable[[], object]] = [
        lambda: backward(model, 2),
        optimizer.step,
        optimizer.zero_grad,
        optimizer.state_dict,
    ]
    for use in uses:  # the gradient is gone and was not used
        with pytest.raises(PoisonedError, match=r"by resume\(\)"):
            use()
    assert optimizer.resume() == 2
    train(optimizer, model, range(2, 4))
    assert same(weights(model), want)
    optimizer.close()


class Counted:
    """Pins a weight for ever, and counts."""

    def __init__(self) -> None:
        self.pins = 0

    def expect(self, following: Sequence["Counted"]) -> None:
        pass

    nbytes = 1

    def can_pin(self, nbytes: int) -> bool:
        return nbytes > 0

    def pin(self, *, for_write: bool = False) -> None:
        del for_write
        self.pins += 1

    def unpin(self, *, dirty: bool = False) -> None:
        del dirty
        self.pins -= 1


@pytest.mark.parametrize("overlap", ["none", "backward"])
def test_pins_of_a_failed_step_end_with_resume(
    overlap: Overlap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_attributes_be_pagers(monkeypatch)
    want = in_ram(blocks(), range(4))
    model = blocks()
    pagers = [Counted() for _ in model.parameters()]
    for parameter, pager in zip(model.parameters(), pagers, strict=True):
        parameter.pager = pager  # type: ignore[attr-defined]
    policy = PipelinePolicy(chunk_elements=CHUNK, backend="threads", depth=1)
    given: dict[str, Any] = {"durability": "commit", "commit_every": None, "policy": policy}
    optimizer = optimizer_for(model, tmp_path, overlap, **given)
    train(optimizer, model, range(2))
    optimizer.commit()
    engine = engine_of(optimizer)
    engine.inject_fault("read", error=errno.EIO, delay_us=300_000)  # the step has begun by then
    with pytest.raises(TransferError):
        train(optimizer, model, range(2, 4))
    assert any(pager.pins for pager in pagers)
    assert optimizer.resume() == 2
    assert not any(pager.pins for pager in pagers)
    train(optimizer, model, range(2, 4))
    assert same(weights(model), want)
    assert not any(pager.pins for pager in pagers)
    optimizer.close()


def test_micro_batches_are_counted_anew_behind_zero_grad(tmp_path: Path) -> None:
    model = blocks()
    want = accumulated(model, AdamW(model.parameters(), lr=1e-2), "counted")
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, "backward", accumulation_steps=3)
    backward(model, 0)  # and the second forward fails, say
    optimizer.zero_grad()
    assert same(accumulated(model, optimizer, "counted"), want)
    optimizer.close()


# --- memory ---


def test_gradients_live_a_layer_or_two_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though all biases share a chunk, which is updated at the end of backward."""
    live: list[weakref.ref[Tensor]] = []
    peaks: list[int] = []
    consume = ConsumedGradients.consume

    def counting(
        self: ConsumedGradients,
        number: int,
        parameter: Tensor,
        use: Callable[[Tensor, object], None],
    ) -> None:
        def counted(gradient: Tensor, copied: object) -> None:
            live.append(weakref.ref(gradient))
            use(gradient, copied)
            time.sleep(0.01)  # an update's time, of which backward would have more

        consume(self, number, parameter, counted)
        del parameter
        peaks.append(sum(g.numel() for r in live if (g := r()) is not None))

    monkeypatch.setattr(ConsumedGradients, "consume", counting)
    model = blocks(depth=12)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 2]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = optimizer_for(model, tmp_path, "backward", params=groups)
    train(optimizer, model, range(2))
    peaks.clear()
    train(optimizer, model, [2])
    assert max(peaks) <= 3 * 32 * 32 + 12 * 32
    optimizer.zero_grad()
    assert not any(r() is not None for r in live)
    optimizer.close()


# --- LandedGradients by itself ---


def test_which_gradients_are_final() -> None:
    consumed = ConsumedGradients(3, lambda _: True)
    assert [consumed.is_final(7) for _ in range(3)] == [False, False, True]
    with consumed.accumulate(), consumed.accumulate():
        assert not consumed.is_final(8)
    assert [consumed.is_final(8) for _ in range(3)] == [False, False, True]
    consumed.restart()
    assert not consumed.is_final(7)


def test_gradients_are_held_until_they_are_used() -> None:
    used: set[int] = set()
    consumed = ConsumedGradients(1, used.__contains__)
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    refs: list[weakref.ref[Tensor]] = []
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.ones(4)
        consumed.consume(number, parameter, lambda g, _: refs.append(weakref.ref(g)))
    used |= {1}
    consumed.free_published()
    assert [ref() is None for ref in refs] == [False, True, False]
    assert consumed.arrived == [0, 1, 2]
    consumed.restart()
    assert all(ref() is None for ref in refs)
    assert consumed.arrived == []


def test_which_gradients_are_used_is_not_asked_for_each_that_comes() -> None:
    asked: list[int] = []
    consumed = ConsumedGradients(1, lambda number: bool(asked.append(number)))
    for number in range(300):
        parameter = nn.Parameter(torch.ones(4))
        parameter.grad = torch.ones(4)
        consumed.consume(number, parameter, lambda *_: None)
        consumed.limit_bytes(lambda: 1 << 20, lambda _: False)
    assert len(asked) <= 10 * 300
    assert consumed.most_bytes == 300 * 16


def test_hooks_of_two_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd calls the hooks of a device's parameters in that device's thread."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    inside: list[str] = []
    together: list[list[str]] = []
    take = ConsumedGradients.is_final

    def watched(self: ConsumedGradients, number: int) -> bool:
        inside.append(threading.current_thread().name)
        together.append(list(inside))
        time.sleep(0.02)
        is_final = take(self, number)
        inside.pop()
        return is_final

    monkeypatch.setattr(ConsumedGradients, "is_final", watched)
    optimizer = AdamW(model.parameters(), lr=1e-2, states="disk", overlap="backward", module=model)
    barrier = threading.Barrier(2)

    def call_hooks(parameters: list[nn.Parameter]) -> None:
        barrier.wait()
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
            for hook in list(parameter._post_accumulate_grad_hooks.values()):
                hook(parameter)

    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(call_hooks, list(block.parameters())) for block in model]
        for call in calls:
            call.result()
    optimizer.step()
    optimizer.close()
    assert len(together) == 4
    assert all(len(names) == 1 for names in together), together


def test_a_gradient_of_another_order_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have to be copied, by the host, which must not read what is still coming down."""
    parameter = nn.Parameter(torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last))
    coming = torch.zeros(2, 3, 4, 5)

    class Arrival:
        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            coming.copy_(torch.arange(120.0).view(2, 3, 4, 5))

    parameter.grad = torch.zeros_like(parameter)
    monkeypatch.setattr(
        "tensorstow.step.backward_overlap.gradient_and_event", lambda _: (coming, Arrival())
    )
    used: list[tuple[Tensor, object]] = []
    gradients = ConsumedGradients(1, lambda _: False)
    gradients.consume(0, parameter, lambda *given: used.append(given))
    want = torch.arange(120.0).view(2, 3, 4, 5).permute(0, 2, 3, 1)
    assert torch.equal(used[0][0], want)
    assert used[0][1] is None
