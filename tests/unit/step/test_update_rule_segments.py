"""A chunk's segments are updated as their parameters alone would be."""

from dataclasses import replace

import pytest
from torch import Tensor

from fused_cases import FAMILIES, Case, differences, make_case, updated_by_reference
from tensorstow.formats.quantize import GROUP
from tensorstow.states.layout import Family

SIZES = [70, 1, 64, 33]


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_each_segment_is_its_parameter_s_own_update(family: Family) -> None:
    case = make_case(family, SIZES, seed=5)
    together = updated_by_reference(case)
    for number, segment in enumerate(case.segments):
        begin = segment.position
        end = begin + -(-SIZES[number] // GROUP) * GROUP
        moved = replace(segment, position=0)
        alone = updated_by_reference(Case(family, cut(case.streams, family, begin, end), [moved]))
        want = Case(
            family,
            cut(together.streams, family, begin, end),
            [replace(together.segments[number], position=0)],
        )
        assert not list(differences(alone, want))


def cut(streams: list[Tensor], family: Family, begin: int, end: int) -> list[Tensor]:
    pairs = zip(streams, family.specs, strict=True)
    return [stream[begin // spec.per : end // spec.per] for stream, spec in pairs]
