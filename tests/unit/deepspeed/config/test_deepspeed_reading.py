"""A DeepSpeed configuration becomes Settings, or an error that names the key."""

import json
import logging
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.config.reading import read_settings
from tensorstow.deepspeed.config.settings import Batch, Fp16, Named, OffloadOptimizer, OffloadParam
from tensorstow.deepspeed.config.values import given_keys, say_once, values_of

BATCH: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0}

# As in the documentation of ZeRO-Infinity's keys.
INFINITY: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.999]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": 5e8,
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "pin_memory": True,
            "buffer_count": 4,
        },
        "offload_param": {"device": "cpu", "max_in_cpu": 1e9},
    },
    "aio": {"block_size": 262144, "queue_depth": 8, "thread_count": 2, "single_submit": False},
}


def refusal(configuration: dict[str, Any], world: int = 1) -> str:
    with pytest.raises(OptionError) as caught:
        read_settings({**BATCH, **configuration}, world)
    return str(caught.value)


def test_a_whole_configuration_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(INFINITY))
    settings = read_settings(path, 2)
    assert settings == read_settings(INFINITY, 2)
    assert settings.batch == Batch(8, 2, 2)
    assert settings.bf16
    assert settings.fp16 is None
    assert settings.gradient_clipping == 1.0
    assert settings.optimizer == Named("AdamW", {"lr": 1e-5, "betas": [0.9, 0.999]})
    assert settings.scheduler == Named("WarmupLR", {"warmup_num_steps": 10})
    assert settings.zero.stage == 3
    assert settings.zero.offload_optimizer == OffloadOptimizer("nvme", "/local_nvme")
    assert settings.zero.offload_param == OffloadParam("cpu")
    assert isinstance(settings.zero.offload_param.max_in_cpu, int)
    assert settings.aio.queue_depth == 8
    values = values_of(given_keys(INFINITY), {})
    assert (values["aio.block_size"], values["aio.intra_op_parallelism"]) == (262144, 2)


def test_fp16_is_there_when_enabled() -> None:
    half = {"enabled": True, "loss_scale": 128, "hysteresis": 3}
    assert read_settings({**BATCH, "fp16": half}, 1).fp16 == Fp16(loss_scale=128.0, hysteresis=3)
    assert read_settings({**BATCH, "fp16": {"enabled": False}}, 1).fp16 is None


def test_older_spellings_are_read() -> None:
    old = {
        "bfloat16": {"enabled": True},
        "zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_params": True},
        "aio": {"num_threads": 4},
    }
    settings = read_settings({**BATCH, **old}, 1)
    assert settings.bf16
    assert settings.zero.offload_optimizer.device == "cpu"
    assert settings.zero.offload_param.device == "cpu"
    assert values_of(given_keys(old), {})["aio.intra_op_parallelism"] == 4
    assert read_settings({**BATCH, "zero_optimization": True}, 1).zero.stage == 1


def test_null_is_as_good_as_no_key() -> None:
    nulls = {
        "optimizer": None,
        "steps_per_print": None,
        "zero_optimization": {"stage": 2, "offload_optimizer": None, "offload_param": None},
        "communication_data_type": None,
        "sparse_attention": None,
    }
    assert read_settings({**BATCH, **nulls}, 1) == read_settings(
        {**BATCH, "zero_optimization": {"stage": 2}}, 1
    )
    device = {"stage": 2, "offload_optimizer": {"device": None}}
    zero = read_settings({**BATCH, "zero_optimization": device}, 1).zero
    assert zero.offload_optimizer.device == "none"


def test_printing_may_be_put_off_for_ever() -> None:
    assert read_settings({**BATCH, "steps_per_print": math.inf}, 1).steps_per_print == sys.maxsize


def test_what_has_no_meaning_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tuned = {**BATCH, "zero_optimization": {"reduce_bucket_size": 12345, "overlap_comm": True}}
    watched = {**BATCH, "flops_profiler": {"enabled": True, "profile_step": 2}, "timers": {}}
    with caplog.at_level(logging.WARNING, "tensorstow"):
        read_settings(tuned, 1)
        read_settings(tuned, 1)
        read_settings(watched, 1)
    first, second = (record.getMessage() for record in caplog.records)
    assert "zero_optimization.reduce_bucket_size (" in first
    assert "flops_profiler (" in second
    assert "timers" not in second


def test_older_names_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    say_once.cache_clear()
    old = {**BATCH, "fp32_allreduce": True, "aio": {"thread_count": 3}}
    assert read_settings(old, 1) == read_settings(old, 1)
    said = [m for m in caplog.messages if m.startswith("deprecated")]
    assert said == [
        (
            "deprecated names in the DeepSpeed configuration: fp32_allreduce is"
            " communication_data_type, aio.thread_count is aio.intra_op_parallelism"
        )
    ]


def test_what_asks_for_nothing_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    quiet = {
        "zero_optimization": {"round_robin_gradients": False},
        "flops_profiler": {"enabled": False, "profile_step": 1},
        "amp": {"enabled": False},
    }
    read_settings({**BATCH, **quiet}, 1)
    assert not caplog.records


def test_clipping_that_newer_versions_do_unasked_is_said(caplog: pytest.LogCaptureFixture) -> None:
    say_once.cache_clear()
    assert read_settings({"train_batch_size": 1}, 1).gradient_clipping == 0.0
    assert "gradient_clipping is absent" in caplog.text


def test_a_type_without_parameters_is_enough_and_parameters_without_a_type_are_not() -> None:
    settings = read_settings({**BATCH, "optimizer": {"type": "Lamb"}}, 1)
    assert settings.optimizer == Named("Lamb")
    assert "optimizer.type" in refusal({"optimizer": {"params": {"lr": 1.0}}})


def test_a_world_of_no_ranks_is_refused() -> None:
    with pytest.raises(OptionError, match="world=0"):
        read_settings(BATCH, 0)


def test_a_bucket_may_be_a_fraction_as_trl_computes_it() -> None:
    sizes = {"zero_optimization.stage3_prefetch_bucket_size": 0.9 * 33 * 33}
    nested = {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0.9 * 33 * 33}}
    for given in (sizes, nested):
        assert read_settings({"train_batch_size": 1, **given}, 1).batch.train == 1
