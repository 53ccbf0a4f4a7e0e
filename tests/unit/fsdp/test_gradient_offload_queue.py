"""Gradients of later micro-batches come down in pieces, and are added when they are there.

The CPU stands in for the device, over links whose copies are late.
"""

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from interrupts import Interrupt, at_event, by_signal, handler, raise_it
from remote import LateLink, Later
from tensorstow.fsdp import gradient_offload
from tensorstow.fsdp.gradient_offload import D2HQueue, HostSum, PinnedBuffer
from tensorstow.io.device_link import DeviceEvent, Pairs

ELEMENTS = 50
SMALL = 16 * 4
"""Bytes of a piece in these tests: four to a gradient of fp32, and one of them is short."""


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_offload, "PIECE_BYTES", SMALL)
    monkeypatch.setattr(gradient_offload, "PIECE_BUFFERS", 3)


def gradients(count: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # Of sizes that are lost where they are added in another order, or in another dtype.
    scales = [10.0 ** (number % 5) for number in range(count)]
    return [(torch.randn(ELEMENTS, generator=generator) * s).to(dtype) for s in scales]


def summed(given: list[torch.Tensor]) -> torch.Tensor:
    total = given[0]
    for gradient in given[1:]:
        total = total.float() + gradient
    return total


def buffer() -> PinnedBuffer:
    return PinnedBuffer(torch.empty(4 * ELEMENTS, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("seed", range(4))
def test_a_sum_is_what_it_is_without_a_link(dtype: torch.dtype, seed: int) -> None:
    """In the order in which the gradients came, whatever was there before what."""
    queue = D2HQueue(LateLink(seed))
    given = [gradients(4, dtype, number) for number in range(3)]
    totals = [queue.copy(of[0].clone(), buffer()) for of in given]
    for micro_batch in range(1, 4):
        for total, of in zip(totals, given, strict=True):
            total.add(of[micro_batch].clone())
    for total, of in zip(totals, given, strict=True):
        assert total.memory.dtype == torch.float32
        assert torch.equal(total.elements, summed(of))
        plain = HostSum(of[0].clone())
        for gradient in of[1:]:
            plain.add(gradient)
        assert torch.equal(plain.elements, total.elements)


def test_what_is_in_host_memory_is_added_behind_what_is_on_its_way() -> None:
    queue = D2HQueue(LateLink())
    given = gradients(3)
    total = queue.copy(given[0].clone(), buffer())
    total.add(given[1].clone())
    total.add_on_host(given[2])
    assert torch.equal(total.elements, summed(given))


def test_a_factor_and_an_empty_gradient() -> None:
    queue = D2HQueue(LateLink())
    total = queue.copy(torch.ones(2), buffer())
    total.add(torch.ones(2), alpha=0.5)
    empty = queue.copy(torch.ones(0), buffer())
    empty.add(torch.ones(0))
    assert total.elements.tolist() == [1.5, 1.5]
    assert empty.elements.tolist() == []


class IdleLink(LateLink):
    """One whose copies are made when somebody waits for them."""

    def d2h(self, pairs: Pairs, after: Iterable[DeviceEvent]) -> DeviceEvent:
        """Copy so."""
        mark = super().d2h(pairs, after)
        assert isinstance(mark, Later)
        mark.patience = 1 << 30
        return mark


def test_gradients_that_come_wait_for_nothing_and_take_a_few_buffers() -> None:
    link = IdleLink()
    queue = D2HQueue(link)
    totals = [queue.copy(gradient, buffer()) for gradient in gradients(5)]
    for total in totals:
        total.add(torch.ones(ELEMENTS))
        assert not total.query()
    assert link.d2h_stream.done == 0
    assert link.copies_down == len(totals) + 3
    assert queue.pinned_bytes == 0  # of the CPU
    block = queue._block
    assert block is not None
    assert block.nbytes == 3 * SMALL
    for total in totals:
        assert total.elements.dtype == torch.float32
    assert queue._block is block
    assert len(queue._free) == 3


def test_the_device_holds_few_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    one = 4 * ELEMENTS
    monkeypatch.setattr(gradient_offload, "MAX_IN_FLIGHT_BYTES", 2 * one)
    queue = D2HQueue(LateLink())
    total = queue.copy(torch.ones(ELEMENTS), buffer())
    for _ in range(9):
        total.add(torch.ones(ELEMENTS))
        assert queue._held <= 3 * one
    assert total.elements.eq(10).all()
    assert queue._held == 0


def test_the_memory_of_the_first_is_free_when_the_sum_is_wide() -> None:
    queue = D2HQueue(LateLink())
    memory = buffer()
    total = queue.copy(gradients(1)[0], memory)
    total.add(torch.ones(ELEMENTS))
    assert not memory.is_free
    total.synchronize()
    assert memory.is_free


def test_who_asks_for_what_is_down_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of a backward that has raised may come while the next forward asks."""
    queue = D2HQueue(LateLink())
    total = queue.copy(torch.ones(2), buffer())
    total.add(torch.ones(2))
    asked = threading.Barrier(2)

    def query(_: object) -> bool:
        with suppress(threading.BrokenBarrierError):
            asked.wait(0.2)  # for the other thread, which is not to be here
        return False

    with monkeypatch.context() as patch:
        patch.setattr(type(queue._in_flight[0].complete), "query", query)
        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(queue.poll) for _ in range(2)]:
                done.result()
    assert asked.broken
    assert total.elements.tolist() == [2, 2]


def test_two_threads_that_wait_for_one_sum() -> None:
    queue = D2HQueue(LateLink())
    for _ in range(20):
        total = queue.copy(torch.ones(ELEMENTS), buffer())
        total.add(torch.ones(ELEMENTS))
        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(total.synchronize) for _ in range(2)]:
                done.result()
        assert total.elements.eq(2).all()


def test_an_interrupt_has_nothing_added_twice_or_never() -> None:
    given = gradients(3)
    every: list[D2HQueue] = []  # whose ends are not to come inside of another
    with handler(raise_it):
        number, came = 0, True
        while came:
            number += 1
            every.append(queue := D2HQueue(LateLink(number)))
            total = queue.copy(given[0].clone(), buffer())
            for gradient in given[1:]:
                total.add(gradient.clone())
            with suppress(Interrupt):
                came = at_event(number, by_signal, total.synchronize)
            assert torch.equal(total.elements, summed(given))
    assert number > 20
