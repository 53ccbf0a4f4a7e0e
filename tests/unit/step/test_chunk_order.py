import pytest
import torch

from tensorstow.states.chunks import Chunk
from tensorstow.states.layout import ChunkPlan, Family, Segment
from tensorstow.step.schedule import by_first, by_last

FP32 = Family(torch.float32, amsgrad=False)


def chunks(*owners: tuple[int, ...]) -> list[Chunk]:
    return [
        Chunk(
            ChunkPlan(tuple(Segment(p, 0, 32, 32 * i) for i, p in enumerate(each)), 64), FP32, (), n
        )
        for n, each in enumerate(owners)
    ]


THREE = ((0, 1), (1, 2), (3,))


@pytest.mark.parametrize(
    ("parameters", "first", "last"),
    [
        ([0, 1, 2, 3], [0, 1, 2], [0, 1, 2]),
        ([3, 2, 1, 0], [2, 1, 0], [2, 1, 0]),
        ([2, 0, 1, 3], [1, 0, 2], [0, 1, 2]),
        ([1, 3], [0, 1, 2], [2, 0, 1]),  # 0 and 2 are not in it: last, by number
        ([], [0, 1, 2], [0, 1, 2]),
    ],
)
def test_orders(parameters: list[int], first: list[int], last: list[int]) -> None:
    assert by_first(chunks(*THREE), parameters) == first
    assert by_last(chunks(*THREE), parameters) == last


def test_every_chunk_is_in_it_once() -> None:
    many = chunks(*((i, i + 1) for i in range(20)))
    for order in (by_first(many, range(20, -1, -3)), by_last(many, range(20, -1, -3))):
        assert sorted(order) == list(range(20))
