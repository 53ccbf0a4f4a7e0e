"""Scripts' command lines are read as DeepSpeed reads them."""

from argparse import ArgumentParser, Namespace

import pytest

from tensorstow.deepspeed.initialization import add_config_arguments


def parsed(*words: str) -> Namespace:
    parser = ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    assert add_config_arguments(parser) is parser
    return parser.parse_args(words)


def test_without_words_nothing_is_asked() -> None:
    assert parsed() == Namespace(local_rank=-1, deepspeed=False, deepspeed_config=None)


@pytest.mark.parametrize("name", ["deepspeed", "deepscale"])
def test_both_names_are_taken(name: str) -> None:
    found = parsed("--local_rank", "1", f"--{name}", f"--{name}_config", "ds.json")
    assert found == Namespace(local_rank=1, deepspeed=True, deepspeed_config="ds.json")


def test_the_help_names_the_group() -> None:
    text = add_config_arguments(ArgumentParser()).format_help()
    assert "DeepSpeed:" in text
    assert "--deepspeed_config" in text
