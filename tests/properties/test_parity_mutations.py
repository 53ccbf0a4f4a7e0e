"""Break each axis on purpose: the parity matrix must see it, or it proves nothing."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from parity import mutations as m
from parity import mutations_beside as b
from parity.anchor import anchor
from parity.axes import AXES, case_of
from parity.candidate import NO_TAPS, run
from parity.cover import Value
from parity.mutations import Mutation
from parity.problem import differences
from tensorstow.base.errors import DamageError

DIV: Mapping[str, Value] = {"optimizer": "HybridAdam-adamw", "scaling": "div_scale"}
BF16: Mapping[str, Value] = {"dtype": "bf16"}
OURS: Mapping[str, Value] = {"clipping": "ours"}
SCALED: Mapping[str, Value] = {"scaling": "GradScaler"}
EVERY_RESUME = tuple({"resume": r} for r in ("model-first", "model-last", "rewind", "torch"))
EVERY_PLACE = tuple({"placement": p, "resume": "model-first"} for p in AXES["placement"])

FORWARD: Mapping[str, Value] = {"overlap": "forward", "nan_until_published": True}
BACKWARD: Mapping[str, Value] = {"overlap": "backward"}
CRASH: Mapping[str, Value] = {"durability": "commit", "resume": "crash"}
COMMIT: Mapping[str, Value] = {"durability": "commit", "resume": "commit"}
KEPT: Mapping[str, Value] = {"share": "some"}

BESIDE = (
    Mutation("overlap", "nobody waits for weights", (FORWARD, {**FORWARD, **BF16}), b.nobody_waits),
    Mutation(
        "overlap",
        "only the root waits for weights",
        (FORWARD, {**FORWARD, "placement": "ram"}),
        b.blocks_wait_for_nothing,
    ),
    Mutation(
        "overlap",
        "a parameter is updated by another's gradient",
        (BACKWARD, {**BACKWARD, "nan_until_published": True}, {**BACKWARD, "ring": "least"}),
        b.another_gradient,
    ),
    Mutation(
        "nan_until_published",
        "a new weight is not published",
        (FORWARD, {**BACKWARD, "nan_until_published": True}),
        b.weights_not_published,
    ),
    Mutation(
        "final",
        "what was accumulated is dropped",
        ({**BACKWARD, "final": "context", "accumulation": 3},),
        b.first_micro_batches_lost,
    ),
    Mutation(
        "format",
        "the low half of a master is lost",
        (BF16, {**BF16, "format": "split", "placement": "ram"}),
        b.low_halves_lost,
    ),
    Mutation(
        "format",
        "a master that is kept whole is rounded",
        ({**BF16, "format": "fp32"},),
        b.masters_rounded_in_fp32,
    ),
    Mutation("ring", "what the ring still holds is stale", ({}, BF16), b.ring_is_stale),
    Mutation(
        "durability",
        "a committed extent is written again",
        (CRASH, {**CRASH, **FORWARD}, {**CRASH, **BACKWARD}),
        b.committed_extent_is_written_again,
        on_disk=True,
    ),
    Mutation(
        "durability",
        "a commit has not got the weights of its step",
        (CRASH, {**CRASH, **FORWARD}),
        b.commit_without_its_weights,
        on_disk=True,
    ),
    Mutation(
        "durability",
        "step counts are not in a commit",
        (CRASH, COMMIT),
        b.step_counts_not_committed,
    ),
    Mutation(
        "durability",
        "hyper-parameters are those of the first commit",
        ({**COMMIT, "lr": "scheduled"},),
        b.groups_not_committed,
    ),
    Mutation(
        "share",
        "what stays is not in a commit",
        ({**CRASH, **KEPT}, {**COMMIT, **KEPT}, {**CRASH, "placement": "ram"}),
        b.what_stays_is_not_committed,
    ),
    Mutation(
        "share", "what stays is not updated", (KEPT, {**KEPT, **BF16}), b.what_stays_is_not_updated
    ),
    Mutation(
        "resume", "weights are not those of the commit", (CRASH, COMMIT),
        b.commit_of_weights_before_the_step,
    ),
)  # fmt: skip

MUTATIONS = (
    *BESIDE,
    Mutation(
        "optimizer",
        "weight decay is L2 and L2 is weight decay",
        ({}, {"optimizer": "Adam"}, {"optimizer": "CPUAdam-adamw"}, {"optimizer": "CPUAdam-l2"}),
        m.in_groups(lambda g: {"decoupled_weight_decay": not g["decoupled_weight_decay"]}),
    ),
    Mutation(
        "optimizer",
        "bias_correction=False is ignored",
        ({"optimizer": "CPUAdam-uncorrected"},),
        m.in_groups(lambda _: {"bias_correction": True}),
    ),
    Mutation("dtype", "masters have 16 bits", (BF16, {"dtype": "fp16"}), m.masters_in_16_bits),
    Mutation(
        "dtype",
        "states are cast to the parameter's dtype on load",
        ({**BF16, "resume": "model-first"}, {**BF16, "resume": "rewind"}),
        m.cast_as_torch_does,
    ),
    Mutation(
        "grad_dtype",
        "grad_dtype= is ignored",
        ({"grad_dtype": "bf16"}, {"grad_dtype": "fp16"}, {**BF16, "grad_dtype": "fp32"}),
        m.grad_dtype_ignored,
    ),
    Mutation(
        "grad_dtype",
        "bf16 bits are read as fp16",
        ({"grad_dtype": "bf16"}, {**BF16, "placement": "ram"}),
        m.halves_confused,
    ),
    Mutation(
        "amsgrad",
        "the maximum is lost on resume",
        tuple({**row, "amsgrad": True} for row in EVERY_RESUME),
        m.lost("max_exp_avg_sq"),
    ),
    Mutation(
        "ema",
        "the decay is another",
        ({"ema": 0.7}, {"ema": 0.7, **BF16}),
        m.in_groups(lambda _: {"ema": 0.6}),
    ),
    Mutation(
        "maximize",
        "the sign is not turned",
        ({"maximize": True}, {"maximize": True, "optimizer": "HybridAdam-adamw"}),
        m.in_groups(lambda _: {"maximize": False}),
    ),
    Mutation(
        "weight_decay",
        "weight decay is dropped",
        ({}, {"optimizer": "Adam"}, {"dtype": "bf16"}),
        m.in_groups(lambda _: {"weight_decay": 0.0}),
    ),
    Mutation(
        "accumulation",
        "only the last micro-batch counts",
        ({"accumulation": 3}, {"accumulation": 3, **OURS}, {"accumulation": 3, **SCALED}),
        m.last_micro_batch_alone,
    ),
    Mutation("clipping", "the factor is ignored", (OURS, {**BF16, **OURS}), m.clip_factor_ignored),
    Mutation(
        "clipping",
        "clipped gradients are not what is used",
        ({"clipping": "torch"},),
        m.gradients_read_before_clipping,
    ),
    Mutation("scaling", "div_scale is ignored", (DIV,), m.in_update(lambda _, __: 1.0)),
    Mutation("scaling", "an infinite gradient is not skipped", (SCALED,), m.without("found_inf")),
    Mutation("scaling", "the scale is not divided out", (SCALED,), m.without("grad_scale")),
    Mutation(
        "lr",
        "the scheduler's value is ignored",
        ({"lr": "scheduled"}, {"lr": "tensor-scheduled"}),
        m.in_groups(lambda g: {"lr": g["initial_lr"]}),
    ),
    Mutation(
        "lr",
        "the learning rate is not restored",
        ({"lr": "scheduled", "resume": "model-first"},),
        m.groups_not_restored,
    ),
    Mutation(
        "placement",
        "a chunk is not written back",
        ({}, {"placement": "split"}, {"schedule": "naive"}),
        m.first_chunk_not_written,
        on_disk=True,
    ),
    Mutation(
        "placement", "a chunk has another's offset", ({},), m.wrong_chunk_offset, on_disk=True
    ),
    Mutation(
        "chunk",
        "a piece is taken for the one before it",
        ({"chunk": 1024}, {"chunk": 4096}),
        m.pieces_shifted,
    ),
    Mutation("ring", "slots overlap", ({}, {"ring": "least"}), m.slots_overlap, on_disk=True),
    Mutation("schedule", "what was read ahead is stale", ({},), m.stale_read_ahead, on_disk=True),
    Mutation(
        "backend",
        "a backend loses a write",
        ({"backend": "uring"}, {"backend": "threads"}),
        m.first_chunk_not_written,
        on_disk=True,
    ),
    Mutation(
        "isa",
        "one scalar is one spacing off",
        tuple({"isa": isa} for isa in AXES["isa"]),
        m.in_scalars(m.off_by_one_spacing),
    ),
    Mutation(
        "threads",
        "a thread misses its last element",
        tuple({"threads": n} for n in AXES["threads"]),
        m.one_element_skipped,
    ),
    Mutation("resume", "step counts are lost", EVERY_RESUME, m.step_counts_lost),
    Mutation("resume", "first moments are lost", EVERY_PLACE, m.lost("exp_avg")),
    Mutation("resume", "second moments are lost", EVERY_PLACE, m.lost("exp_avg_sq")),
    Mutation(
        "resume",
        "masters are lost",
        tuple({**BF16, "resume": r} for r in ("model-first", "model-last", "rewind")),
        m.lost("master"),
    ),
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.axis}: {m.name}")
def test_the_matrix_sees_it(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for row in mutation.rows:
        case = case_of(row)
        assert differences(run(case, tmp_path), anchor(case.recipe)) == []
        with monkeypatch.context() as patch:
            taps = mutation.apply(patch, tmp_path) or NO_TAPS
            if mutation.on_disk:
                with pytest.raises(DamageError, match="checksum"):
                    run(case, tmp_path, taps)
                continue
            got = run(case, tmp_path, taps)
        assert differences(got, anchor(case.recipe)) != [], f"not seen in {case}"


# Slots that overlap spoil each other within a step, where nothing comes before the checksum.
@pytest.mark.parametrize(
    "mutation",
    [m for m in MUTATIONS if m.on_disk and m.axis not in {"ring", "durability"}],
    ids=lambda m: f"{m.axis}: {m.name}",
)
def test_the_results_show_what_checksums_do_not_see(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for row in mutation.rows:
        case = case_of(row)
        with monkeypatch.context() as patch:
            kept = run(case, tmp_path, m.trusting(patch, None))
            got = run(case, tmp_path, m.trusting(patch, mutation.apply(patch, tmp_path)))
        assert differences(kept, anchor(case.recipe)) == []
        assert differences(got, anchor(case.recipe)) != [], f"not seen in {case}"


def test_the_schedule_that_reads_nothing_ahead_is_not_hurt_by_stale_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = case_of({"schedule": "naive"})
    got = run(case, tmp_path, m.stale_read_ahead(monkeypatch, tmp_path))
    assert differences(got, anchor(case.recipe)) == []


def test_every_axis_has_a_mutation() -> None:
    assert {mutation.axis for mutation in MUTATIONS} == set(AXES)
    assert len(MUTATIONS) == 45
