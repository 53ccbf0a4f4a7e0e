"""A table says what becomes of each key that a configuration has."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorstow.deepspeed as deepspeed
from tensorstow import AdamW, stow
from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.config.summary import lines_of, summary_of

GIVEN = {
    "amp": {"enabled": False, "opt_level": "an/option/level/of/more/than/forty/letters"},
    "sparse_gradients": True,
    "zero_optimization": {
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage": 2,
        "max_live_parameters": 1e9,
        "offload_optimizer": None,
    },
    "aio": {"queue_depth": 2},
    "bfloat16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "gradient_clipping": "auto",
}


def test_a_table_of_what_is_written() -> None:
    lines = summary_of(GIVEN).splitlines()
    assert [re.split(r"\s{2,}", line) for line in lines] == [
        ["key", "value", "answer"],
        ["optimizer.type", "AdamW", "honoured"],
        ["optimizer.params", '{"lr": "auto"}', "honoured"],
        ["gradient_clipping", "auto", "honoured, once it is filled in"],
        ["bfloat16.enabled", "true", "honoured, as bf16.enabled"],
        ["zero_optimization.stage", "2", "honoured"],
        ["aio.queue_depth", "2", "honoured"],
        [
            "zero_optimization.reduce_bucket_size",
            "auto",
            "asks for nothing",
        ],
        [
            "zero_optimization.overlap_comm",
            "true",
            "no meaning: FSDP2 overlaps collectives with computation",
        ],
        [
            "zero_optimization.max_live_parameters",
            "1000000000.0",
            "no meaning: units are fetched and let go in their order, not by counts of elements",
        ],
        ["amp", '{"enabled": false, "opt_level": "an/o...', "asks for nothing"],
        ["sparse_gradients", "true", "refused: use dense embeddings (sparse=False)"],
    ]


def test_columns_stand_under_their_heads() -> None:
    head, *rows = summary_of(GIVEN).splitlines()
    for row in rows:
        assert row[head.index("value") - 2 : head.index("value")].isspace()
        assert row[head.index("answer") - 2 : head.index("answer")].isspace()


def test_files_are_read_and_nothing_is_a_heading(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text("{}")
    assert list(lines_of(file)) == []
    assert summary_of(file) == "key  value  answer"


def test_what_is_unknown_is_refused() -> None:
    with pytest.raises(OptionError, match="stages is not a known key"):
        summary_of({"zero_optimization": {"stages": 2}})


# --- what the table says is so ---


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def answer_of(source: dict[str, Any], path: str) -> str:
    return next(line.answer for line in lines_of(source) if line.path == path)


CONFIG = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}


def test_which_optimizers_are_taken() -> None:
    key = "zero_force_ds_cpu_optimizer"
    told = answer_of({**CONFIG, key: True}, key)
    assert told == "no meaning: torch's optimizers are taken"
    for taken in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        trained = model()
        engine, *_ = deepspeed.initialize(
            model=trained,
            optimizer=taken(trained.parameters()),
            config={"train_batch_size": 2, key: True},
        )
        engine.destroy()


def test_when_updates_are_made() -> None:
    zero = {"offload_optimizer": {"device": "cpu", "super_offload": True}}
    path = "zero_optimization.offload_optimizer.super_offload"
    config = {**CONFIG, "zero_optimization": {"stage": 2, **zero}}
    assert answer_of(config, path) == "no meaning: updates run during passes where they can"
    engine, optimizer, *_ = deepspeed.initialize(model=model(), config=config)
    assert optimizer.offload_policy.overlap == "forward"
    before = [p.detach().clone() for p in engine.module.parameters()]
    engine.backward(engine(torch.randn(2, 4)).sum())
    assert all(map(torch.equal, engine.module.parameters(), before))
    engine.step()
    assert not any(map(torch.equal, engine.module.parameters(), before))
    engine.destroy()


def test_models_that_are_cut_already_are_not_advised() -> None:
    told = answer_of(
        {**CONFIG, "tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size"
    )
    assert told.startswith("refused: leave it out")


@pytest.mark.parametrize("key", ["bf16_master_weights_and_grads", "bf16_optimizer_states"])
def test_states_in_fewer_bits_are_got_as_it_says(key: str) -> None:
    told = answer_of({**CONFIG, "bf16": {"enabled": True, key: True}}, f"bf16.{key}")
    assert 'stow() the model by partial(tensorstow.AdamW, state_format="bf16")' in told
    _, optimizer = stow(model().bfloat16(), partial(AdamW, state_format="bf16"))
    assert optimizer.offload_policy.format == "bf16"
    optimizer.close()
    trained = model()
    given = AdamW(trained.parameters(), state_format="bf16")
    with pytest.raises(OptionError, match='state_format="bf16" was given'):
        deepspeed.initialize(model=trained, optimizer=given, config={"train_batch_size": 2})
