"""From a model and a JSON to an engine that trains."""

import json
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import tensorstow
import tensorstow.deepspeed as deepspeed
from compare import all_equal
from ranks.driven import Drive, by_hand, initialized
from ranks.pool import Ranks
from ranks.stowed import loss_of, model_of
from tensorstow.base.errors import AbsentAttributeError, OptionError
from tensorstow.deepspeed.config.settings import OffloadOptimizer, OffloadParam, Zero

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}}
Initialize = Callable[..., Any]
CONFIG = {"train_batch_size": 2, "optimizer": ADAMW, "gradient_clipping": 0.0}


@pytest.fixture
def model() -> nn.Module:
    return model_of(torch.float32)


@pytest.fixture
def initialize() -> Iterator[Initialize]:
    """``deepspeed.initialize``, whose engines are closed."""
    engines = []

    def call(**given: Any) -> Any:  # noqa: ANN401
        made = deepspeed.initialize(**given)
        engines.append(made[0])
        return made

    yield call
    for engine in engines:
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_a_configuration_trains_as_stow_by_hand(ranks: "Ranks", tmp_path: Path, world: int) -> None:
    zero = Zero(3, OffloadOptimizer("nvme", str(tmp_path)), OffloadParam("cpu"))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.05,
        "bf16": {"enabled": True},
        "optimizer": ADAMW,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)},
            "offload_param": {"device": "cpu"},
        },
    }
    want = ranks(world).run(by_hand, Drive(zero, accumulation=2, clip=0.05, bf16=True))
    for got, scale, skipped in ranks(world).run(initialized, config, 3):
        assert (scale, skipped) == (1.0, 0)
        assert all_equal(got, want[0])


@pytest.mark.parametrize("world", [1, 2])
def test_a_scale_that_is_too_large_comes_down(ranks: "Ranks", world: int) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 100}
    config = {**CONFIG, "train_batch_size": 2 * world, "fp16": fp16}
    config["zero_optimization"] = {"stage": 2}
    for weights, scale, skipped in ranks(world).run(initialized, config, 24):
        assert 0 < skipped < 24
        assert scale == 2.0 ** (24 - skipped)
        assert weights[0].dtype == torch.float16
        assert all(bool(torch.isfinite(w).all()) for w in weights)


def test_what_says_auto_is_filled_or_refused(model: nn.Module, initialize: Initialize) -> None:
    adamw = {"type": "AdamW", "params": {"lr": "auto"}}
    config = {**CONFIG, "train_batch_size": "auto", "optimizer": adamw}
    config["train_micro_batch_size_per_gpu"] = 2
    with pytest.raises(OptionError, match=r'optimizer.params.lr="auto" was given'):
        initialize(model=model, config=config)
    filled = {"optimizer.params.lr": 0.125}
    engine, *_ = initialize(model=model, config=config, fill=filled)
    assert engine.get_lr() == [0.125]
    assert engine.train_batch_size() == 2


@pytest.mark.parametrize("how", ["file", "config_params", "args"])
def test_where_a_configuration_is_given(
    model: nn.Module, initialize: Initialize, tmp_path: Path, how: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    parser = deepspeed.add_config_arguments(ArgumentParser())
    args = parser.parse_args(["--deepspeed_config", str(file)])
    given = {
        "file": {"config": file},
        "config_params": {"config_params": CONFIG},
        "args": {"args": args},
    }[how]
    engine, optimizer, loader, schedule = initialize(model=model, **given)
    assert engine.optimizer is optimizer
    assert (loader, schedule) == (None, None)
    assert engine.train_batch_size() == engine.train_micro_batch_size_per_gpu() == 2
    assert engine.embedding is engine.module.embedding
    with pytest.raises(OptionError, match="2 configurations were given"):
        initialize(args=args, model=model, config=CONFIG)


def test_data_and_a_schedule(model: nn.Module, initialize: Initialize) -> None:
    data = TensorDataset(torch.arange(6))
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 2}}
    engine, _, loader, made = initialize(
        model=model, training_data=data, config={**CONFIG, "scheduler": schedule}
    )
    assert sorted(int(x) for (batch,) in loader for x in batch) == list(range(6))
    before = engine.get_lr()
    for number in range(2):
        engine.backward(loss_of(engine, 0, number, 0))
        engine.step()
    assert engine.get_lr() > before
    assert made is engine.lr_scheduler
    assert engine.get_global_grad_norm() > 0
    assert engine.was_step_applied()


def test_an_optimizer_and_its_schedule_are_taken_over(
    model: nn.Module, initialize: Initialize
) -> None:
    old = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = StepLR(old, 1, gamma=0.5)
    engine, _, _, taken = initialize(
        model=model, optimizer=old, lr_scheduler=schedule, config={"train_batch_size": 2}
    )
    assert taken is schedule
    for number in range(2):
        engine.backward(loss_of(engine, 0, number, 0))
        engine.step()
    assert engine.get_lr() == [0.025]


def test_functions_make_an_optimizer_and_a_schedule(
    model: nn.Module, initialize: Initialize
) -> None:
    engine, _, _, schedule = initialize(
        model=model,
        optimizer=partial(tensorstow.AdamW, lr=0.5),
        lr_scheduler=partial(StepLR, step_size=1),
        config={"train_batch_size": 2},
    )
    assert isinstance(schedule, StepLR)
    assert engine.get_lr() == [0.5]


def test_a_model_that_was_made_without_memory(initialize: Initialize) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    engine, *_ = initialize(model=model, config=CONFIG)
    assert not any(p.is_meta for p in engine.parameters())
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()


def test_what_cannot_be_is_refused(model: nn.Module) -> None:
    with pytest.raises(OptionError, match=r"places a torch\.nn\.Module"):
        deepspeed.initialize(model=None, config=CONFIG)
    with pytest.raises(OptionError, match="0 configurations"):
        deepspeed.initialize(model=model)
    with pytest.raises(OptionError, match="data-parallel ranks only"):
        deepspeed.initialize(model=model, config=CONFIG, mesh_param=(1, 2))


def test_inference_by_kernels_is_refused_by_name() -> None:
    with pytest.raises(AbsentAttributeError, match=r"init_inference is not in .*stow\(model, None"):
        deepspeed.init_inference(nn.Linear(1, 1))


@pytest.mark.parametrize("states", ["none", "cpu", "nvme"])
def test_parameters_are_on_disk_wherever_states_are(
    model: nn.Module, tmp_path: Path, states: str, initialize: Initialize
) -> None:
    place = str(tmp_path / "made")
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": place}}
    zero["offload_optimizer"] = {"device": states, "nvme_path": place}
    engine, *_ = initialize(model=model, config={**CONFIG, "zero_optimization": zero})
    engine.backward(loss_of(engine, 0, 0, 0))
    engine.step()
    assert engine.was_step_applied()
