"""What forward saves for backward, on disk: the bits, the bytes and the refusals."""

import gc
import logging
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from models import FeedForward
from tensorstow import offload_activations
from tensorstow.activations.offload import ActivationOffload, _hooks_in_force
from tensorstow.activations.pool import ActivationBytes
from tensorstow.activations.saved import SavedStorage, StoragesByNumber
from tensorstow.base.errors import (
    DamageError,
    DirectoryError,
    OptionError,
    StowError,
    TransferError,
)
from tensorstow.io.files import IoFuture

WIDTH, ROWS = 128, 96  # a saved tensor of a block has 48 KiB, its inner ones 192 KiB
BLOCK = ROWS * WIDTH * 4


ToDisk = Callable[..., ActivationOffload]
"""What the fixture ``to_disk`` returns."""


class WeightFunction(nn.Module):
    """Computes what a function returns for its weight."""

    def __init__(self, weight: torch.Tensor, compute: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.compute = compute

    def forward(self) -> Any:  # noqa: ANN401  # what the function returns
        return self.compute(self.weight)


def net(*, recompute: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(FeedForward(WIDTH, recompute=recompute) for _ in range(4)))


def rows(seed: int = 1) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    torch.stack([model(x).square().sum() for x in inputs or (rows(),)]).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return len(got) == len(want) and all(map(torch.equal, got, want))


def at_rest(offload: ActivationOffload) -> ActivationBytes:
    """Return the counts when no write is under way, which would keep its bytes of the file."""
    scratch = offload._pool._scratch
    assert scratch is not None
    scratch.engine.drain()
    return offload._pool.nbytes()


@pytest.fixture
def to_disk(tmp_path: Path) -> Iterator[ToDisk]:
    made = []

    def make(
        model: nn.Module, ram_budget: str | int = "256KiB", **more: object
    ) -> ActivationOffload:
        made.append(
            offload_activations(model, to="disk", ram_budget=ram_budget, dir=tmp_path, **more)
        )
        return made[-1]

    yield make
    for offload in made:
        offload.close()


@pytest.mark.parametrize("inner", ["kept", "recomputed"])
@pytest.mark.parametrize("budget", [0, "256KiB", "64MiB"])
def test_gradients_are_those_without_it(to_disk: ToDisk, budget: str | int, inner: str) -> None:
    model = net(recompute=inner == "recomputed")
    want = gradients(model)
    offload = to_disk(model, budget)
    for step in range(3):
        assert same(gradients(model), want)
        moved = at_rest(offload)
        if budget == "64MiB":
            assert moved.bytes_read == moved.bytes_written == 0
        else:
            assert moved.bytes_written >= (step + 1) * 2 * BLOCK
            assert moved.bytes_read <= moved.bytes_written
        assert moved.disk_bytes == 0  # backward has everything


def test_a_storage_moves_once_and_memory_is_bounded(to_disk: ToDisk) -> None:
    model = net()
    offload = to_disk(model, 8 * BLOCK)
    model(rows()).sum().backward()
    # Of each block: its input, the norm's output, and two inner tensors of four times the width.
    most = 4 * 10 * BLOCK
    assert most - 4 * BLOCK <= offload._pool.nbytes().bytes_written <= most
    assert offload._pool.nbytes().most_host_bytes <= 8 * BLOCK + 2 * 4 * BLOCK


def test_views_of_one_storage_come_back_as_they_were(to_disk: ToDisk) -> None:
    x = torch.randn(64, 256)

    def views(weight: nn.Parameter) -> torch.Tensor:
        y = (x * weight).double()
        a, b = y.t()[3:100], y[::2, 10:20]
        return (a * a).sum() + (b.exp() * b).sum() + (y.expand(3, 64, 256) ** 3).sum()

    model = WeightFunction(torch.ones(64, 256), views)
    want = [*torch.autograd.grad(model(), model.weight)]
    offload = to_disk(model, 0)
    assert same([*torch.autograd.grad(model(), model.weight)], want)
    # x, y, what exp gave: y was saved by several operations.
    assert offload._pool.nbytes().bytes_written <= 2 * (64 * 256 * 8) * 3


def test_several_forwards_before_one_backward(to_disk: ToDisk) -> None:
    model = net()
    want = gradients(model, rows(1), rows(2))
    to_disk(model)
    assert same(gradients(model, rows(1), rows(2)), want)


def test_what_no_backward_wants_is_given_back(to_disk: ToDisk) -> None:
    model = net()
    offload = to_disk(model)
    for _ in range(3):
        out = model(rows())
        assert offload._pool.nbytes().disk_bytes > 0
        del out
        gc.collect()
        assert at_rest(offload).disk_bytes == 0
    with torch.no_grad():
        model(rows())
    before = at_rest(offload)
    assert before.disk_bytes == before.bytes_read == 0


def test_a_forward_that_fails_leaves_no_hooks(to_disk: ToDisk) -> None:
    model = net()
    want = gradients(model)
    offload = to_disk(model)
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.randn(3, WIDTH + 1))
    gc.collect()
    assert at_rest(offload).disk_bytes == 0
    assert _hooks_in_force() is None
    assert same(gradients(model), want)


@pytest.mark.parametrize("budget", [0, "64MiB"])
def test_a_second_backward_is_refused(to_disk: ToDisk, budget: str | int) -> None:
    model = net()
    to_disk(model, budget)
    loss = model(rows()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(StowError, match="second backward"):
        loss.backward()


@pytest.mark.parametrize("columns", [8, WIDTH * 64])  # one stays, one moves
def test_a_write_to_what_was_saved_is_told(to_disk: ToDisk, columns: int) -> None:
    model = WeightFunction(torch.ones(columns), torch.exp)
    to_disk(model, "64MiB")
    out = model()
    out.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_units_alone_are_moved(to_disk: ToDisk) -> None:
    model = net()
    want = gradients(model)
    whole, part = to_disk(model, 0), None
    gradients(model)
    whole.close()
    part = to_disk(model, 0, units=[model[1]])
    assert same(gradients(model), want)
    assert 0 < part._pool.nbytes().bytes_written <= whole._pool.nbytes().bytes_written / 3


def test_a_unit_in_a_unit_changes_nothing(to_disk: ToDisk) -> None:
    model = net()
    want = gradients(model)
    to_disk(model, 0, units=[model, model[1]])
    assert same(gradients(model), want)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler, of a block's input
def test_autocast_and_compiled_units(to_disk: ToDisk) -> None:
    def train(model: nn.Module) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return gradients(model)

    want = train(net())
    model = net()
    for block in model:
        block.compile(backend="aot_eager")
    compiled = train(model)
    offload = to_disk(model, 0)
    assert same(train(model), compiled)
    assert offload._pool.nbytes().bytes_read > 0
    plain = net()
    to_disk(plain, 0)
    assert same(train(plain), want)


# --- failures ---


def test_a_disk_that_fails_is_told_and_the_next_step_is_right(to_disk: ToDisk) -> None:
    model = net()
    want = gradients(model)
    offload = to_disk(model, 0)
    gradients(model)
    engine = offload._pool._scratch.engine
    for operation in ("write", "read"):
        engine.inject_fault(operation, times=1, error=5)
        with pytest.raises(TransferError):
            gradients(model)
        gc.collect()
    assert same(gradients(model), want)
    assert at_rest(offload).disk_bytes == 0


def test_other_bytes_than_were_written_are_told(to_disk: ToDisk) -> None:
    model = net()
    offload = to_disk(model, 0)
    loss = model(rows()).sum()
    for storage in offload._pool._needed.before(offload._pool._next):
        storage.checksum = storage.checksum and storage.checksum ^ 1
    with pytest.raises(DamageError, match="other bytes"):
        loss.backward()


def test_a_full_disk_is_told_in_forward(to_disk: ToDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    want = gradients(model)
    offload = to_disk(model, 0)

    def full(*_: object) -> None:
        message = "no room"
        raise DirectoryError(message)

    with monkeypatch.context() as patch:
        patch.setattr(offload._pool._scratch, "allocate", full)
        with pytest.raises(DirectoryError, match="no room"):
            gradients(model)
    gc.collect()
    assert same(gradients(model), want)


# --- options ---


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"to": "gpu"}, '"host" or "disk"'),
        ({"to": "host", "ram_budget": "1GiB"}, 'to="disk"'),
        ({"to": "host", "dir": "/tmp"}, 'to="disk"'),
        ({"to": "disk", "units": [nn.Linear(1, 1)]}, "not a module of the model"),
        ({"to": "disk", "ram_budget": "1x"}, "ram_budget"),
    ],
)
def test_options_that_cannot_be(given: dict[str, object], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        offload_activations(net(), **given)


@pytest.mark.parametrize(
    ("name", "on_disk"), [("cpu", False), ("ram", False), ("host", False), ("nvme", True)]
)
def test_tiers_have_the_names_that_they_have_elsewhere(
    name: Any,  # noqa: ANN401
    on_disk: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    model = net()
    with offload_activations(model, to=name, **({"dir": tmp_path} if on_disk else {})) as offload:
        loss = model(rows()).sum()
        assert (offload._pool.nbytes().most_host_bytes > 0) == on_disk
        loss.backward()


def test_other_hooks_are_refused(to_disk: ToDisk) -> None:
    model = net()
    want = gradients(model)
    to_disk(model)
    with save_on_cpu(), pytest.raises(OptionError, match="save_on_cpu"):
        model(rows())
    with pytest.raises(OptionError, match="units="):
        checkpoint(model, rows(), use_reentrant=False)
    assert same(gradients(model), want)


def test_what_moved_and_what_stayed_is_logged_once(
    to_disk: ToDisk, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    to_disk(model)
    with caplog.at_level(logging.INFO, logger="tensorstow"):
        for _ in range(3):
            gradients(model)
    (line,) = [r.getMessage() for r in caplog.records if "saved activations" in r.getMessage()]
    assert "of parameters" in line
    assert "of small tensors" in line


def test_host_memory_is_where_tensors_of_the_cpu_are() -> None:
    model = net()
    want = gradients(model)
    with offload_activations(model, to="host") as offload:
        assert same(gradients(model), want)
        assert offload._pool.nbytes().host_bytes == 0
    assert not model._forward_hooks


# --- what a review broke ---


def test_a_read_that_failed_fails_again(to_disk: ToDisk) -> None:
    """Several saved tensors of one storage: the second does not take what the first did not get."""

    def twice(weight: nn.Parameter) -> tuple[torch.Tensor, torch.Tensor]:
        y = weight * 1
        return (y * y).sum(), (y * y).sum()

    model = WeightFunction(torch.full((ROWS, WIDTH), 2.0), twice)
    offload = to_disk(model, 0)
    first, second = model()
    scratch = offload._pool._scratch
    assert scratch is not None
    scratch.engine.inject_fault("read", times=1, error=5)
    with pytest.raises(TransferError):
        torch.autograd.grad(first, model.weight, retain_graph=True)
    for _ in range(2):
        try:
            (found,) = torch.autograd.grad(second, model.weight, retain_graph=True)
        except (TransferError, StowError):
            continue
        assert torch.equal(found, torch.full((ROWS, WIDTH), 4.0))


def test_an_alias_that_counts_its_own_versions(to_disk: ToDisk) -> None:
    def aliased(weight: nn.Parameter) -> torch.Tensor:
        h = weight * 3
        out = (weight * h.data) + h.exp() * h
        h.detach().add_(1)
        return out

    model = WeightFunction(torch.ones(ROWS, WIDTH), aliased)
    to_disk(model, "64MiB")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model().sum().backward()


def test_a_buffer_that_is_filled_again_between_forwards(to_disk: ToDisk) -> None:
    scale = torch.ones(ROWS, WIDTH)
    model = WeightFunction(torch.ones(ROWS, WIDTH), lambda weight: weight * scale)
    to_disk(model, 0)
    first = model().sum()
    scale.data.fill_(2.0)
    second = model().sum()
    assert torch.autograd.grad(second, model.weight)[0].eq(2.0).all()
    assert torch.autograd.grad(first, model.weight)[0].eq(1.0).all()


def test_a_storage_that_is_resized_is_told(to_disk: ToDisk) -> None:
    more = nn.Parameter(torch.ones(4 * ROWS, WIDTH))

    def discarded(weight: nn.Parameter) -> torch.Tensor:
        h = weight * 3
        out = h.exp() * h
        h.untyped_storage().resize_(0)
        return out.sum() + (more * 2).exp().sum()

    model = WeightFunction(torch.ones(ROWS, WIDTH), discarded)
    to_disk(model, 4 * BLOCK)
    with pytest.raises(RuntimeError, match="resized from"):
        model().backward()


def test_memory_of_a_forward_that_no_backward_follows_is_forgotten(to_disk: ToDisk) -> None:
    model = net()
    offload = to_disk(model)
    for _ in range(5):
        model(rows())
    gc.collect()
    model(rows())
    assert len(list(offload._pool._needed.before(offload._pool._next))) <= 2 * 4 * 10


def test_a_write_that_failed_for_nobody_leaks_nothing(
    to_disk: ToDisk, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    offload = to_disk(model, 8 * BLOCK)
    scratch = offload._pool._scratch
    assert scratch is not None
    for after in range(6):
        scratch.engine.inject_fault("write", after=after, times=1, error=5)
        with suppress(TransferError):
            model(rows())
        scratch.engine.clear_faults()
        gc.collect()
        assert at_rest(offload).disk_bytes == 0
    assert offload._pool._blocks.used.held == 0
    told = [text for text in caplog.messages if "is not needed any more" in text]
    assert told
    assert all("Input/output error" in text for text in told)


@pytest.mark.parametrize("ram_budget", ["64MiB", 8 * BLOCK])
def test_looking_ahead_visits_a_storage_a_few_times(
    to_disk: ToDisk,
    monkeypatch: pytest.MonkeyPatch,
    ram_budget: str | int,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(FeedForward(WIDTH) for _ in range(30)))
    want = gradients(model)
    offload = to_disk(model, ram_budget)
    visited = []
    before = StoragesByNumber.before

    def counted(self: StoragesByNumber, number: int) -> Iterator[SavedStorage]:
        for storage in before(self, number):
            visited.append(storage.number)
            yield storage

    monkeypatch.setattr(StoragesByNumber, "before", counted)
    assert same(gradients(model), want)
    assert offload._pool._next > 90
    assert len(visited) <= 3 * offload._pool._next


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copied_model_keeps_its_saved_tensors(
    to_disk: ToDisk, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    model = net()
    want = gradients(model)
    offload = to_disk(model, 0)
    copied = deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert any("copied or loaded" in text for text in caplog.messages)
    assert same(gradients(copied), want)
    assert offload._pool.nbytes().bytes_written == 0
    assert same(gradients(model), want)
    assert offload._pool.nbytes().bytes_written > 0


def test_scratch_goes_with_a_dropped_model(tmp_path: Path) -> None:
    def open_in_directory() -> list[str]:
        links = (link.readlink() for link in Path("/proc/self/fd").iterdir() if link.exists())
        return [target for target in map(str, links) if target.startswith(str(tmp_path))]

    model = net()
    offload = offload_activations(model, to="disk", ram_budget=0, dir=tmp_path)
    loss = model(rows()).sum()
    del model, offload
    gc.collect()
    assert open_in_directory()
    loss.backward()  # what the graph holds is still there
    del loss
    gc.collect()
    assert not open_in_directory()


def test_close_in_the_middle_of_a_forward(to_disk: ToDisk) -> None:
    model, want = net(), gradients(net())
    offload = to_disk(model, 0)
    handle = model[2].register_forward_pre_hook(lambda *_: offload.close())
    gradients_of_part = model[:2](rows())
    del gradients_of_part
    with suppress(StowError, OSError):
        gradients(model)
    handle.remove()
    assert _hooks_in_force() is None
    assert same(gradients(model), want)


def test_an_interrupt_in_forward_is_over_with_the_offload(to_disk: ToDisk) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    model, want = net(), gradients(net())
    offload = to_disk(model, 0)
    handle = model[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(rows())
    handle.remove()
    assert same(gradients(model), want)
    offload.close()
    assert _hooks_in_force() is None
    assert same(gradients(model), want)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch.func's own
def test_what_has_no_memory_of_its_own_stays(to_disk: ToDisk) -> None:
    model = net()
    to_disk(model, 0)
    x = rows()
    _, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    assert torch.isfinite(tangent).all()
    named = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="saved tensor hooks"):  # torch's own words
        torch.func.grad(lambda p: torch.func.functional_call(model, p, x).sum())(named)
    assert same(gradients(model), gradients(net()))
    model.to("meta")(x.to("meta")).sum().backward()


def test_parameters_that_no_module_is_called_with_stay(to_disk: ToDisk) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.linear(x, self.inner.weight)

    model, x = Tied(), torch.randn(2, WIDTH)
    offload = to_disk(model, 0)
    model(x.requires_grad_()).sum().backward()
    assert offload._pool.nbytes().bytes_written == 0


# --- compiled ---


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler, of a block's input
@pytest.mark.parametrize("compiled", ["round the hooks", "under the hooks", "a unit"])
def test_what_a_compiled_forward_saves_is_moved(to_disk: ToDisk, compiled: str) -> None:
    model = net()
    unit = model[1] if compiled == "a unit" else model
    called: nn.Module = model
    if compiled == "round the hooks":
        called = torch.compile(model, backend="aot_eager")
    else:
        unit.compile(backend="aot_eager")
    want = gradients(called)
    torch.compiler.reset()
    offload = to_disk(model, 0, units=[unit])
    for step in range(1, 3):
        assert same(gradients(called), want)
        moved = at_rest(offload)
        assert moved.bytes_read >= step * 4 * BLOCK
        assert moved.disk_bytes == 0
    assert _hooks_in_force() is None
    torch.compiler.reset()


@pytest.mark.parametrize("awaits", ["its read", "a write of what leaves"])
def test_a_thread_that_waits_for_the_disk_keeps_no_other_from_counting(
    to_disk: ToDisk, monkeypatch: pytest.MonkeyPatch, awaits: str
) -> None:
    model = net()
    want = gradients(model)
    offload = to_disk(model, 8 * BLOCK)
    is_waiting, may_end, done, wait = Event(), Event(), IoFuture.done, IoFuture.wait

    def late(future: IoFuture) -> None:
        is_waiting.set()
        assert may_end.wait(10)
        wait(future)

    def hold_back() -> None:
        monkeypatch.setattr(IoFuture, "done", lambda future: may_end.is_set() and done(future))
        monkeypatch.setattr(IoFuture, "wait", late)

    model.zero_grad()
    with ThreadPoolExecutor(2) as threads:
        if awaits == "its read":
            loss = model(rows()).square().sum()
            at_rest(offload)
            hold_back()
            step = threads.submit(loss.backward)
        else:
            hold_back()
            step = threads.submit(lambda: model(rows()).square().sum().backward())
        try:
            assert is_waiting.wait(10)
            assert threads.submit(offload._pool.nbytes).result(timeout=5).bytes_written
        finally:
            may_end.set()
        step.result(timeout=20)
    assert same([p.grad for p in model.parameters()], want)
