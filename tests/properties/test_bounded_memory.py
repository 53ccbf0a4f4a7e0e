"""A buffer pool does what its serial reference does, whatever is called in which order."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serial_pool import SerialPool
from tensorstow.io.files import IoFuture
from tensorstow.memory.buffer_pool import BufferPool
from tensorstow.memory.moving_bytes import ByteState

PAGE = 4096
SIZES = [PAGE, PAGE, PAGE, 2 * PAGE, 2 * PAGE, 3 * PAGE]
CAPACITY, LEAST = 5 * PAGE, 4 * PAGE
BUFFERS = st.integers(0, len(SIZES) - 1)


class PoolMachine(RuleBasedStateMachine):
    """PoolMachine of one thread; moves that are not legal raise errors in the pool itself."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.pool = BufferPool([self.directory], sum(SIZES), CAPACITY, LEAST)
        self.buffers = [self.pool.add(nbytes) for nbytes in SIZES]
        self.serial = SerialPool(SIZES, CAPACITY, LEAST)
        write = self.pool._files.write

        def write_at_once(*stripes_and_bytes: Any) -> list[IoFuture]:  # noqa: ANN401
            """Write before the pool goes on: what is written may leave, as in the reference."""
            futures = write(*stripes_and_bytes)
            for future in futures:
                future.wait()
            return futures

        self.pool._files.write = write_at_once  # type: ignore[method-assign]

    @rule(buffer=BUFFERS)
    def pin(self, buffer: int) -> None:
        self.buffers[buffer].pin()
        self.serial.pin(buffer)
        assert (self.buffers[buffer].bytes == self.serial.numbers[buffer]).all()

    @precondition(lambda self: any(self.serial.pins))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pinned = [buffer for buffer, pins in enumerate(self.serial.pins) if pins]
        buffer = data.draw(st.sampled_from(pinned))
        self.buffers[buffer].unpin()
        self.serial.unpin(buffer)

    @rule(buffer=BUFFERS, number=st.integers(1, 255))
    def write(self, buffer: int, number: int) -> None:
        self.buffers[buffer].pin(for_write=True)
        self.serial.pin(buffer)
        self.buffers[buffer].bytes.fill_(number)
        self.buffers[buffer].unpin(dirty=True)
        self.serial.unpin(buffer, number)

    @rule(buffer=BUFFERS)
    def keep(self, buffer: int) -> None:
        if self.buffers[buffer].dirty:  # no step begins while others write
            return
        self.buffers[buffer].keep()
        self.serial.keep(buffer)

    @rule(buffer=BUFFERS)
    def confirm(self, buffer: int) -> None:
        self.buffers[buffer].confirm()
        self.serial.confirm(buffer)

    @rule(buffer=BUFFERS)
    def put_back(self, buffer: int) -> None:
        if not self.buffers[buffer].dirty:  # nobody writes to it
            self.buffers[buffer].put_back()
            self.serial.put_back(buffer)

    @rule(buffers=st.lists(BUFFERS, unique=True))
    def expect(self, buffers: list[int]) -> None:
        self.pool.expect([self.buffers[buffer] for buffer in buffers])
        self.serial.expect(buffers)

    @rule(pages=st.integers(0, 12))
    def resize(self, pages: int) -> None:
        self.pool.resize(pages * PAGE)
        self.serial.resize(pages * PAGE)

    @rule()
    def synchronize(self) -> None:
        self.pool.synchronize()
        self.serial.unused.clear()

    @rule(pages=st.integers(0, 12))
    def ask(self, pages: int) -> None:
        pins = zip(SIZES, self.serial.pins, strict=True)
        pinned = sum(nbytes for nbytes, count in pins if count)
        others = (n for n, pins in zip(SIZES, self.serial.pins, strict=True) if not pins)
        fits = pinned + pages * PAGE + max(others, default=0) <= self.serial.capacity
        assert self.buffers[0].can_pin(pages * PAGE) is fits

    @invariant()
    def is_as_the_reference(self) -> None:
        serial, in_memory = self.serial, [n for n, b in enumerate(self.buffers) if b.is_in_memory]
        assert in_memory == sorted(serial.recent)
        assert {n for n in in_memory if self.buffers[n].state is ByteState.READING} == serial.unused
        assert (self.pool.memory.held, self.pool.memory.capacity) == (serial.held, serial.capacity)
        moved = (self.pool.bytes_read, self.pool.bytes_written)
        assert moved == (serial.bytes_read, serial.bytes_written)
        for buffer in serial.recent:
            if serial.pins[buffer]:
                assert (self.buffers[buffer].bytes == serial.numbers[buffer]).all()

    def teardown(self) -> None:
        self.pool.close()
        shutil.rmtree(self.directory)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
