"""``overlap=DelayedUpdate()``, bit for bit a queue of one gradient before an exact optimizer."""

import copy
import errno
import io
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from compare import all_equal
from models import ResidualLinear
from parity.beside import engine_of
from remote import make_remote
from stopped import stop
from tensorstow import AdamW, DelayedUpdate, PipelinePolicy, Plan, stow
from tensorstow.base.errors import OptionError, PoisonedError, TransferError
from tensorstow.colossalai import CPUAdam
from tensorstow.io.device_link import PlainLink
from tensorstow.states import memory
from tensorstow.step.delayed_overlap import DelayedOverlap

STEPS = 9
WARMUP = 3
WIDTH = 32
LR = 1e-2
POLICY = PipelinePolicy(chunk_elements=1024)
ONE_SLOT = PipelinePolicy(chunk_elements=1024, backend="threads", schedule="naive")
"""Each chunk is read in each step."""
Run = tuple[list[float], list[Tensor]]


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(ResidualLinear(WIDTH), nn.Tanh(), ResidualLinear(WIDTH)).to(dtype)


def loss_of(net: Callable[[Tensor], Tensor], step: int) -> Tensor:
    dtype = next(iter(net.parameters())).dtype if isinstance(net, nn.Module) else torch.float32
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
    return net(x).float().square().mean()


def delayed(net: nn.Module, warmup_steps: int = 0, **given: Any) -> AdamW:  # noqa: ANN401
    given.setdefault("policy", POLICY)
    return AdamW(net.parameters(), lr=LR, module=net, overlap=DelayedUpdate(warmup_steps), **given)


def lr_of(step: int) -> float:
    return LR / (1 + step)


def raw(net: nn.Module) -> list[Tensor]:
    """Return the weights as they are; nothing is waited for."""
    with torch._C.DisableTorchFunctionSubclass():
        return [p.detach().clone() for p in net.parameters()]


def queued(
    warmup_steps: int = 0,
    *,
    applied_after: Iterable[int] = (),
    delay: int = 1,
    dtype: torch.dtype = torch.float32,
    state_format: str = "fp32",
    max_norm: float | None = None,
    micro_batches: int = 1,
) -> Run:
    """Train by the definition: an exact optimizer gets gradients ``delay`` steps late.

    ``applied_after``: steps after which nothing is left in the queue.
    """
    net = model(dtype)
    parameters = list(net.parameters())
    optimizer = AdamW(parameters, state_format=state_format)
    queue: list[tuple[float, tuple[Tensor, ...]]] = []

    def apply(left: int) -> None:
        while len(queue) > left:
            optimizer.param_groups[0]["lr"], gradients = queue.pop(0)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            if max_norm is not None:
                optimizer.clip_grad_norm_(max_norm)
            optimizer.step()

    losses = []
    for step in range(STEPS):
        parts = [loss_of(net, 100 * part + step) for part in range(micro_batches)]
        losses.append(sum(part.item() for part in parts))
        gradients = torch.autograd.grad(parts[0], parameters)
        for part in parts[1:]:
            more = torch.autograd.grad(part, parameters)
            gradients = tuple(a + b for a, b in zip(gradients, more, strict=True))
        apply(delay - 1)
        queue.append((lr_of(step), gradients))
        if step < warmup_steps or step in set(applied_after):
            apply(0)
    apply(0)
    return losses, raw(net)


def trained(
    optimizer: AdamW,
    net: nn.Module,
    steps: Iterable[int] = range(STEPS),
    *,
    after: Callable[[int], object] = lambda _: None,
    max_norm: float | None = None,
    micro_batches: int = 1,
    set_to_none: bool = True,
) -> list[float]:
    """Train as users do; ``after`` is called with each step when it was taken."""
    losses = []
    for step in steps:
        total = 0.0
        for part in range(micro_batches):
            loss = loss_of(net, 100 * part + step)
            total += loss.item()
            torch.autograd.backward(loss)
        losses.append(total)
        optimizer.param_groups[0]["lr"] = lr_of(step)
        if max_norm is not None:
            optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none)
        after(step)
    return losses


def assert_is(ours: Run, theirs: Run) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    assert all_equal(ours[1], theirs[1])


# --- the definition ---


def on_disk(directory: Path) -> dict[str, Any]:
    return {"states": "disk", "dir": directory, "durability": "none"}


@pytest.mark.parametrize("warmup_steps", [0, WARMUP, STEPS])
@pytest.mark.parametrize("states", ["host", "disk", 0.5])
def test_gradients_are_used_one_step_late(
    states: Any,  # noqa: ANN401
    warmup_steps: int,
    tmp_path: Path,
) -> None:
    where = {} if states == "host" else {**on_disk(tmp_path), "states": states}
    net = model()
    optimizer = delayed(net, warmup_steps, **where)
    losses = trained(optimizer, net)
    optimizer.close()
    assert_is((losses, raw(net)), queued(warmup_steps))


@pytest.mark.parametrize("delay", [0, 2])
def test_another_delay_has_other_results(delay: int) -> None:
    """So that the tests of the definition cannot pass without a delay, or with a longer one."""
    losses, weights = queued(applied_after=range(STEPS)) if delay == 0 else queued(delay=2)
    want_losses, want = queued()
    assert not any(torch.equal(a, b) for a, b in zip(weights, want, strict=True))
    assert losses[:2] == pytest.approx(want_losses[:2] if delay else losses[:2])
    assert losses[3] != pytest.approx(want_losses[3], rel=1e-4)


@pytest.mark.parametrize(
    "given",
    [
        {"max_norm": 0.05},
        {"micro_batches": 3},
        {"dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "max_norm": 0.05, "micro_batches": 2},
    ],
    ids=str,
)
def test_clipping_accumulation_and_bfloat16(given: dict[str, Any], tmp_path: Path) -> None:
    net = model(given.get("dtype", torch.float32))
    optimizer = delayed(net, WARMUP, **on_disk(tmp_path))
    ours = {key: value for key, value in given.items() if key != "dtype"}
    losses = trained(optimizer, net, **ours)
    optimizer.close()
    assert_is((losses, raw(net)), queued(WARMUP, **given))


@pytest.mark.parametrize("state_format", ["split", "bf16", "int8"])
def test_formats(state_format: str) -> None:
    """Inexact ones round alike too: what they draw depends on the step and the element alone."""
    net = model(torch.bfloat16)
    optimizer = delayed(net, WARMUP, state_format=state_format)
    losses = trained(optimizer, net)
    optimizer.close()
    theirs = queued(WARMUP, dtype=torch.bfloat16, state_format=state_format)
    assert_is((losses, raw(net)), theirs)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_may_be_dropped_or_zeroed_after_step(set_to_none: bool) -> None:  # noqa: FBT001
    net = model()
    optimizer = delayed(net)
    losses = trained(optimizer, net, set_to_none=set_to_none)
    assert optimizer._runtime.schedule.held, "zero_grad() applied the update"
    optimizer.close()
    assert_is((losses, raw(net)), queued())


def test_a_scaled_loss_and_a_skipped_step() -> None:
    """Each step() applies the update before it, also one that is skipped."""
    net, theirs = model(), model()
    optimizer, exact = delayed(net), AdamW(theirs.parameters(), lr=LR)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    late: tuple[Tensor, ...] | None = None
    for step in range(STEPS):
        overflows = step == 4
        loss = loss_of(net, step) * (torch.inf if overflows else 1.0)
        torch.autograd.backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        gradients = torch.autograd.grad(loss_of(theirs, step), list(theirs.parameters()))
        step_by(exact, late)
        late = None if overflows else gradients
    step_by(exact, late)
    optimizer.close()
    assert all_equal(raw(net), raw(theirs))


def step_by(optimizer: AdamW, gradients: tuple[Tensor, ...] | None) -> None:
    if gradients is not None:
        for parameter, gradient in zip(optimizer._parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()


def test_parameters_without_a_gradient_are_left_alone() -> None:
    net = model()
    optimizer = delayed(net)
    for step in range(4):
        net[2 * (step % 2)].requires_grad_(False)  # noqa: FBT003
        net[2 * ((step + 1) % 2)].requires_grad_(True)  # noqa: FBT003
        trained(optimizer, net, [step])
    optimizer.close()
    assert {int(optimizer.state[p]["step"]) for p in optimizer.state} in ({2}, set())


def test_weights_in_another_memory_format() -> None:
    def run(**given: Any) -> list[Tensor]:  # noqa: ANN401
        torch.manual_seed(0)
        net = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with AdamW(net.parameters(), lr=LR, module=net, **given) as optimizer:
            for step in range(4):
                generator = torch.Generator().manual_seed(step)
                # The gradients do not depend on the weights.
                torch.autograd.backward(net(torch.randn(2, 3, 6, 6, generator=generator)).sum())
                optimizer.step()
                optimizer.zero_grad()
        return raw(net)

    assert all_equal(run(overlap=DelayedUpdate(0)), run())


@pytest.mark.parametrize("parts", ["all", "some"])
def test_parameters_on_an_accelerator(
    parts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = model()
    away = {id(p) for p in (net if parts == "all" else net[0]).parameters()}
    make_remote(monkeypatch, lambda p: id(p) in away)
    optimizer = delayed(net, WARMUP, **on_disk(tmp_path))
    losses = trained(optimizer, net, max_norm=0.05)
    optimizer.close()
    assert_is((losses, raw(net)), queued(WARMUP, max_norm=0.05))


# --- what a step leaves ---


def test_gradients_of_an_accelerator_are_held_until_they_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_remote(monkeypatch, link=PlainLink)
    net = model()
    optimizer = delayed(net)
    torch.autograd.backward(loss_of(net, 0))
    optimizer.step()
    assert len(optimizer._runtime.schedule.held) == len(list(net.parameters()))
    loss = loss_of(net, 1)
    assert not optimizer._runtime.schedule.held
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()
    torch.autograd.backward(loss_of(net, 2))  # without zero_grad(): of gradients that were copied
    optimizer.close()


@pytest.mark.parametrize("is_remote", [False, True])
def test_weights_stay_as_they_are_until_the_next_step(
    is_remote: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_remote:
        make_remote(monkeypatch, link=PlainLink)
        monkeypatch.setattr(memory, "DEFAULT_STAGING_BYTES", 0)  # two chunks of three at once
    net = model()
    optimizer = delayed(net)
    trained(optimizer, net, [0])
    before = raw(net)
    loss = loss_of(net, 1)
    schedule = optimizer._runtime.schedule
    while is_remote and schedule.held:
        assert schedule.beside_backward is not None
        schedule.beside_backward()
    optimizer._states().pipeline.wait_idle()  # the update is over, and not published
    torch.autograd.backward(loss)
    assert all_equal(raw(net), before)
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(raw(net), before, strict=True))


def test_an_update_that_is_slow_is_waited_for(tmp_path: Path) -> None:
    """The next ``step()`` publishes what the disk has yet to deliver."""
    expected, net = queued(), model()
    optimizer = delayed(net, states="disk", dir=tmp_path, durability="none", policy=ONE_SLOT)
    engine = engine_of(optimizer)
    engine.inject_fault("read", times=-1, delay_us=2000)
    losses = trained(optimizer, net, range(STEPS))
    optimizer.close()
    assert_is((losses, raw(net)), expected)


def test_gradients_and_copies_are_counted() -> None:
    net = model()
    optimizer = delayed(net, warmup_steps=1)
    nbytes = sum(p.nbytes for p in net.parameters())
    trained(optimizer, net, [0])
    held = optimizer._memory()
    assert (held.gradient_bytes, held.host_weight_bytes) == (0, 0)
    trained(optimizer, net, [1, 2])
    held = optimizer._memory()
    assert (held.gradient_bytes, held.host_weight_bytes) == (nbytes, nbytes)
    assert held.host_bytes == held.ram_bytes + held.ring_bytes + nbytes
    optimizer.close()


# --- what applies the pending update ---


def evaluate(net: nn.Module) -> None:
    with torch.no_grad():
        loss_of(net, 0)


APPLIES: dict[str, Callable[[nn.Module, AdamW], object]] = {
    "wait": lambda _, o: o.wait(),
    "updated": lambda _, o: o.updated(),
    "synchronize": lambda _, o: o.synchronize(),
    "state_dict": lambda _, o: o.state_dict(),
    "state_dict of the model": lambda n, _: n.state_dict(),
    "load_state_dict of the model": lambda n, _: n.load_state_dict(n.state_dict()),
    "evaluation": lambda n, _: evaluate(n),
    "inference": lambda n, _: torch.inference_mode()(evaluate)(n),
    "a read": lambda n, _: [p.norm() for p in n.parameters()],
    "deepcopy": lambda n, _: copy.deepcopy(n),
    "save": lambda n, _: torch.save(n, io.BytesIO()),
}


@pytest.mark.parametrize("name", APPLIES)
def test_whatever_needs_the_weights_applies_the_update(name: str) -> None:
    net = model()
    optimizer = delayed(net)
    act = APPLIES[name]
    after = lambda step: act(net, optimizer) if step == 4 else None  # noqa: E731
    losses = trained(optimizer, net, after=after)
    optimizer.close()
    assert_is((losses, raw(net)), queued(applied_after=[4]))


def test_a_copy_and_a_saved_model_have_new_weights_and_no_part_in_training() -> None:
    net = model()
    optimizer = delayed(net)
    trained(optimizer, net, range(3))
    copied = copy.deepcopy(net)
    file = io.BytesIO()
    trained(optimizer, net, [3])
    torch.save(net, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert all_equal(raw(loaded), raw(net))
    trained(optimizer, net, [4])
    for other in (copied, loaded):
        torch.autograd.backward(loss_of(other, 0))
    assert optimizer._runtime.schedule.held, "a forward of a copy applied the update"
    optimizer.close()


def test_uses_behind_the_forward_leave_the_update_pending() -> None:
    """An evaluation between forward and backward reads what the forward has read."""
    net = model()
    optimizer = delayed(net)
    losses = []
    for step in range(STEPS):
        loss = loss_of(net, step)
        evaluate(net)
        losses.append(loss.item())
        torch.autograd.backward(loss)
        optimizer.param_groups[0]["lr"] = lr_of(step)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    assert_is((losses, raw(net)), queued())


def test_the_update_is_not_applied_beside_a_forward_or_backward() -> None:
    net = model()
    optimizer = delayed(net)
    trained(optimizer, net, range(2))
    seen: list[object] = []

    def attempt(*_: object) -> None:
        try:
            optimizer.state_dict()
        except OptionError as error:
            seen.append(error)

    in_forward = net[1].register_forward_hook(attempt)
    loss = loss_of(net, 2)
    in_forward.remove()
    in_backward = net[0].linear.weight.register_hook(attempt)
    torch.autograd.backward(loss)
    in_backward.remove()
    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert len(seen) == 3
    assert all("with the weights from before" in str(error) for error in seen)
    optimizer.state_dict()  # behind backward, in the thread that trains
    optimizer.step()
    optimizer.close()


def test_after_an_interrupt_in_a_forward_states_can_be_saved() -> None:
    net = model()
    optimizer = delayed(net)
    losses = trained(optimizer, net, range(5))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = net[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loss_of(net, 5)
    handle.remove()
    optimizer.state_dict()
    losses += trained(optimizer, net, range(5, STEPS))
    optimizer.close()
    assert_is((losses, raw(net)), queued(applied_after=[4]))


def test_a_write_before_the_forward_is_kept() -> None:
    net = model()
    optimizer = delayed(net)
    trained(optimizer, net, range(2))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    assert not any(w.any() for w in raw(net))
    optimizer.close()
    assert not any(w.any() for w in raw(net))


@pytest.mark.parametrize("warmup_steps", [0, WARMUP])
def test_writes_that_change_no_version_are_kept(warmup_steps: int) -> None:
    runs = []
    for is_data in (False, True):
        net = model()
        optimizer = delayed(net, warmup_steps)
        losses = []
        for step in range(STEPS):
            losses += trained(optimizer, net, [step])
            for parameter in net.parameters():
                with torch.no_grad():
                    (parameter.data if is_data else parameter).clamp_(-0.1, 0.1)
        optimizer.close()
        runs.append((losses, raw(net)))
    assert_is(*runs)


def test_a_write_to_old_weights_that_changes_no_version_is_an_error() -> None:
    net = model()
    optimizer = delayed(net)
    trained(optimizer, net, [0])
    torch.autograd.backward(loss_of(net, 1))
    net[0].linear.weight.data.mul_(2)
    with pytest.raises(OptionError, match="was written between step"):
        optimizer.step()


def test_what_the_update_uses_must_not_change() -> None:
    net = model()
    optimizer = delayed(net)
    trained(optimizer, net, [0])
    loss = loss_of(net, 1)
    with torch.no_grad():
        net[0].linear.weight.mul_(2)
    del loss
    with pytest.raises(OptionError, match="was written between step"):
        optimizer.step()
    net = model()
    optimizer = delayed(net)
    torch.autograd.backward(loss_of(net, 0))
    optimizer.step()
    torch.autograd.backward(loss_of(net, 1))  # without zero_grad(): adds to what is read
    with pytest.raises(OptionError, match="gradient was changed in place"):
        optimizer.step()


def test_a_failure_of_the_disk_is_raised_by_the_next_use(tmp_path: Path) -> None:
    net = model()
    optimizer = delayed(net, policy=ONE_SLOT, **on_disk(tmp_path))
    trained(optimizer, net, range(2))
    optimizer.synchronize()
    torch.autograd.backward(loss_of(net, 2))
    engine = engine_of(optimizer)
    engine.inject_fault("read", error=errno.EIO, times=-1)
    optimizer.step()
    before = raw(net)
    with pytest.raises(TransferError):
        net.state_dict()
    assert all_equal(raw(net), before)
    with pytest.raises(PoisonedError):
        optimizer.step()
    assert {type(p) for p in net.parameters()} == {nn.Parameter}
    assert any(module._forward_pre_hooks for module in net.modules())
    optimizer.close()
    assert not any(module._forward_pre_hooks for module in net.modules())


# --- runs ---


@pytest.mark.parametrize("states", ["host", "disk"])
def test_a_resumed_run_has_the_bits_of_the_whole_one(states: str, tmp_path: Path) -> None:
    def run(name: str, net: nn.Module) -> AdamW:
        where = {"states": states, "dir": tmp_path / name, "commit_every": 3}
        (tmp_path / name).mkdir(exist_ok=True)
        return delayed(net, 1, **where)

    net = model()
    whole = run("whole", net)
    losses = trained(whole, net)
    whole.close()
    assert_is((losses, raw(net)), queued(1, applied_after=[2, 5, 8]))

    stopped = model()
    optimizer = run("stopped", stopped)
    trained(optimizer, stopped, range(8))
    stop(optimizer)
    resumed = model()
    optimizer = run("stopped", resumed)
    assert optimizer.resume() == 6
    assert trained(optimizer, resumed, range(6, STEPS)) == losses[6:]
    optimizer.close()
    assert all_equal(raw(resumed), raw(net))


@pytest.mark.parametrize("after_backward", [False, True])
def test_a_state_dict_is_of_one_moment(after_backward: bool) -> None:  # noqa: FBT001
    net = model()
    optimizer = delayed(net, 2)
    trained(optimizer, net, range(5))
    if after_backward:  # which was allowed to read the old weights
        torch.autograd.backward(loss_of(net, 5))
        optimizer.zero_grad()
    weights = copy.deepcopy(net.state_dict())
    states = copy.deepcopy(optimizer.state_dict())
    rest = trained(optimizer, net, range(5, STEPS))
    optimizer.close()
    again = model()
    again.load_state_dict(weights)
    optimizer = delayed(again, 2)
    optimizer.load_state_dict(states)
    assert trained(optimizer, again, range(5, STEPS)) == rest
    optimizer.close()
    assert all_equal(raw(again), raw(net))


def test_resume_drops_a_pending_update(tmp_path: Path) -> None:
    net = model()
    optimizer = delayed(net, dir=tmp_path, commit_every=3)
    losses = trained(optimizer, net, range(5))
    assert optimizer.resume() == 3
    assert trained(optimizer, net, range(3, 5)) == losses[3:]
    optimizer.close()


# --- what cannot be delayed ---


def test_a_warmup_is_a_number_of_steps() -> None:
    assert DelayedUpdate().warmup_steps == 40
    for value in (-1, 1.5, True, "many"):
        with pytest.raises(OptionError, match="warmup_steps"):
            DelayedUpdate(value)  # type: ignore[arg-type]


def test_options_that_contradict_a_delay(tmp_path: Path) -> None:
    net = model()
    for given, what in (
        ({"module": None}, "without module="),
        ({"accumulation_steps": 2}, "accumulation_steps=2"),
        ({"update_on": "device"}, 'update_on="device"'),
        ({"dir": tmp_path}, "commit every 600 seconds"),
        ({"policy": PipelinePolicy(nan_until_published=True)}, "nan_until_published"),
    ):
        options = {"module": net, "overlap": DelayedUpdate(), **given}
        with pytest.raises(OptionError, match=what):
            AdamW(net.parameters(), **options)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="or an instance of DelayedUpdate"):
        AdamW(net.parameters(), overlap="delayed", module=net)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "advice"), [({}, "forward"), ({"parameters": "disk", "states": "disk"}, "backward")]
)
def test_a_plan_takes_none_and_advises_what_it_takes(given: dict[str, Any], advice: str) -> None:
    with pytest.raises(OptionError, match=f'in a plan.*"{advice}"'):
        Plan(overlap=DelayedUpdate(), **given)  # type: ignore[arg-type]
    assert Plan(overlap=advice, **given).overlap == advice  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["partial", "function"])
def test_stow_takes_none(way: str) -> None:
    make: Any = partial(AdamW, overlap=DelayedUpdate())
    if way == "function":
        make = lambda named, **placement: AdamW(  # noqa: E731
            named, **placement, overlap=DelayedUpdate()
        )
    with pytest.raises(OptionError, match=r"to the optimizer of stow\(\).*Leave it out"):
        stow(model(), make, plan=Plan())


def test_colossalais_classes_take_none() -> None:
    net = model()
    with pytest.raises(OptionError, match="to CPUAdam"):
        CPUAdam(net.parameters(), module=net, overlap=DelayedUpdate())  # type: ignore[arg-type]


def test_sharded_parameters_are_not_delayed(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        net = model()
        fully_shard(net)
        with pytest.raises(OptionError, match="with sharded parameters"):
            delayed(net)
    finally:
        dist.destroy_process_group()


# --- what delays nothing says so ---


def test_weights_that_are_read_after_each_step_are_exact_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = model()
    optimizer = delayed(net)
    losses = trained(optimizer, net, after=lambda _: [p.norm() for p in net.parameters()])
    optimizer.close()
    assert caplog.text.count("delays nothing: 3 steps in a row") == 1
    assert_is((losses, raw(net)), queued(applied_after=range(STEPS)))


def test_weights_that_are_read_now_and_then_are_not(caplog: pytest.LogCaptureFixture) -> None:
    net = model()
    optimizer = delayed(net)
    trained(optimizer, net, after=lambda step: evaluate(net) if step % 2 else None)
    optimizer.close()
    assert not caplog.text


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo's
@pytest.mark.parametrize("blocks", [True, False])
def test_a_compiled_model(blocks: bool, caplog: pytest.LogCaptureFixture) -> None:  # noqa: FBT001
    torch._dynamo.reset()
    net = model()
    for part in [net[0], net[2]] if blocks else [net]:
        part.compile(backend="eager", fullgraph=True)
    optimizer = delayed(net)
    losses = trained(optimizer, net)
    optimizer.close()
    assert_is((losses, raw(net)), queued(applied_after=[] if blocks else range(STEPS)))
    assert caplog.text.count("compiled as a whole") == (not blocks)
    torch._dynamo.reset()


def test_a_model_lets_go_of_its_optimizer() -> None:
    net = model()
    optimizer = delayed(net)
    assert isinstance(optimizer._runtime.schedule, DelayedOverlap)
    trained(optimizer, net, range(3))
    del optimizer
    assert all_equal(raw(net), queued_prefix(3))
    assert not net._forward_pre_hooks
    assert not net[0]._state_dict_pre_hooks
    assert {type(p) for p in net.parameters()} == {nn.Parameter}


def queued_prefix(steps: int) -> list[Tensor]:
    """Return the weights after ``steps``, with nothing left in the queue."""
    net = model()
    optimizer = delayed(net)
    trained(optimizer, net, range(steps))
    optimizer.close()
    return raw(net)
