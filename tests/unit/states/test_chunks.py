import torch

from tensorstow.io.arena import Arena
from tensorstow.states.chunks import Chunk, ChunkRing, allocate_resident, place_in_ram
from tensorstow.states.layout import (
    RESIDENT_CAPACITY,
    ChunkPlan,
    ElementRange,
    Family,
    RingPlan,
    Segment,
    cut,
    lay_out,
    slot_bytes,
)
from tensorstow.states.memory import chunk_state_bytes

FAMILY = Family(torch.bfloat16, amsgrad=False)


def test_views_of_parameters_lie_over_the_chunks_memory() -> None:
    sizes = [RESIDENT_CAPACITY - 5, 100, 7]
    chunks, views = place_in_ram(
        FAMILY, lay_out([ElementRange(i, 0, n) for i, n in enumerate(sizes)]), RESIDENT_CAPACITY
    )
    assert len(chunks) == 2
    for parameter, size in enumerate(sizes):
        for stream in views[parameter]:
            assert stream.numel() == size
            stream.fill_(parameter + 1)
    for chunk in chunks:
        for run in chunk.plan.runs:
            for stream in chunk.resident:
                piece = stream[run.position : run.position + run.count]
                assert (piece == run.parameter + 1).all()


def test_nothing_in_ram_is_nothing() -> None:
    assert place_in_ram(FAMILY, [], RESIDENT_CAPACITY) == ([], {})


def test_streams_in_slots_do_not_overlap() -> None:
    plans = list(cut(lay_out([ElementRange(0, 0, 10_000)]), 1056))
    slot = slot_bytes(FAMILY, 1056, with_weights=True)
    ring = ChunkRing(RingPlan(slots=2, slot_bytes=slot))
    chunks = [Chunk(plan, FAMILY) for plan in plans]
    for slot_number in (0, 1):
        for k, stream in enumerate(ring.streams(chunks[0], slot_number)):
            stream.fill_(slot_number * 10 + k)
        ring.parts(chunks[0], slot_number)[-1].fill_(255)
    for slot_number in (0, 1):
        for k, stream in enumerate(ring.streams(chunks[0], slot_number)):
            assert stream.unique().tolist() == [slot_number * 10 + k]


def test_no_part_lies_beyond_the_ring() -> None:
    (plan,) = cut(lay_out([ElementRange(0, 0, 1 << 20)]), 1 << 20)
    chunk = Chunk(plan, FAMILY)
    for with_weights in (False, True):
        slot = slot_bytes(FAMILY, 1 << 20, with_weights=with_weights)
        ring = ChunkRing(RingPlan(slots=1, slot_bytes=slot))
        parts = ring.parts(chunk, 0)
        assert len(parts) == len(FAMILY.specs) + with_weights
        assert all(p.data_ptr() + p.nbytes <= ring.address + slot for p in parts)


def test_a_chunk_counts_states_without_padding() -> None:
    (plan,) = cut(lay_out([ElementRange(0, 0, 5), ElementRange(1, 0, 3)]), 1024)
    assert plan.elements == 64
    assert chunk_state_bytes(FAMILY, plan) == 12 * 8


def test_chunks_that_stay_share_one_mapping() -> None:
    """Each mapping's end takes a huge page: chunks of 4 MiB would take 6 each."""
    family = Family(torch.bfloat16, amsgrad=False)
    chunks = [Chunk(ChunkPlan((Segment(0, 0, 1 << 19, 0),), 1 << 19), family) for _ in range(5)]
    allocate_resident(chunks)
    allocate_resident([])
    streams = [stream for chunk in chunks for stream in chunk.resident]
    assert [s.dtype for s in streams] == [spec.dtype for spec in family.specs] * 5
    begins = [s.data_ptr() for s in streams]
    assert begins == sorted(begins)
    used = sum(s.numel() * s.element_size() for s in streams)
    end = begins[-1] + streams[-1].numel() * streams[-1].element_size()
    assert used < end - begins[0] < used + (2 << 20)
    ends = [s.data_ptr() + s.numel() * s.element_size() for s in streams]
    gaps = {b - e for e, b in zip(ends, begins[1:], strict=False)}
    assert gaps == {4096}
    assert not any(s.any() for s in streams)


def test_memory_is_taken_where_it_is_given() -> None:
    taken: list[int] = []

    def take(nbytes: int) -> Arena:
        taken.append(nbytes)
        return Arena(nbytes, in_children=False)

    runs = [Segment(0, 0, 2048, 0)]
    (chunk,), _ = place_in_ram(FAMILY, runs, RESIDENT_CAPACITY, take)
    assert taken == [4 * 2048] * len(FAMILY.specs)
    taken.clear()
    chunk.resident = ()
    allocate_resident([chunk], take)
    assert len(taken) == 1
    taken.clear()
    ring = ChunkRing(RingPlan(slots=2, slot_bytes=1 << 16), take)
    assert taken == [2 << 16]
    assert ring.streams(chunk, 1)[0].data_ptr() == ring.address + (1 << 16)
    assert ChunkRing(RingPlan(0, 0), take).address == 0
    assert taken == [2 << 16]
