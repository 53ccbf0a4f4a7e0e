"""Values that are each good and contradict each other are refused."""

from typing import Any

import pytest

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.config.reading import read_settings
from tensorstow.deepspeed.config.settings import Zero
from tensorstow.deepspeed.config.values import say_once

CPU, NVME = {"device": "cpu"}, {"device": "nvme"}


def read(configuration: dict[str, Any], world: int = 4) -> None:
    read_settings({"train_micro_batch_size_per_gpu": 1, **configuration}, world)


@pytest.mark.parametrize(
    ("configuration", "said"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both true"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": NVME}}, "without nvme_path"),
        ({"zero_optimization": {"stage": 3, "offload_param": NVME}}, "offload_param.device"),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, "computed in bf16"),
        ({"zero_optimization": {"stage": 2, "mics_shard_size": 2}}, "which is stage 3"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 3}}, "divisor of 4"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "loss_scale_window=0 was given"),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "min_loss_scale=0.0 was given"),
    ],
)
def test_contradictions_are_refused(configuration: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        read(configuration)


@pytest.mark.parametrize(
    "configuration",
    [
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "none"}}},
        {"zero_optimization": {"stage": 1, "offload_optimizer": {**NVME, "nvme_path": "/x"}}},
        {"zero_optimization": {"stage": 3, "mics_shard_size": 2}},
        {"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 3}},
        {"zero_optimization": {"stage": 3, "mics_shard_size": 4, "zero_hpz_partition_size": 0}},
        {"bf16": {"enabled": True}, "communication_data_type": "bf16"},
        {"communication_data_type": "fp32"},
        {
            "fp16": {
                "enabled": True,
                "loss_scale": 128,
                "loss_scale_window": 0,
                "min_loss_scale": -1,
            }
        },
        {"fp16": {"enabled": False, "loss_scale_window": -1, "min_loss_scale": 0}},
    ],
)
def test_what_goes_together_is_taken(configuration: dict[str, Any]) -> None:
    read(configuration)


@pytest.mark.parametrize(
    ("zero", "said"),
    [
        ({"stage": 2, "offload_param": CPU}, "offload_param has no effect at stage=2"),
        ({"stage": 1, "offload_param": NVME}, "offload_param has no effect at stage=1"),
        ({"stage": 0, "offload_optimizer": CPU}, "offload_optimizer has no effect at stage=0"),
    ],
)
def test_what_is_left_over_of_another_stage_is_said(
    caplog: pytest.LogCaptureFixture, zero: dict[str, Any], said: str
) -> None:
    say_once.cache_clear()
    with caplog.at_level("INFO", logger="tensorstow"):
        settings = read_settings(
            {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}, 4
        )
    assert said in caplog.text
    assert settings.zero == Zero(stage=zero["stage"])
