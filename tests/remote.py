"""DEVICE = CPU: parameters of the CPU that count as an accelerator's, over links that test.

A ``LateLink`` makes every copy as late as it may, and checks the rules of its callers:
sources that live and do not change until the mark behind their copy is over.
"""

import gc
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tensorstow.io import device_link
from tensorstow.io.device_link import DeviceEvent, DeviceLink, Pairs

_TURN = threading.RLock()


@contextmanager
def _turn() -> Iterator[None]:
    """Use a link alone: other threads wait, and no garbage is collected.

    Finalizers of host memory wait for its link. A collection inside a copy would run them in the
    thread that makes this copy, and they would start the next copy before this one is over.
    """
    with _TURN:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


class Later:
    """A mark of work that is done when somebody needs it."""

    def __init__(self, stream: "Stream", position: int, patience: int) -> None:
        self.stream, self.position = stream, position
        self.patience = patience
        """How often ``query`` returns False before the work is over."""

    def query(self) -> bool:
        if self.stream.done < self.position and self.patience > 0:
            self.patience -= 1
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        self.stream.run_to(self.position)


@dataclass
class Stream:
    """Work in order, none of it done before it must be."""

    work: deque[Callable[[], None]] = field(default_factory=deque)
    done: int = 0

    def add(self, work: Callable[[], None]) -> int:
        with _turn():
            self.work.append(work)
            return self.done + len(self.work)

    def run_to(self, position: int) -> None:
        with _turn():
            while self.done < position:
                self.work.popleft()()
                self.done += 1


class LateLink:
    """A link to the CPU whose copies are late; ``seed`` decides how late."""

    def __init__(self, seed: int = 0) -> None:
        self.device = torch.device("cpu")
        self.bytes_down = self.bytes_up = 0
        self.copies_down = self.copies_up = 0
        self.d2h_stream, self.h2d_stream = Stream(), Stream()
        self.unseen: list[Unseen] = []
        self.random = random.Random(seed)  # noqa: S311  # no secret

    def record_event(self) -> DeviceEvent:
        """Mark the caller's stream, whose work is over; it has waited for what it has joined."""
        with _turn():
            return Caller(self, [copy for copy in self.unseen if copy.joined])

    def d2h(self, pairs: Pairs, after: Iterable[DeviceEvent]) -> DeviceEvent:
        with _turn():
            position = self.d2h_stream.done + len(self.d2h_stream.work)
        for to, source in pairs:
            position = self.d2h_stream.add(late_copy(to, source, after=tuple(after)))
            self.bytes_down += to.nbytes
        self.copies_down += 1
        return Later(self.d2h_stream, position, self.random.randrange(3))

    def h2d(self, pairs: Pairs, after: Iterable[DeviceEvent] = ()) -> DeviceEvent:
        with _turn():
            for copy in self.unseen:
                copy.check()
            position = self.h2d_stream.done + len(self.h2d_stream.work)
            for to, source in pairs:
                self.unseen.append(Unseen(Place.of(source), source.clone()))
                position = self.h2d_stream.add(late_copy(to, source, after=tuple(after)))
                self.bytes_up += to.nbytes
            self.copies_up += 1
            return Later(self.h2d_stream, position, self.random.randrange(3))

    def join(self, mark: DeviceEvent) -> None:
        """Let the caller's stream wait, which here is the caller; the host has seen nothing."""
        if isinstance(mark, Caller):  # of another stream of the caller's, whose work is over
            return
        with _turn():
            mark.synchronize()
            for copy in self.unseen:
                copy.joined = True

    def update_stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def second_link(self) -> "LateLink":
        return self

    def synchronize(self) -> None:
        for stream in (self.d2h_stream, self.h2d_stream):
            stream.run_to(stream.done + len(stream.work))


class Caller:
    """A mark on the caller's stream: behind it, what that has joined is over for the host too."""

    def __init__(self, link: LateLink, joined: "list[Unseen]") -> None:
        self.link, self.joined = link, joined

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        with _turn():
            for copy in self.joined:
                if copy in self.link.unseen:
                    copy.check()
                    self.link.unseen.remove(copy)


@dataclass(eq=False)
class Unseen:
    """The source of a copy up which the host does not know to be over."""

    place: "Place"
    before: torch.Tensor
    joined: bool = False
    """The caller's stream waits for it."""

    def check(self) -> None:
        now = self.place.find("source")
        assert same_bits(now, self.before), "a source changed before its copy up was over"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def late_copy(
    to: torch.Tensor, source: torch.Tensor, *, after: tuple[DeviceEvent, ...]
) -> Callable[[], None]:
    """Return the copy; it holds neither the memory it reads nor that which it writes."""
    reads, writes = Place.of(source), Place.of(to)
    before = source.clone()

    def copy() -> None:
        for mark in after:
            mark.synchronize()
        now = reads.find("source")
        assert same_bits(now, before), "a source changed before its copy"
        writes.find("target").copy_(now)

    return copy


@dataclass
class Place:
    """Where a 1-D tensor has its elements, without keeping them alive."""

    storage: StorageWeakRef
    offset: int
    count: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Place":
        storage = StorageWeakRef(tensor.untyped_storage())
        return cls(storage, tensor.storage_offset(), tensor.numel(), tensor.dtype)

    def find(self, what: str) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        assert storage is not None, f"the {what} was freed before its copy"
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, (self.count,), (1,))


def every(_: torch.Tensor) -> bool:
    """Return that any parameter is on the accelerator."""
    return True


def make_remote(
    patch: pytest.MonkeyPatch,
    is_remote: Callable[[torch.Tensor], bool] = every,
    link: Callable[[], DeviceLink] = LateLink,
) -> list[DeviceLink]:
    """Let parameters count as an accelerator's from now on; return the links as they are opened."""
    opened: list[DeviceLink] = []

    def open_link(_: torch.device) -> DeviceLink:
        opened.append(link())
        return opened[-1]

    patch.setattr(device_link, "is_remote", is_remote)
    patch.setattr(device_link, "open_link", open_link)
    return opened
