from pathlib import Path

import torch

from tensorstow.io.engine import open_engine
from tensorstow.io.files import scratch_file
from tensorstow.optim.chunks import (
    Chunk,
    Ring,
    chunk_bytes,
    load,
    place_in_ram,
    place_on_disk,
    save,
)
from tensorstow.optim.layout import RESIDENT_CAPACITY, Family, RingPlan, Span, cut, lay_out

FAMILY = Family(torch.bfloat16, amsgrad=False)


def test_views_of_parameters_lie_over_the_chunks_memory() -> None:
    sizes = [RESIDENT_CAPACITY - 5, 100, 7]
    chunks, views = place_in_ram(FAMILY, lay_out([Span(i, 0, n) for i, n in enumerate(sizes)]))
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
    assert place_in_ram(FAMILY, []) == ([], {})


def test_chunks_in_a_file_do_not_overlap_and_come_back(tmp_path: Path) -> None:
    engine = open_engine()
    plans = [(FAMILY, plan) for plan in cut(lay_out([Span(0, 0, 10_000)]), 1040)]
    widths = [chunk_bytes(*plan) for plan in plans]
    files = [scratch_file(engine, tmp_path, sum(widths)) for _ in range(2)]
    chunks = list(place_on_disk(plans, files))
    ring = Ring(RingPlan(slots=2, slot_bytes=3 * 8192, stream_stride=8192))
    for index, chunk in enumerate(chunks):
        streams = ring.streams(chunk, index % 2)
        for k, stream in enumerate(streams):
            stream.fill_(index * 10 + k)
        save(chunk, streams)
    for index, chunk in enumerate(chunks):
        streams = ring.streams(chunk, 1)
        load(chunk, streams)
        assert [s.unique().tolist() for s in streams] == [[index * 10 + k] for k in range(3)]
    for file in files:
        file.close()


def test_a_chunk_counts_states_without_padding() -> None:
    (plan,) = cut(lay_out([Span(0, 0, 5), Span(1, 0, 3)]), 1024)
    assert plan.elements == 32
    assert Chunk(plan, FAMILY).state_bytes == 12 * 8
