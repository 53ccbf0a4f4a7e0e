"""Engines without an optimizer evaluate, and refuse to train by name."""

import re
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

import tensorstow.deepspeed as deepspeed
from compare import all_equal
from ranks.evaluated import (
    TOKENS,
    error_where_the_disk_is_full,
    errors_of_one_rank,
    logits_of_evaluation,
)
from ranks.pool import Ranks
from ranks.stowed import model_of
from tensorstow.base.errors import BudgetError, OptionError
from tensorstow.io import digest_list

CONFIG = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0}


def config_of(stage: int, device: str = "none", folder: object = None) -> dict[str, object]:
    """Return a configuration without an optimizer."""
    place = {} if folder is None else {"nvme_path": str(folder)}
    zero = {"stage": stage, "offload_param": {"device": device, **place}}
    return {**CONFIG, "zero_optimization": zero}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("stage", "device"), [(0, "none"), (2, "none"), (3, "none"), (3, "cpu"), (3, "nvme")]
)
def test_every_rank_computes_with_the_first_ones_weights(
    ranks: "Ranks", tmp_path: Path, world: int, stage: int, device: str
) -> None:
    config = config_of(stage, device, tmp_path / "made")
    for same, files in ranks(world).run(logits_of_evaluation, config, str(tmp_path)):
        assert same
        assert not [file for file in files if ".safetensors" in file]


def test_the_file_of_an_evaluation_is_not_taken_for_another_programs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest_list, "_warned_unlisted", set())
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=config_of(3, "nvme", tmp_path))
    assert torch.isfinite(engine(torch.ones(1, 2))).all()
    assert "has no list of digests" not in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("device", "what"), [("nvme", "write the model's weights"), ("none", "write to .*")]
)
def test_what_fails_on_one_rank_is_told_on_every_rank(
    ranks: "Ranks", tmp_path: Path, device: str, what: str
) -> None:
    config = config_of(3, device, tmp_path)
    here, there = ranks(2).run(error_where_the_disk_is_full, config, str(tmp_path))
    assert here == "OSError: [Errno 28] No space left on device"
    assert re.match(rf"StowError: Rank 0 could not {what}: OSError\(28", there)
    assert not list(tmp_path.glob("*.safetensors*"))


def test_what_one_rank_cannot_save_is_told_on_every_rank(ranks: "Ranks", tmp_path: Path) -> None:
    (first, written), (second, there) = ranks(2).run(errors_of_one_rank, str(tmp_path))
    assert second.startswith("TypeError: client_state")
    assert first.startswith("StowError: Rank 1 could not begin a checkpoint")
    assert written.startswith("DirectoryError")
    assert there.startswith("StowError: Rank 0 could not write")


def test_training_is_refused_by_name() -> None:
    engine, _, _, scheduler = deepspeed.initialize(
        model=nn.Linear(2, 2), lr_scheduler=lambda _: None, config=config_of(3)
    )
    loss = engine(torch.ones(1, 2)).sum()
    with pytest.raises(OptionError, match=r'backward\(\) was called .* section "optimizer"'):
        engine.backward(loss)
    with pytest.raises(OptionError, match=r"step\(\) was called on an engine without"):
        engine.step()
    assert (engine.optimizer, scheduler, engine.get_lr(), engine.loss_scale) == (None, None, [], 1)
    assert engine.get_global_grad_norm() is None
    assert not engine.was_step_applied()


def test_weights_in_memory_may_be_written_to() -> None:
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=config_of(3))
    with deepspeed.zero.GatheredParameters(list(engine.parameters()), modifier_rank=0) as whole:
        whole[0].data.lerp_(torch.ones(2, 2), 1.0)
    assert engine.module.weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert torch.equal(deepcopy(engine.module).weight, engine.module.weight)


def test_weights_on_disk_are_only_read(tmp_path: Path) -> None:
    engine, *_ = deepspeed.initialize(
        model=model_of(torch.float32), config=config_of(3, "nvme", tmp_path)
    )
    with pytest.raises(OptionError):
        engine.module.head.weight.data.zero_()
    with pytest.raises(OptionError):
        engine.save_checkpoint(tmp_path / "checkpoints")


def test_a_model_is_cast_where_the_configuration_says_so() -> None:
    for section, dtype in ((None, torch.float64), ("bf16", torch.bfloat16), ("fp16", torch.half)):
        config = config_of(0) | ({} if section is None else {section: {"enabled": True}})
        engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2).double(), config=config)
        assert {p.dtype for p in engine.parameters()} == {dtype}
        assert engine(torch.ones(1, 2, dtype=dtype)).dtype == dtype


def test_weights_of_a_checkpoint_are_loaded(tmp_path: Path) -> None:
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    trained, *_ = deepspeed.initialize(model=model_of(torch.float32), config=config_of(2) | adam)
    trained.backward(trained(TOKENS).sum())
    trained.step()
    trained.save_checkpoint(tmp_path, client_state={"epoch": 1})
    engine, *_ = deepspeed.initialize(model=model_of(torch.float32), config=config_of(0))
    _, kept = engine.load_checkpoint(tmp_path)
    assert kept == {"epoch": 1}
    assert all_equal(engine.parameters(), trained.parameters())
    engine.save_checkpoint(tmp_path / "again")
    trained.load_checkpoint(tmp_path / "again", load_module_only=True)
    trained.destroy()


def test_what_has_no_values_or_no_room_is_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(OptionError, match="weight is on the meta device"):
        deepspeed.initialize(model=model, config=config_of(0))
    config = config_of(3, "nvme", tmp_path)
    config["zero_optimization"]["offload_param"]["max_in_cpu"] = 1
    with pytest.raises(BudgetError, match="max_in_cpu=1 was given"):
        deepspeed.initialize(model=model_of(torch.float32), config=config)
    assert not list(tmp_path.iterdir())
