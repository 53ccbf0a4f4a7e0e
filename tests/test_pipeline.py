import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorstow.optim.layout import Family
from tensorstow.optim.pipeline import StepRow, UpdatePipeline
from tensorstow.optim.policy import PipelinePolicy
from tensorstow.optim.reference import AdamState, adam_reference, adam_scalars
from tensorstow.optim.states import Placement, StateStore

FP32 = Family(torch.float32, amsgrad=False)


def scalars_at(step: int) -> tuple[float, ...]:
    return adam_scalars(
        lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, step=step, decoupled=True
    ).as_tuple()


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.integers(0, 9000), min_size=1, max_size=6),
    chunk=st.sampled_from([1024, 1040, 4096]),
    slots=st.integers(2, 5),
    fraction=st.sampled_from([0.4, 1.0]),
    missing=st.sets(st.integers(0, 17)),
    prefetch=st.booleans(),
)
def test_any_ring_gives_the_reference_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    chunk: int,
    slots: int,
    fraction: float,
    missing: set[int],
    prefetch: bool,  # noqa: FBT001
) -> None:
    directory = tmp_path_factory.getbasetemp()
    slot_bytes = 2 * (4 * chunk + 4096 + 3 * 4096)
    policy = PipelinePolicy(chunk_elements=chunk)
    store = StateStore(Placement(fraction, (directory,), slots * slot_bytes), policy)
    store.extend(sizes, [FP32] * len(sizes))
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(n, generator=generator) for n in sizes]
    wanted = [w.clone() for w in weights]
    states = [AdamState(torch.zeros(n), torch.zeros(n)) for n in sizes]
    taken = [0] * len(sizes)
    for step in range(3):
        gradients = [torch.randn(n, generator=generator) for n in sizes]
        rows, table = [], []
        for i, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            if step * 6 + i in missing:
                rows.append(StepRow())
                continue
            taken[i] += 1
            row = StepRow(weight.data_ptr(), gradient.data_ptr(), scalars=len(table))
            rows.append(row)
            table.append(scalars_at(taken[i]))
            scalars = adam_scalars(
                lr=0.1,
                betas=(0.9, 0.99),
                eps=1e-8,
                weight_decay=0.1,
                step=taken[i],
                decoupled=True,
            )
            adam_reference(wanted[i], gradient, states[i], scalars)
        if prefetch:
            store.pipeline.prefetch()
        if table:
            store.pipeline.step(rows, torch.tensor(table).numpy())
    back = store.read(range(len(sizes)))
    for i in range(len(sizes)):
        assert torch.equal(weights[i], wanted[i])
        assert torch.equal(back[i]["exp_avg"], states[i].m)
        assert torch.equal(back[i]["exp_avg_sq"], states[i].v)
    store.close()


def test_trace_has_every_chunk_in_every_lane(tmp_path: Path) -> None:
    store = StateStore(Placement(1.0, (tmp_path,), None), PipelinePolicy(chunk_elements=4096))
    store.extend([20_000], [FP32])
    weight, gradient = torch.randn(20_000), torch.randn(20_000)
    rows = [StepRow(weight.data_ptr(), gradient.data_ptr())]
    table = torch.tensor([scalars_at(1)]).numpy()
    store.pipeline.step(rows, table)
    store.settle()
    store.pipeline.start_trace()
    before = time.monotonic()
    store.pipeline.step(rows, table)
    store.settle()
    events = store.pipeline.trace()
    for lane in ("read", "update", "write"):
        mine = [e for e in events if e.lane == lane]
        assert sorted(e.chunk for e in mine) == list(range(5))
        assert all(before <= e.start <= e.stop <= time.monotonic() for e in mine)
    assert sum(e.nbytes for e in events if e.lane == "read") == store.memory().file_bytes
    assert [e.lane for e in events].count("wait") == 1


def test_a_pipeline_before_connect_has_moved_nothing() -> None:
    pipeline = UpdatePipeline(PipelinePolicy())
    pipeline.settle()
    pipeline.prefetch()
    assert pipeline.traffic().bytes_read == 0
    assert pipeline.trace() == []
