"""A table says what becomes of each key that a configuration has."""

import re
from pathlib import Path

import pytest

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
            "no meaning: transfers always overlap with computation",
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
    with pytest.raises(OptionError, match="stages is no key"):
        summary_of({"zero_optimization": {"stages": 2}})
