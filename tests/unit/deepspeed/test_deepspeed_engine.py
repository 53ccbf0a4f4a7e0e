"""The engine trains as its parts do by hand, and says what DeepSpeed's says."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tensorstow.deepspeed as deepspeed
from compare import all_equal
from ranks.driven import (
    Drive,
    boundary_by_hand,
    by_hand,
    driven,
    engine_by,
    exported,
    overflowing,
    scaled,
    summed,
    with_boundaries_of_its_own,
    with_norms,
)
from ranks.pool import Ranks
from ranks.stowed import loss_of, model_of
from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.config.settings import OffloadOptimizer, OffloadParam, Zero
from tensorstow.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

ENABLED = {"enabled": True}
ADAMW = {"type": "AdamW", "params": {"lr": 0.1}}
NVME, CPU = OffloadOptimizer("nvme"), OffloadOptimizer("cpu")
DRIVES = [
    *(Drive(Zero(stage=stage, offload_optimizer=CPU), accumulation=2) for stage in (0, 1, 2)),
    Drive(Zero(stage=2, offload_optimizer=CPU), clip=0.05, bf16=True),
    Drive(Zero(3, NVME, OffloadParam("cpu")), accumulation=2, clip=0.05, bf16=True),
    Drive(Zero(3, NVME, OffloadParam("nvme")), bf16=True),
]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("drive", DRIVES, ids=str)
def test_the_engine_has_the_bits_of_its_parts(ranks: "Ranks", drive: Drive, world: int) -> None:
    want = ranks(world).run(by_hand, drive)
    for got in ranks(world).run(driven, drive):
        assert all_equal(got, want[0])


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("boundaries", [False, True])
def test_updates_beside_backward_have_the_bits_and_norms_of_those_in_step(
    ranks: "Ranks", world: int, *, boundaries: bool
) -> None:
    drive = Drive(Zero(3, NVME, OffloadParam("nvme")), accumulation=2, bf16=True)
    want = ranks(world).run(with_norms, replace(drive, overlap="none"), boundaries)
    for got in ranks(world).run(with_norms, replace(drive, overlap="backward"), boundaries):
        assert all_equal(got, want[0])


@pytest.mark.parametrize("world", [1, 2])
def test_a_scale_that_is_a_power_of_two_changes_no_bit(ranks: "Ranks", world: int) -> None:
    drive = Drive(Zero(stage=3), accumulation=2)
    assert all_equal(ranks(world).run(scaled, drive)[0], ranks(world).run(by_hand, drive)[0])


@pytest.mark.parametrize("world", [1, 2])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: "Ranks", world: int) -> None:
    for changed, told, skipped in ranks(world).run(overflowing):
        assert changed == [True, False, True]
        assert told == [False, True, False]
        assert skipped == 1


@pytest.mark.parametrize("world", [1, 2])
def test_boundaries_may_be_said_by_hand(ranks: "Ranks", world: int) -> None:
    for changed in ranks(world).run(boundary_by_hand, Drive(Zero(stage=0))):
        assert changed == [False, False, True]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_ends_where_the_engine_is_told(ranks: "Ranks", stage: int) -> None:
    ranks(2).run(with_boundaries_of_its_own, stage)


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_are_summed_over_ranks_where_that_is_asked(ranks: "Ranks", stage: int) -> None:
    ranks(2).run(summed, stage)


def test_who_owns_the_boundary_does_not_set_it() -> None:
    engine = engine_by(managed_gradient_accumulation=False)
    with pytest.raises(OptionError, match="managed_gradient_accumulation=false"):
        engine.set_gradient_accumulation_boundary(is_boundary=True)
    with pytest.raises(OptionError, match="with ZeRO stage 0"), engine.coalesce_grad_reduction():
        pass
    assert not engine.is_gradient_accumulation_boundary()
    engine.destroy()


def test_steps_and_other_contexts_are_refused_among_backwards_of_one_step(
    engine: deepspeed.DeepSpeedEngine,
) -> None:
    with engine.coalesce_grad_reduction():
        with pytest.raises(OptionError, match="inside no_sync"):
            engine.step()
        with pytest.raises(OptionError, match="one context"), engine.coalesce_grad_reduction():
            pass
    engine.empty_partition_cache()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_whole_weights_go_to_one_file(
    ranks: "Ranks", tmp_path: Path, world: int, stage: int
) -> None:
    want = ranks(world).run(exported, Drive(Zero(stage=stage), bf16=True), str(tmp_path))[0]
    found = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    model = model_of(torch.bfloat16)
    model.load_state_dict(found)
    assert all_equal(model.parameters(), want)


@pytest.fixture
def engine() -> Iterator[deepspeed.DeepSpeedEngine]:
    """Make an engine in this process alone."""
    sections = {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5}
    made = engine_by(micro=2, train_batch_size=4, optimizer=ADAMW, **sections)
    yield made
    made.destroy()


def test_it_says_what_it_was_told(engine: deepspeed.DeepSpeedEngine) -> None:
    assert engine.train_batch_size() == 4
    assert engine.gradient_accumulation_steps() == 2
    assert engine.zero_optimization_stage() == 2
    assert engine.gradient_clipping() == 0.5
    assert engine.get_lr() == [0.1]
    assert engine.get_mom() == [(0.9, 0.999)]
    assert engine.get_batch_info() == (4, 2, 2)
    assert (engine.steps_per_print(), engine.wall_clock_breakdown()) == (10, False)
    assert (engine.zero_optimization(), engine.dynamic_loss_scale()) == (True, False)
    assert engine.dp_world_size == 1
    assert (engine.loss_scale, engine.cur_scale) == (1.0, 1.0)
    assert (engine.bfloat16_enabled(), engine.fp16_enabled()) == (False, False)
    assert (engine.global_rank, engine.local_rank, engine.world_size) == (0, 0, 1)
    assert engine.get_global_grad_norm() is None
    assert not engine.was_step_applied()
    assert engine.device.type == "cpu"
    with pytest.raises(AttributeError):
        _ = engine.nothing_of_the_kind


def test_gradients_are_dropped_by_hand(engine: deepspeed.DeepSpeedEngine) -> None:
    loss = loss_of(engine, 0, 0, 0)
    assert torch.equal(engine.backward(loss), loss / 2)
    engine.zero_grad()
    assert all(p.grad is None for p in engine.parameters())
    engine.backward(loss_of(engine, 0, 0, 0), scale_wrt_gas=False)
    assert not engine.is_gradient_accumulation_boundary()


def test_no_sync_is_refused_where_gradients_are_shared_out(
    engine: deepspeed.DeepSpeedEngine,
) -> None:
    with pytest.raises(OptionError, match="ZeRO stage 2"), engine.no_sync():
        pass


@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_without_reduced_gradients_is_refused(stage: int) -> None:
    engine = engine_by(zero_optimization={"stage": stage})
    with engine.no_sync():
        engine.backward(loss_of(engine, 0, 0, 0))
        with pytest.raises(OptionError, match="inside no_sync"):
            engine.step()
        with pytest.raises(OptionError, match="one context"), engine.no_sync():
            pass
    engine.backward(loss_of(engine, 0, 0, 1))
    engine.step()
    assert engine.global_steps == 1
    engine.destroy()


def test_modes_and_states_are_the_module_s(engine: deepspeed.DeepSpeedEngine) -> None:
    assert not engine.eval().module.training
    assert engine.train().module.training
    saved = {name: values.clone() for name, values in engine.module_state_dict().items()}
    with torch.no_grad():
        for parameter in engine.parameters():
            parameter.zero_()
    engine.load_module_state_dict(saved)
    assert all(torch.equal(saved[n], v) for n, v in engine.module.state_dict().items())


def test_weights_that_are_loaded_before_the_first_step_are_trained_on() -> None:
    still = {"type": "AdamW", "params": {"lr": 0.0}}
    made = engine_by(micro=2, bf16=ENABLED, optimizer=still)
    saved = {name: values + 1.0 for name, values in made.module_state_dict().items()}
    made.module.load_state_dict(saved)
    made.backward(loss_of(made, 0, 0, 0))
    made.step()
    assert all(torch.equal(saved[n], v) for n, v in made.module.state_dict().items())
    made.destroy()


@pytest.fixture
def early(tmp_path: Path) -> Iterator[deepspeed.DeepSpeedEngine]:
    """Make an engine whose updates run beside backward."""
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "offload_optimizer": nvme, "offload_param": nvme}
    made = engine_by(micro=2, optimizer=ADAMW, zero_optimization=zero, gradient_clipping=0.0)
    assert made.optimizer.offload_policy.overlap == "backward"
    yield made
    made.destroy()


def test_what_a_step_beside_backward_cannot_give_is_refused(
    early: deepspeed.DeepSpeedEngine,
) -> None:
    early.backward(loss_of(early, 0, 0, 0))
    with pytest.raises(OptionError, match=r'initialize\(..., overlap="none"\) to read gradients'):
        deepspeed.utils.safe_get_full_grad(next(early.parameters()))
    with pytest.raises(OptionError, match=r"Call step\(\) first"):
        early.zero_grad()
    early.step()
    assert early.was_step_applied()
    early.backward(loss_of(early, 0, 1, 0) * torch.inf)
    with pytest.raises(OptionError, match=r"the step cannot be skipped\. Load the last checkpoint"):
        early.step()


def test_what_a_checkpoint_cannot_keep_is_told(
    engine: deepspeed.DeepSpeedEngine, tmp_path: Path
) -> None:
    assert engine.load_checkpoint(tmp_path) == (None, None)
    with pytest.raises(TypeError, match=r"client_state\['args'\] is a object"):
        engine.save_checkpoint(tmp_path, client_state={"args": object()})


def test_a_clients_state_comes_back_as_it_was(
    engine: deepspeed.DeepSpeedEngine, tmp_path: Path
) -> None:
    client = {"seen": {1, 2}, "raw": b"x", "rng": np.random.RandomState(0).get_state(), "t": (1,)}
    engine.save_checkpoint(tmp_path, client_state=client)
    back = engine.load_checkpoint(tmp_path)[1]
    assert np.array_equal(back["rng"][1], client["rng"][1])
    assert {k: v for k, v in back.items() if k != "rng"} == {"seen": {1, 2}, "raw": b"x", "t": (1,)}


def test_a_part_of_a_checkpoint_is_loaded(
    engine: deepspeed.DeepSpeedEngine, tmp_path: Path
) -> None:
    engine.save_checkpoint(tmp_path, "first")
    saved = {name: values.clone() for name, values in engine.module_state_dict().items()}
    for micro in range(2):
        engine.backward(loss_of(engine, 0, 0, micro))
        engine.step()
    engine.load_checkpoint(tmp_path, load_module_only=True)
    assert engine.global_steps == 1
    assert all(torch.equal(saved[n], v) for n, v in engine.module.state_dict().items())
    engine.load_checkpoint(tmp_path, "first", load_optimizer_states=False)
    assert (engine.global_steps, engine.micro_steps) == (0, 0)


@pytest.mark.parametrize("accumulation", [2, 3])
def test_a_loaded_run_begins_with_a_steps_first_micro_batch(
    tmp_path: Path, accumulation: int
) -> None:
    """Gradients of a step that had begun are in no checkpoint; those here are of other weights."""
    ends = []
    for micro_batches in (2, accumulation, accumulation):
        model, batch = torch.nn.Linear(2, 1), torch.ones(1, 2)
        fast = {"type": "Adam", "params": {"lr": 0.5}}
        engine = engine_by(model, gradient_accumulation_steps=micro_batches, optimizer=fast)
        if not ends:
            for _ in range(3):
                engine.backward(engine(batch).sum())
                engine.step()
            engine.save_checkpoint(tmp_path)
        elif len(ends) == 1:
            engine.backward(engine(-batch).sum() * 99.0)
            engine.step()
        engine.load_checkpoint(tmp_path)
        applied = []
        for number in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(batch).square().sum() * number)
            engine.step()
            applied.append(engine.was_step_applied())
        assert applied == [False] * (len(applied) - 1) + [True]
        ends.append([p.detach().clone() for p in engine.parameters()])
        engine.destroy()
    assert all_equal(ends[1], ends[2])


def test_rates_and_loaders_are_made_by_hand(engine: deepspeed.DeepSpeedEngine) -> None:
    engine.set_lr(0.25)
    assert engine.get_lr() == [0.25]
    engine.collate_fn = sum
    assert list(engine.deepspeed_io(range(4), route="eval")) == [1, 5]
    assert list(engine.deepspeed_io(range(4), 1, "eval", collate_fn=max)) == [0, 1, 2, 3]


def test_states_are_in_host_memory_already(engine: deepspeed.DeepSpeedEngine) -> None:
    weight = engine.module.head.weight.detach().clone()
    engine.offload_states(include=[OffloadStateTypeEnum.optim_states], device="cpu")
    engine.offload_states()
    engine.reload_states()
    assert torch.equal(engine.module.head.weight, weight)
    with pytest.raises(OptionError, match=r"device='nvme'\) was called"):
        engine.offload_states(device=OffloadDeviceEnum.nvme)


@pytest.mark.parametrize("stage", [0, 3])
def test_autocast_is_round_forward(stage: int) -> None:
    config = {"micro": 2, "optimizer": ADAMW, "zero_optimization": {"stage": stage}}
    cast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    trained = []
    for more in (cast, {}):
        made = engine_by(**config, **more)
        tokens = torch.arange(6).reshape(2, 3)
        with torch.autocast("cpu", torch.bfloat16, enabled=not more):
            out = made(tokens)
        assert out.dtype == torch.bfloat16
        made.backward(out.float().square().sum())
        made.step()
        made.optimizer.wait()
        trained.append([p.detach().clone() for p in made.module.parameters()])
        made.destroy()
    assert all_equal(*trained)
    for wrong in (
        cast | {"bf16": {"enabled": True}},
        {"torch_autocast": {**ENABLED, "dtype": "fp16"}},
    ):
        with pytest.raises(OptionError, match="torch_autocast"):
            engine_by(**config, **wrong)
