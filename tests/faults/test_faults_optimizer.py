"""What a user sees when the disk fails under an optimizer: where, what, and what to do."""

import copy
import errno
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from parity.quadratic import (
    SLOT,
    STREAM,
    PiecewiseTraining,
    Training,
    every_backend,
    every_error,
    piecewise_undisturbed,
    training_on,
    undisturbed,
)
from process_counts import open_descriptors
from tensorstow import AdamW, _native
from tensorstow.base.errors import DirectoryError, PoisonedError, TransferError

Make = Callable[..., Training | PiecewiseTraining]
Wanted = Callable[[int], torch.Tensor]
every_kind = pytest.mark.parametrize(
    ("make", "wanted"),
    [(training_on, undisturbed), (PiecewiseTraining, piecewise_undisturbed)],
    ids=["AdamW", "StowedOptimizer"],
)


def assert_says_all(
    error: TransferError, directory: Path, operation: str, code: int, blocks: range
) -> None:
    assert error.operation == operation
    assert error.errno == code
    assert error.path.startswith(str(directory))
    assert error.offset in [STREAM * block for block in blocks]
    assert error.length == STREAM
    assert error.advice
    for part in (operation, str(error.offset), str(STREAM), os.strerror(code), error.advice):
        assert part in str(error)


def assert_poisoned(training: Training, cause: TransferError) -> None:
    before = training.parameter.detach().clone()
    for use in (
        training.optimizer.step,
        training.optimizer.synchronize,
        training.optimizer.state_dict,
    ):
        with pytest.raises(PoisonedError, match="checkpoint") as caught:
            use()
        assert caught.value.__cause__ is cause
    training.backward()  # its hooks read ahead no more, and do not raise inside autograd
    with pytest.raises(PoisonedError):
        training.optimizer.step()
    assert torch.equal(training.parameter.detach(), before)
    training.optimizer.close()


@every_backend
@every_error
def test_a_read_that_fails_in_step(tmp_path: Path, backend: str, code: int) -> None:
    # Two slots: the first two chunks are read ahead, the others within step().
    training = training_on(tmp_path, backend, ram_budget=2 * SLOT)
    training.engine.inject_fault("read", after=7, error=code)
    training.backward()
    with pytest.raises(TransferError) as caught:
        training.optimizer.step()
    assert_says_all(caught.value, tmp_path, "read", code, range(12))
    assert_poisoned(training, caught.value)


@every_backend
@every_error
def test_a_read_that_fails_ahead_of_step_surfaces_there(
    tmp_path: Path, backend: str, code: int
) -> None:
    training = training_on(tmp_path, backend)
    training.engine.inject_fault("read", after=1, error=code)
    training.backward()
    time.sleep(0.05)  # the failure has happened by now
    before = training.parameter.detach().clone()
    with pytest.raises(TransferError) as caught:
        training.optimizer.step()
    assert_says_all(caught.value, tmp_path, "read", code, range(12))
    assert torch.equal(training.parameter.detach(), before)
    assert_poisoned(training, caught.value)


@every_error
@pytest.mark.parametrize("use", ["step", "synchronize", "state_dict", "load_state_dict"])
def test_a_write_that_fails_behind_step_surfaces_next(tmp_path: Path, code: int, use: str) -> None:
    for delay in (0.3, 2.0, 10.0):  # so that step() is over before, also beside other processes
        training = training_on(tmp_path)
        saved = copy.deepcopy(training.optimizer.state_dict())
        training.engine.inject_fault("write", after=2, error=code, delay_us=int(delay * 1e6))
        with suppress(TransferError):
            training.step()
            break
    assert torch.equal(training.parameter.detach(), undisturbed(2))
    time.sleep(1.5 * delay)
    training.backward()
    given = (saved,) if use == "load_state_dict" else ()
    with pytest.raises(TransferError) as caught:
        getattr(training.optimizer, use)(*given)
    assert_says_all(caught.value, tmp_path, "write", code, range(12))
    assert_poisoned(training, caught.value)


def test_a_write_that_fails_while_step_waits(tmp_path: Path) -> None:
    training = training_on(tmp_path, ram_budget=2 * SLOT)
    training.engine.inject_fault("write", error=errno.ENOSPC)
    training.backward()
    with pytest.raises(TransferError, match="larger") as caught:
        training.optimizer.step()
    assert_says_all(caught.value, tmp_path, "write", errno.ENOSPC, range(12))
    assert_poisoned(training, caught.value)


@every_backend
@every_kind
@pytest.mark.parametrize("operation", ["read", "write"])
def test_short_transfers_are_finished(
    tmp_path: Path, backend: str, operation: str, make: Make, wanted: Wanted
) -> None:
    training = make(tmp_path, backend)
    training.engine.inject_fault(operation, times=-1, max_bytes=4096)
    for _ in range(3):
        training.step()
        training.optimizer.synchronize()  # or the ring would still hold what is to be read
    training.engine.clear_faults()
    training.step()
    assert training.engine.counters()["resubmitted"] >= 3 * 12 * (STREAM // 4096 - 1)
    assert torch.equal(training.parameter.detach(), wanted(5))
    training.optimizer.close()


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN], ids=errno.errorcode.get)
def test_interrupted_transfers_are_tried_again(tmp_path: Path, code: int) -> None:
    training = training_on(tmp_path)
    training.engine.inject_fault("read", times=3, error=code)
    training.engine.inject_fault("write", times=3, error=code)
    training.step()
    training.optimizer.synchronize()
    assert torch.equal(training.parameter.detach(), undisturbed(2))
    training.optimizer.close()


def test_a_file_that_was_cut_says_so(tmp_path: Path) -> None:
    training = training_on(tmp_path)
    for entry in Path("/proc/self/fd").iterdir():
        if str(entry.readlink() if entry.is_symlink() else "").startswith(str(tmp_path)):
            os.truncate(entry, STREAM)
    training.backward()
    with pytest.raises(TransferError, match="the end of the file") as caught:
        training.optimizer.step()
    assert caught.value.errno == 0
    assert_poisoned(training, caught.value)


def test_a_read_that_fails_in_state_dict(tmp_path: Path) -> None:
    training = training_on(tmp_path)
    training.engine.inject_fault("read", after=3, error=errno.EIO)
    with pytest.raises(TransferError, match="dmesg") as caught:
        training.optimizer.state_dict()
    assert caught.value.operation == "read"
    # Nothing was changed, so nothing is lost: it may be tried again.
    state = training.optimizer.state_dict()["state"][0]
    assert state["exp_avg"].ne(0).any()
    training.step()
    assert torch.equal(training.parameter.detach(), undisturbed(2))
    training.optimizer.close()


def test_a_write_that_fails_in_load_state_dict_poisons(tmp_path: Path) -> None:
    training = training_on(tmp_path)
    saved = copy.deepcopy(training.optimizer.state_dict())
    training.step()
    training.optimizer.synchronize()
    training.engine.inject_fault("write", after=3, error=errno.ENOSPC)
    with pytest.raises(TransferError) as caught:
        training.optimizer.load_state_dict(saved)
    assert caught.value.operation == "write"
    # Half of the chunks are of one step and half of another: no step may use them.
    with pytest.raises(PoisonedError):
        training.step()
    training.optimizer.close()


@every_kind
def test_a_failed_optimizer_leaves_others_alone(tmp_path: Path, make: Make, wanted: Wanted) -> None:
    broken, healthy = make(tmp_path), make(tmp_path)
    broken.engine.inject_fault("read", error=errno.EIO)
    with pytest.raises(TransferError):
        broken.step()
    healthy.step()
    assert torch.equal(healthy.parameter.detach(), wanted(2))


def step_and_synchronize(optimizer: AdamW) -> None:
    optimizer.step()
    optimizer.synchronize()


def test_a_checkpoint_goes_into_a_new_optimizer(tmp_path: Path) -> None:
    training = training_on(tmp_path)
    saved = copy.deepcopy(training.optimizer.state_dict())
    weights = training.parameter.detach().clone()
    training.engine.inject_fault("write", error=errno.EIO)
    training.backward()
    with pytest.raises(TransferError):
        step_and_synchronize(training.optimizer)
    training.optimizer.close()
    again = training_on(tmp_path)
    with torch.no_grad():
        again.parameter.copy_(weights)
    again.optimizer.load_state_dict(saved)
    again.step()
    assert torch.equal(again.parameter.detach(), undisturbed(2))


# --- directories ---


def test_a_directory_removed_after_construction_does_not_matter(tmp_path: Path) -> None:
    directory = tmp_path / "gone"
    directory.mkdir()
    training = training_on(directory)
    assert list(directory.iterdir()) == []
    shutil.rmtree(directory)
    training.step()
    training.optimizer.synchronize()
    assert torch.equal(training.parameter.detach(), undisturbed(2))


def test_a_directory_that_is_too_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs

    def nearly_full(path: str | int) -> os.statvfs_result:
        fields = list(real(path))
        fields[4] = 1  # f_bavail
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", nearly_full)
    with pytest.raises(DirectoryError, match=r"free where .* are needed"):
        training_on(tmp_path)


@pytest.mark.usefixtures("garbage_apart")
@pytest.mark.parametrize("make", [training_on, PiecewiseTraining])
def test_a_directory_that_fills_up_before_space_is_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    before = open_descriptors()
    monkeypatch.setattr(_native, "fallocate", lambda _fd, _length: errno.ENOSPC)
    with pytest.raises(DirectoryError, match="No space left"):
        make(tmp_path)
    assert open_descriptors() == before


def test_a_directory_that_refuses_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: str | Path, flags: int, *rest: int) -> int:
        if str(path).startswith(str(tmp_path)) and flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DirectoryError, match=r"Name (another|a) directory"):
        training_on(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory(tmp_path: Path) -> None:
    directory = tmp_path / "readonly"
    directory.mkdir(mode=0o500)
    with pytest.raises(DirectoryError, match="no file can be created"):
        training_on(directory)


def test_a_missing_directory_is_made(tmp_path: Path) -> None:
    training_on(tmp_path / "missing")
    assert (tmp_path / "missing").is_dir()
