"""DeepSpeed's file in a Trainer: what it places, and what contradicts or is refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tensorstow
import trainers
from tensorstow.base.errors import OptionError
from tensorstow.integrations.transformers import from_deepspeed

ARGS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "world_size": 1,
    "max_grad_norm": 1.0,
    "learning_rate": 1e-4,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.1,
    "fp16": False,
    "bf16": False,
    "deepspeed": None,
    "fsdp": None,
    "auto_find_batch_size": False,
    "optim": "adamw_torch_fused",
    "optim_args": None,
}
AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
}


def placed(config: object, **given: Any) -> dict[str, Any]:  # noqa: ANN401
    args: Any = SimpleNamespace(**{**ARGS, **given.pop("args", {})})
    return from_deepspeed(config, args, **given)[1]


def with_zero(**zero: Any) -> dict[str, Any]:  # noqa: ANN401
    return {**AUTO, "zero_optimization": {"stage": 2, **zero}}


def test_states_go_where_the_file_says(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    disk = {"device": "nvme", "nvme_path": str(tmp_path / "states")}
    file.write_text(json.dumps(with_zero(offload_optimizer=disk)))
    found = placed(file)
    assert (found["states"], found["durability"], found["lr"]) == ("disk", "none", 1e-4)
    assert "checkpoints" not in found
    net = trainers.model()
    kind, options = from_deepspeed(file, SimpleNamespace(**ARGS))
    with kind()(net, **options) as made:
        assert made.placement_of_states == "disk"
        assert isinstance(made, tensorstow.AdamW)
    durable = placed(file, dir=tmp_path / "run")
    assert (durable["dir"], durable["checkpoints"]) == (tmp_path / "run", "reference")
    assert "durability" not in durable


def test_states_in_memory_and_shares_of_the_device() -> None:
    assert placed(AUTO)["states"] == "host"
    half = placed(with_zero(offload_optimizer={"device": "cpu", "ratio": 0.25}))
    assert (half["states"], half["update_on"]) == ("host", 0.75)


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "lr": (
        {**AUTO, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}},
        r"optimizer\.params\.lr=0\.001, and learning_rate=0\.0001",
    ),
    "batch": ({**AUTO, "train_batch_size": 12}, "train_batch_size=12, and"),
    "clip": ({**AUTO, "gradient_clipping": 0.5}, "gradient_clipping=0.5, and max_grad_norm=1.0"),
    "bf16": ({**AUTO, "bf16": {"enabled": True}}, "bf16.enabled=True, and bf16=False"),
    "scheduler": ({**AUTO, "scheduler": {"type": "WarmupLR"}}, "has a scheduler"),
    "type": ({**AUTO, "optimizer": {"type": "Lion", "params": {}}}, "type='Lion'"),
    "l2": (
        {**AUTO, "optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
        "adam_w_mode=False",
    ),
    "parameters": (
        {**AUTO, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
        'offload_param.device="cpu"',
    ),
    "activations": (
        {**AUTO, "activation_checkpointing": {"cpu_checkpointing": True}},
        "cpu_checkpointing",
    ),
    "tensorboard": ({**AUTO, "tensorboard": {"enabled": True}}, "report_to="),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_what_contradicts_or_is_more_than_a_place_is_refused(name: str) -> None:
    config, message = CONTRADICTIONS[name]
    with pytest.raises(OptionError, match=message):
        placed(config)


def test_a_pair_of_a_dict_is_that_of_the_trainer() -> None:
    betas = {**AUTO, "optimizer": {"type": "AdamW", "params": {"betas": (0.9, 0.999)}}}
    assert placed(betas)["betas"] == (0.9, 0.999)
    other = {**AUTO, "optimizer": {"type": "AdamW", "params": {"betas": (0.8, 0.999)}}}
    with pytest.raises(OptionError, match=r"betas=\[0\.8, 0\.999\], and adam_beta1"):
        placed(other)


def test_several_ranks_that_shard_are_refused() -> None:
    with pytest.raises(OptionError, match="stage=2 on 2 processes"):
        placed(with_zero(), args={"world_size": 2})
