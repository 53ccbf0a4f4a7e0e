"""Values are checked by their keys; "auto" is filled or refused; no key is two."""

from typing import Any

import pytest

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.config.values import given_keys, say_once, values_of


def values(configuration: dict[str, Any], **fill: object) -> dict[str, Any]:
    paths = {name.replace("__", "."): value for name, value in fill.items()}
    return values_of(given_keys(configuration), paths)


def refusal(configuration: dict[str, Any], **fill: object) -> str:
    with pytest.raises(OptionError) as caught:
        values(configuration, **fill)
    return str(caught.value)


@pytest.mark.parametrize(
    ("configuration", "said"),
    [
        ({"train_batch_size": 1.5}, "train_batch_size=1.5 was given: it is a whole number"),
        ({"gradient_clipping": -1.0}, "gradient_clipping=-1.0 was given: it is a number, at le"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage=4 was given"),
        ({"zero_optimization": {"stage": "2"}}, "a whole number, from 0 to 3"),
        ({"bf16": {"enabled": 2}}, "bf16.enabled=2 was given: it is true or false"),
        ({"bf16": {"enabled": 1.0}}, "bf16.enabled=1.0 was given: it is true or false"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "gpu"}}},
            'offload_optimizer.device=\'gpu\' was given: it is one of "none", "cpu", "nvme"',
        ),
        ({"zero_optimization": {"reduce_bucket_size": 1.5}}, "reduce_bucket_size=1.5"),
        ({"aio": {"thread_count": 0}}, "aio.thread_count=0 was given"),
    ],
)
def test_a_wrong_value_is_refused_with_path_and_range(
    configuration: dict[str, Any], said: str
) -> None:
    assert said in refusal(configuration)


@pytest.mark.parametrize(
    ("configuration", "said"),
    [
        ({"amp": {"enabled": True}}, "bf16"),
        ({"sparse_gradients": True}, "dense embeddings"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, "not rounded"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "updates are exact"),
        ({"curriculum_learning": {"enabled": True}}, "sampler"),
        ({"tensor_parallel": {"autotp_size": 4}}, "takes no DTensors"),
        ({"fp16": {"auto_cast": True}}, "cast inputs"),
    ],
)
def test_what_would_change_training_is_refused_with_what_instead(
    configuration: dict[str, Any], said: str
) -> None:
    message = refusal(configuration)
    assert "which is not supported" in message
    assert said in message


def test_what_is_refused_may_stand_there_switched_off() -> None:
    off = {
        "amp": {"enabled": False, "opt_level": "O1"},
        "sparse_gradients": False,
        "compression_training": {"weight_quantization": {"shared": {"enabled": False}}},
        "tensor_parallel": {"autotp_size": 0},
    }
    values(off)


def test_free_sections_may_say_several_things() -> None:
    values({"tensor_parallel": {"tp_overlap_comm": True, "partition_config": {"a": 1}}})


def test_what_means_nothing_is_read_all_the_same() -> None:
    found = values({"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}})
    assert found["zero_optimization.offload_optimizer.ratio"] == 0.5


def test_auto_is_refused_by_its_path() -> None:
    for configuration, path in [
        ({"train_batch_size": "auto"}, "train_batch_size"),
        ({"fp16": {"enabled": "auto"}}, "fp16.enabled"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "optimizer.params.lr"),
    ]:
        assert refusal(configuration).startswith(f'{path}="auto" was given, and a value is needed')


@pytest.mark.parametrize(
    "configuration",
    [
        {"zero_optimization": {"reduce_bucket_size": "auto"}},
        {"sparse_gradients": "auto"},
        {"amp": "auto"},
    ],
)
def test_auto_is_nothing_where_no_value_is_needed(configuration: dict[str, Any]) -> None:
    assert values(configuration) == values({})


def test_auto_switches_nothing_on() -> None:
    values({"amp": {"enabled": "auto", "opt_level": "auto"}})


@pytest.mark.parametrize(
    "configuration",
    [
        {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4},
        {"train_batch_size": 8, "gradient_accumulation_steps": "auto"},
        {"fp16": {"enabled": "auto", "loss_scale": "auto"}, "bf16": {"enabled": True}},
        {"bf16": {"enabled": "auto"}, "fp16": {"enabled": True}},
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "cpu", "nvme_path": "auto"},
            }
        },
    ],
)
def test_auto_needs_no_filling_where_the_others_say_it(configuration: dict[str, Any]) -> None:
    def said(section: dict[str, Any]) -> dict[str, Any]:
        kept = {n: said(v) if isinstance(v, dict) else v for n, v in section.items()}
        return {name: value for name, value in kept.items() if value != "auto"}

    assert values(configuration) == values(said(configuration))


@pytest.mark.parametrize(
    ("configuration", "path"),
    [
        ({"train_batch_size": "auto", "gradient_accumulation_steps": 2}, "train_batch_size"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": False}}, "fp16.enabled"),
        ({"fp16": {"enabled": True, "loss_scale": "auto"}}, "fp16.loss_scale"),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "auto"}}},
            "zero_optimization.offload_param.nvme_path",
        ),
    ],
)
def test_auto_is_refused_where_they_do_not(configuration: dict[str, Any], path: str) -> None:
    assert refusal(configuration).startswith(f'{path}="auto" was given')


def test_auto_is_filled_by_path() -> None:
    configuration = {
        "train_batch_size": "auto",
        "bfloat16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95]}},
    }
    found = values(
        configuration, train_batch_size=16.0, bf16__enabled=True, optimizer__params__lr=1e-4
    )
    assert found["train_batch_size"] == 16
    assert found["bf16.enabled"] is True
    assert found["optimizer.params"] == {"lr": 1e-4, "betas": [0.9, 0.95]}
    assert configuration["optimizer"]["params"]["lr"] == "auto"


def test_a_filling_replaces_nothing_that_was_written() -> None:
    assert values({"train_batch_size": 4}, train_batch_size=8)["train_batch_size"] == 4


def test_a_filling_is_checked_as_what_is_written() -> None:
    assert "train_batch_size=0 was given" in refusal(
        {"train_batch_size": "auto"}, train_batch_size=0
    )
    assert "'optimizer.lr'" in refusal({}, optimizer__lr=1.0)


def test_two_spellings_of_one_key_agree_or_are_refused() -> None:
    twice = {"intra_op_parallelism": 2, "thread_count": 2}
    assert values({"aio": twice})["aio.intra_op_parallelism"] == 2
    assert "Keep aio.intra_op_parallelism" in refusal({"aio": {**twice, "num_threads": 3}})
    both = {"cpu_offload": True, "offload_optimizer": {"device": "nvme"}}
    assert "are the same key" in refusal({"zero_optimization": both})


def test_keys_that_begin_with_an_underscore_are_comments() -> None:
    inside = {"stage": 2, "_why": "gradients too"}
    given = given_keys({"_comment": ["a run"], "zero_optimization": inside})
    assert [one.path for one in given] == ["zero_optimization.stage"]


def test_a_key_of_the_parameters_beside_them_has_no_effect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    say_once.cache_clear()
    assert values({"optimizer": {"type": "Adam", "torch_adam": True}})["optimizer.params"] is None
    assert "optimizer.torch_adam (it is a key of optimizer.params)" in caplog.text


def test_flags_may_be_0_and_1() -> None:
    found = values({"bf16": {"enabled": 1}, "zero_optimization": {"cpu_offload": 0}})
    assert found["bf16.enabled"] is True
    assert found["zero_optimization.offload_optimizer.device"] == "none"
    given = values({"zero_optimization": {"cpu_offload": 1}})
    assert given["zero_optimization.offload_optimizer.device"] == "cpu"
