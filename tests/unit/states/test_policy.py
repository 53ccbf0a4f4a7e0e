from pathlib import Path

import pytest

from tensorstow import PipelinePolicy
from tensorstow.base.errors import OptionError
from tensorstow.io.engine import DEPTH
from tensorstow.states.policy import engine_for


def test_defaults_move_four_mebibytes_of_fp32_adam_at_a_time() -> None:
    assert PipelinePolicy().chunk * 4 * 2 == 4 << 20


def test_chunks_that_python_sends_are_larger_unless_their_size_is_given() -> None:
    assert PipelinePolicy().linked_chunk == 1 << 21
    given = PipelinePolicy(chunk_elements=4096)
    assert given.chunk == given.linked_chunk == 4096


@pytest.mark.parametrize("elements", [0, -16, 100])
def test_chunks_are_whole_lanes(elements: int) -> None:
    with pytest.raises(OptionError, match="chunk_elements"):
        PipelinePolicy(chunk_elements=elements)


@pytest.mark.parametrize("name", ["depth", "threads"])
@pytest.mark.parametrize("number", [0, -1, 1.5, "2"])
def test_numbers_are_whole_and_positive(name: str, number: object) -> None:
    with pytest.raises(OptionError, match=name):
        PipelinePolicy(**{name: number})  # type: ignore[arg-type]
    assert getattr(PipelinePolicy(), name) is None


@pytest.mark.parametrize("node", [-1, "all", None, 1.0, True])
def test_a_node_has_a_number(node: object) -> None:
    with pytest.raises(OptionError, match="node="):
        PipelinePolicy(node=node)  # type: ignore[arg-type]


@pytest.mark.parametrize("drives", [0, 1, 3])
def test_each_drive_of_an_engine_adds_to_its_depth(tmp_path: Path, drives: int) -> None:
    directories = [tmp_path] * drives
    assert engine_for(directories, PipelinePolicy()).depth == max(drives, 1) * DEPTH
    assert engine_for(directories, PipelinePolicy(depth=5)).depth == 5


def test_an_unknown_schedule_is_named() -> None:
    with pytest.raises(OptionError, match="pipelined"):
        PipelinePolicy(schedule="fast")  # type: ignore[arg-type]


def test_only_the_naive_schedule_holds_one_chunk_at_a_time() -> None:
    assert PipelinePolicy(schedule="naive").most_slots == 1
    assert PipelinePolicy().most_slots is None
