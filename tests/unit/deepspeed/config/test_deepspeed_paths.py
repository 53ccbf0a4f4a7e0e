"""What is no key is refused with the names that are near."""

from typing import Any

import pytest

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.config.values import given_keys, is_known, older_names


@pytest.mark.parametrize(
    ("configuration", "path", "near"),
    [
        ({"overlap_comm": True}, "overlap_comm", "zero_optimization.overlap_comm"),
        ({"zero_optimisation": {}}, "zero_optimisation", "zero_optimization"),
        (
            {"zero_optimization": {"offload_optimiser": {"device": "cpu"}}},
            "zero_optimization.offload_optimiser",
            "zero_optimization.offload_optimizer",
        ),
        (
            {"zero_optimization": {"offload_param": {"nvm_path": "/x"}}},
            "zero_optimization.offload_param.nvm_path",
            "zero_optimization.offload_param.nvme_path",
        ),
        ({"aio": {"threads": 1}}, "aio.threads", "aio.num_threads"),
        ({"fp16": {"enable": True}}, "fp16.enable", "fp16.enabled"),
        ({"bfloat16": {"enable": True}}, "bfloat16.enable", "bf16.enabled"),
        ({"device": "cpu"}, "device", "zero_optimization.offload_optimizer.device"),
    ],
)
def test_an_unknown_key_is_refused_with_its_path(
    configuration: dict[str, Any], path: str, near: str
) -> None:
    with pytest.raises(OptionError, match=f"^{path} is not a known key") as caught:
        given_keys(configuration)
    assert near in str(caught.value)


def test_what_is_near_nothing_is_refused_too() -> None:
    with pytest.raises(OptionError, match="Remove it"):
        given_keys({"qqqq": 1})


def test_a_section_is_an_object() -> None:
    with pytest.raises(OptionError, match=r"offload_param='cpu' was given: it is an object"):
        given_keys({"zero_optimization": {"offload_param": "cpu"}})
    with pytest.raises(OptionError, match="cpu_offload='yes' was given: it is true or false"):
        given_keys({"zero_optimization": {"cpu_offload": "yes"}})


def test_an_older_spelling_keeps_its_name_for_errors() -> None:
    (one,) = given_keys({"aio": {"thread_count": 2}})
    assert (one.key.path, one.path, one.value) == (
        "aio.intra_op_parallelism",
        "aio.thread_count",
        2,
    )


@pytest.mark.parametrize(
    ("configuration", "now"),
    [
        ({"aio": {"num_threads": 2}}, "aio.num_threads is aio.intra_op_parallelism"),
        ({"bfloat16": {"enabled": True}}, "bfloat16.enabled is bf16.enabled"),
        ({"fp32_allreduce": True}, "fp32_allreduce is communication_data_type"),
        (
            {"zero_optimization": {"cpu_offload": True}},
            "zero_optimization.cpu_offload is zero_optimization.offload_optimizer.device",
        ),
        ({"zero_optimization": {"stage3_max_live_parameters": 1}}, None),
        ({"zero_optimization": {"max_live_parameters": 1}}, None),
        ({"wandb": {"enabled": True}}, None),
    ],
)
def test_older_names_are_told_from_those_that_are_as_good(
    configuration: dict[str, Any], now: str | None
) -> None:
    assert older_names(given_keys(configuration)) == ([] if now is None else [now])


def test_a_switch_that_is_off_says_nothing() -> None:
    assert given_keys({"zero_optimization": {"cpu_offload": False}}) == []


def test_a_section_of_others_is_one_value() -> None:
    (one,) = given_keys({"comms_logger": {"enabled": True, "anything": 1}})
    assert (one.key.path, one.path) == ("comms_logger.*", "comms_logger")
    (two,) = given_keys({"tensor_parallel": {"tp_overlap_comm": True}})
    assert (two.key.path, two.path) == ("tensor_parallel.*", "tensor_parallel.tp_overlap_comm")


def test_paths_within_free_sections_are_known() -> None:
    assert is_known("optimizer.params.lr")
    assert is_known("zero_optimization.stage")
    assert is_known("wandb.project")
    assert not is_known("optimizer.lr")
    assert not is_known("lr")


def test_aio_is_found_in_zero_optimization_too() -> None:
    (one,) = given_keys({"zero_optimization": {"aio": {"queue_depth": 8}}})
    assert (one.key.path, one.path) == ("aio.queue_depth", "zero_optimization.aio.queue_depth")
