"""DiskOffloader: what TensorNVMe promises, and what it gets wrong."""

import errno as codes
import gc
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import children
import tensorstow.tensornvme
from compare import all_equal
from tensorstow.base.errors import DirectoryError, ForkError, OptionError, TransferError
from tensorstow.io import files as files_module
from tensorstow.io.engine import choose_backend, probe_backend
from tensorstow.io.scratch import ScratchFiles
from tensorstow.tensornvme import DiskOffloader

BACKENDS = ["uring", "aio", "pthread"]


@pytest.fixture(params=BACKENDS)
def offloader(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DiskOffloader]:
    with DiskOffloader(str(tmp_path), n_entries=4, backend=request.param) as made:
        yield made


@pytest.fixture
def one(tmp_path: Path) -> Iterator[DiskOffloader]:
    with DiskOffloader(tmp_path) as made:
        yield made


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def emptied(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def scratch_of(offloader: DiskOffloader) -> ScratchFiles:
    return offloader._table._scratch


def inject(offloader: DiskOffloader, operation: str, **fault: int) -> None:
    scratch_of(offloader).files[0].engine.inject_fault(operation, **fault)


def test_the_exported_names() -> None:
    assert tensorstow.tensornvme.__all__ == ["AsyncFileWriter", "DiskOffloader"]


def test_the_readmes_synchronous_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x, y = torch.rand(2, 2), torch.rand(4, 4, 4)
    x_copy, y_copy = x.clone(), y.clone()
    offloader = DiskOffloader("./offload")
    offloader.sync_write(x)
    assert bytes_of(x) == 0
    offloader.sync_read(x)
    assert torch.equal(x, x_copy)
    offloader.sync_writev([x, y])
    assert bytes_of(x) == bytes_of(y) == 0
    with pytest.raises(RuntimeError, match="in the order"):
        offloader.sync_readv([y, x])
    offloader.sync_readv([x, y])
    assert torch.equal(x, x_copy)
    assert torch.equal(y, y_copy)
    assert list(tmp_path.iterdir()) == [tmp_path / "offload"]
    assert list((tmp_path / "offload").iterdir()) == []


def test_the_readmes_asynchronous_calls(offloader: DiskOffloader) -> None:
    x, y = torch.rand(2, 2), torch.rand(4, 4, 4)
    x_copy, y_copy = x.clone(), y.clone()
    offloader.async_write(x)
    offloader.sync_write_events()
    assert bytes_of(x) == 0
    offloader.async_read(x)
    offloader.sync_read_events()
    assert torch.equal(x, x_copy)
    offloader.async_writev([x, y])
    offloader.synchronize()
    assert bytes_of(x) == bytes_of(y) == 0
    offloader.async_readv([x, y])
    offloader.synchronize()
    assert torch.equal(x, x_copy)
    assert torch.equal(y, y_copy)


def test_the_readmes_overlap_of_computing_and_moving(offloader: DiskOffloader) -> None:
    tensors = [torch.rand(2, 2) for _ in range(10)]
    wanted = [tensor * 2 for tensor in tensors]
    for tensor in tensors:
        offloader.sync_write(tensor)
    offloader.sync_read(tensors[0])
    for i, tensor in enumerate(tensors):
        offloader.sync_read_events()
        if i + 1 < len(tensors):
            offloader.async_read(tensors[i + 1])
        tensor.mul_(2.0)
        offloader.sync_write_events()
        offloader.async_write(tensor)
    offloader.synchronize()
    assert [bytes_of(t) for t in tensors] == [0] * 10
    for tensor, want in zip(tensors, wanted, strict=True):
        offloader.sync_read(tensor)
        assert torch.equal(tensor, want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8, torch.complex64])
@pytest.mark.parametrize("shape", [(0,), (), (1,), (3, 0), (7, 5), (1 << 20, 3)])
def test_any_tensor_comes_back_to_the_bit(
    one: DiskOffloader, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    nbytes = torch.empty(shape, dtype=dtype).nbytes
    raw = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    tensor = torch.empty(shape, dtype=dtype)
    if nbytes:
        tensor.view(-1).copy_(raw.view(dtype))
    before = tensor.clone()
    one.sync_write(tensor)
    assert bytes_of(tensor) == 0
    one.sync_read(tensor)
    assert tensor.shape == shape
    assert bytes(tensor.reshape(-1).view(torch.uint8).numpy()) == bytes(
        before.reshape(-1).view(torch.uint8).numpy()
    )


def test_reads_are_really_waited_for(offloader: DiskOffloader) -> None:
    # TensorNVMe waits for writes in sync_read_events and hands out half-read tensors.
    x = torch.rand(1 << 20)
    before = x.clone()
    offloader.sync_write(x)
    inject(offloader, "read", times=4, delay_us=20_000)
    offloader.async_read(x)
    offloader.sync_read_events()
    assert torch.equal(x, before)


def test_one_kind_is_waited_for_without_the_other(tmp_path: Path) -> None:
    x, y = torch.rand(1000), torch.rand(1000)
    # An injected delay holds up the one thread of a ring, so this takes the other backend.
    with DiskOffloader(tmp_path, backend="pthread") as offloader:
        offloader.sync_write(x)
        inject(offloader, "write", delay_us=200_000)
        offloader.async_write(y)
        offloader.async_read(x)
        offloader.sync_read_events()
        assert bytes_of(y) > 0
        offloader.sync_write_events()
        assert bytes_of(y) == 0
        offloader.sync_read(y)


def test_callbacks_run_on_the_thread_that_waits_once_the_effect_is_there(
    offloader: DiskOffloader,
) -> None:
    x = torch.rand(100)
    seen: list[int] = []
    offloader.async_write(x, lambda: seen.append(bytes_of(x)))
    offloader.sync_write_events()
    assert seen == [0]
    offloader.async_read(x, callback=lambda: seen.append(bytes_of(x)))
    offloader.sync_read_events()
    assert seen == [0, 400]


def test_a_callback_may_use_the_offloader(one: DiskOffloader) -> None:
    x = torch.rand(100)
    before = x.clone()
    one.async_write(x, lambda: one.async_read(x, lambda: one.async_write(x)))
    one.synchronize()
    assert bytes_of(x) == 0
    one.sync_read(x)
    assert torch.equal(x, before)


def test_a_callback_that_raises_does_not_silence_the_others(one: DiskOffloader) -> None:
    x, y = torch.rand(4), torch.rand(4)
    seen: list[str] = []

    def fail() -> None:
        message = "mine"
        raise KeyError(message)

    inject(one, "write", delay_us=50_000)  # else `fail` may be run by the next call already
    one.async_write(x, fail)
    one.async_write(y, lambda: seen.append("y"))
    with pytest.raises(KeyError, match="mine"):
        one.synchronize()
    one.synchronize()
    assert seen == ["y"]


def test_calls_on_one_tensor_take_effect_in_order(offloader: DiskOffloader) -> None:
    x = torch.rand(1 << 19)
    before = x.clone()
    for _ in range(4):
        offloader.async_write(x)
        offloader.async_read(x)
    offloader.async_write(x)
    with pytest.raises(RuntimeError, match="is on disk"):
        offloader.async_write(x)
    offloader.async_read(x)
    with pytest.raises(RuntimeError, match="not written here"):
        offloader.async_read(x)
    assert torch.equal(x, before)


def test_a_view_of_the_whole_stands_for_the_tensor(one: DiskOffloader) -> None:
    parameter = torch.nn.Parameter(torch.rand(8, 4))
    before = parameter.detach().clone()
    one.sync_write(parameter.data)
    assert bytes_of(parameter) == 0
    one.sync_read(parameter.data.view(-1))
    assert torch.equal(parameter, before)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: torch.rand(10)[2:5], "view of 12 bytes at byte 8 of 40"),
        (lambda: torch.rand(10)[:5], "view of 20 bytes at byte 0 of 40"),
        (lambda: torch.rand(4, 4).t(), "contiguous"),
        (lambda: torch.rand(4, device="meta"), "only CPU"),
        (lambda: torch.from_numpy(np.zeros(4)), "cannot free"),
        (lambda: emptied(torch.rand(4)), "has no memory"),
    ],
)
def test_tensors_that_cannot_be_freed_are_refused_by_name(
    one: DiskOffloader, make: Callable[[], torch.Tensor], found: str
) -> None:
    with pytest.raises(RuntimeError, match=found):
        one.sync_write(make())


def test_lists_are_checked(one: DiskOffloader) -> None:
    x, y = torch.rand(2, 2), torch.rand(3)
    with pytest.raises(RuntimeError, match="not written here"):
        one.async_readv([x, y])
    with pytest.raises(RuntimeError, match="same memory twice"):
        one.sync_writev([x, x.view(-1)])
    with pytest.raises(RuntimeError, match="Put it into a list"):
        one.sync_writev(x)
    one.sync_writev([x, y])
    for wrong in ([x], [y], [y, x], [x, y, torch.rand(1)]):
        with pytest.raises(RuntimeError, match="asked to be read"):
            one.sync_readv(wrong)
    with pytest.raises(RuntimeError, match="asked to be read"):
        one.sync_read(x)
    one.sync_readv([x, y])
    one.sync_writev([])


def test_a_tensor_that_changed_its_shape_is_refused(one: DiskOffloader) -> None:
    x = torch.rand(10)
    one.sync_write(x)
    other = torch.empty(0).set_(x.untyped_storage(), 0, (0,), (1,))
    with pytest.raises(RuntimeError, match="but 40 bytes were written"):
        one.sync_read(other)
    one.sync_read(x)


@pytest.mark.parametrize("sync", [True, False])
def test_a_failed_write_leaves_the_tensor_in_memory(
    offloader: DiskOffloader,
    sync: bool,  # noqa: FBT001
) -> None:
    x, seen = torch.rand(1000), []
    before = x.clone()
    inject(offloader, "write", error=codes.ENOSPC)
    if sync:
        with pytest.raises(TransferError, match="ENOSPC"):
            offloader.sync_write(x)
    else:
        offloader.async_write(x, lambda: seen.append(1))
        offloader.sync_read_events()  # not a read: not told here
        with pytest.raises(TransferError, match="ENOSPC"):
            offloader.sync_write_events()
        offloader.synchronize()  # told once
    assert not seen
    assert torch.equal(x, before)
    offloader.sync_write(x)
    offloader.sync_read(x)
    assert torch.equal(x, before)


def test_a_failed_read_leaves_the_tensor_on_disk(offloader: DiskOffloader) -> None:
    x = torch.rand(1000)
    before = x.clone()
    offloader.sync_write(x)
    inject(offloader, "read", error=codes.EIO)
    offloader.async_read(x)
    with pytest.raises(TransferError, match="EIO"):
        offloader.sync_read_events()
    assert bytes_of(x) == 0
    offloader.sync_read(x)
    assert torch.equal(x, before)


def test_every_failure_is_told(one: DiskOffloader) -> None:
    tensors = [torch.rand(10) for _ in range(3)]
    inject(one, "write", times=3, error=codes.EIO)
    for tensor in tensors:
        one.async_write(tensor)
    with pytest.raises(TransferError) as caught:
        one.synchronize()
    assert len(caught.value.__notes__) == 2  # the two others


def test_a_failure_is_told_by_the_next_call_on_that_tensor(one: DiskOffloader) -> None:
    x = torch.rand(1 << 18)
    inject(one, "write", delay_us=200_000, error=codes.EIO)
    one.async_write(x)
    with pytest.raises(TransferError, match="EIO"):
        one.async_read(x)
    assert bytes_of(x) > 0
    one.synchronize()  # told once


def test_a_full_disk_is_told_at_once(one: DiskOffloader, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(1 << 23)
    monkeypatch.setattr(files_module._native, "fallocate", lambda _fd, _length: codes.ENOSPC)
    with pytest.raises(DirectoryError, match="No space left"):
        one.async_write(x)
    assert bytes_of(x) == 4 << 23


def test_room_of_tensors_that_are_gone_is_used_again(one: DiskOffloader) -> None:
    for _ in range(300):
        one.sync_write(torch.rand(1 << 18))
    assert scratch_of(one).nbytes < 200 << 20  # of 300 MiB written


def test_directories_are_striped(tmp_path: Path) -> None:
    with DiskOffloader([tmp_path / "a", str(tmp_path / "b")]) as striped:
        x = torch.rand(3 << 20)
        before = x.clone()
        striped.sync_write(x)
        scratch = scratch_of(striped)
        used = [s - f.nbytes for s, f in zip(scratch._sizes, scratch._free, strict=True)]
        assert used == [6 << 20, 6 << 20]
        striped.sync_read(x)
        assert torch.equal(x, before)


@pytest.mark.soak  # the engine's own test of it is always run
def test_more_than_two_gib(one: DiskOffloader, tmp_path: Path) -> None:
    count = (2 << 30) + 4096 + 2
    if os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize < 2 * count:
        pytest.skip("too little space")
    x = torch.zeros(count // 2, dtype=torch.int16)
    x[:: 1 << 20] = torch.arange(len(x[:: 1 << 20]), dtype=torch.int16)
    x[-1] = 77
    one.sync_write(x)
    assert bytes_of(x) == 0
    one.sync_read(x)
    assert x[-1] == 77
    assert torch.equal(x[:: 1 << 20], torch.arange(len(x[:: 1 << 20]), dtype=torch.int16))


@pytest.mark.parametrize(
    ("given", "served"), [("uring", "uring"), ("aio", "uring"), ("pthread", "threads")]
)
def test_backends_are_served_by_what_fits(
    tmp_path: Path, given: str, served: str, caplog: pytest.LogCaptureFixture
) -> None:
    if probe_backend(served) is not None:
        served = "threads"
    with (
        caplog.at_level(logging.INFO, "tensorstow"),
        DiskOffloader(tmp_path, backend=given) as made,
    ):
        assert made.backend.name == served
        assert ("not aio: Linux AIO is not supported" in str(made.backend)) == (given == "aio")
    assert f"backend {given} is served by {served}" in caplog.text


def test_a_filesystem_without_direct_io_is_served_by_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if choose_backend().name != "uring":
        pytest.skip("there is no other backend here")
    monkeypatch.setattr(files_module, "_go_direct", lambda _fd: False)
    with DiskOffloader(tmp_path) as made:
        assert str(made.backend).startswith("threads; not uring: a directory refuses O_DIRECT")
        x = torch.rand(1000)
        made.sync_write(x)
        made.sync_read(x)


@pytest.mark.parametrize(
    ("directory", "found"),
    [
        ("/dev/shm", "stays in RAM"),
        (__file__, "not a directory"),
        ("/proc/x", "no place for files"),
    ],
)
def test_directories_that_cannot_serve(directory: str, found: str) -> None:
    with pytest.raises(DirectoryError, match=found):
        DiskOffloader(directory)


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="backend='libaio' was requested"):
        DiskOffloader(tmp_path, backend="libaio")
    with pytest.raises(OptionError, match="n_entries=0 was given"):
        DiskOffloader(tmp_path, 0)
    with pytest.raises(OptionError, match="at least one"):
        DiskOffloader([])


def test_closing_gives_up_writes_and_finishes_reads(tmp_path: Path) -> None:
    made = DiskOffloader(tmp_path)
    x, y = torch.rand(1 << 20), torch.rand(1 << 20)
    x_copy, y_copy = x.clone(), y.clone()
    seen: list[str] = []
    made.sync_write(y)
    made.async_write(x, lambda: seen.append("x"))
    made.async_read(y, lambda: seen.append("y"))
    made.close()
    made.close()
    assert torch.equal(x, x_copy)
    assert torch.equal(y, y_copy)
    assert seen == ["y"]
    with pytest.raises(RuntimeError, match="after it was closed"):
        made.sync_write(x)


def test_dropping_logs_what_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = DiskOffloader(tmp_path)
    x, y = torch.rand(10), torch.rand(10)
    made.sync_write(x)
    inject(made, "write", error=codes.EIO)
    made.async_write(y)
    del made
    gc.collect()
    assert "1 tensors were on disk when their DiskOffloader was dropped" in caplog.text
    assert "dropped after a failure" in caplog.text
    assert bytes_of(y) == 40


def test_nothing_keeps_an_offloader_or_a_tensor_alive(tmp_path: Path) -> None:
    made = DiskOffloader(tmp_path)
    x = torch.rand(10)
    made.sync_write(x)
    made.sync_read(x)
    gone = weakref.ref(made), weakref.ref(x)
    del made, x
    assert [ref() for ref in gone] == [None, None]


def test_nothing_is_left_of_a_process_that_dies(tmp_path: Path) -> None:
    script = f"""
import os, torch
from tensorstow.tensornvme import DiskOffloader
offloader = DiskOffloader({str(tmp_path)!r})
offloader.sync_write(torch.rand(1 << 20))
tensor = torch.rand(1 << 20)
offloader.async_write(tensor)
os._exit(9)
"""
    done = children.run("-c", script, check=False)
    assert done.returncode == 9
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told(one: DiskOffloader) -> None:
    x = torch.rand(1 << 20)
    one.async_write(x)
    pid = os.fork()
    if pid == 0:
        try:
            one.synchronize()
        except ForkError:
            one.close()
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    one.synchronize()
    assert bytes_of(x) == 0
    one.sync_read(x)


STEPS = st.tuples(
    st.sampled_from(
        [f"{how}_{what}" for how in ("sync", "async") for what in ("write", "read")]
        + [f"{how}_{what}v" for how in ("sync", "async") for what in ("write", "read")]
        + ["sync_write_events", "sync_read_events", "synchronize"]
    ),
    st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True),
)


@settings(deadline=None, max_examples=60)
@given(program=st.lists(STEPS, max_size=25), stripes=st.sampled_from([1, 2]))
def test_any_program_agrees_with_a_dict(
    tmp_path_factory: pytest.TempPathFactory,
    program: list[tuple[str, list[int]]],
    stripes: int,
) -> None:
    folders = [tmp_path_factory.getbasetemp() / f"stripe{i}" for i in range(stripes)]
    tensors = [torch.rand(n) for n in (1, 1024, 5000, 700_000)]
    copies = [tensor.clone() for tensor in tensors]
    on_disk: dict[int, tuple[int, ...]] = {}  # the model: who was written with whom
    with DiskOffloader(folders, n_entries=3) as offloader:
        for call, picked in program:
            if "events" in call or call == "synchronize":
                getattr(offloader, call)()
                continue
            group = tuple(picked if call.endswith("v") else picked[:1])
            given = [tensors[i] for i in group] if call.endswith("v") else tensors[group[0]]
            if "write" in call:
                legal = not any(i in on_disk for i in group)
            else:
                legal = on_disk.get(group[0]) == group
            if not legal:
                with pytest.raises(RuntimeError):
                    getattr(offloader, call)(given)
                continue
            getattr(offloader, call)(given)
            for i in group:
                if "write" in call:
                    on_disk[i] = group
                else:
                    del on_disk[i]
        offloader.synchronize()
        assert [bytes_of(t) == 0 for t in tensors] == [i in on_disk for i in range(4)]
        for group in set(on_disk.values()):
            offloader.sync_readv([tensors[i] for i in group])
    assert all_equal(tensors, copies)
