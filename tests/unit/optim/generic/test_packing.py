"""Entries are taken apart and put together again, whatever they hold."""

from collections import namedtuple

import pytest
import torch

from tensorstow.base.errors import DTypeError, OptionError
from tensorstow.optim.generic.packing import (
    LARGE_BYTES,
    PackedEntry,
    cloned,
    pack,
    refuse_aliases,
    refuse_unsliced,
    tensors_in,
    unpack,
)

Two = namedtuple("Two", ["a", "b"])  # noqa: PYI024  # what users have
LARGE = LARGE_BYTES // 4


def region_of(packed: PackedEntry) -> torch.Tensor:
    region = torch.zeros(packed.nbytes, dtype=torch.uint8)
    for slot, tensor in packed.tensors:
        slot.view(region).copy_(tensor)
    return region


def test_large_tensors_go_and_the_rest_stays() -> None:
    entry = {
        "step": torch.tensor(3.0),
        "count": 7,
        "small": torch.ones(LARGE - 1),
        "mean": torch.randn(LARGE),
        "nested": [torch.randn(100, 100).double(), {"x": 1}, Two(torch.ones(LARGE), None)],
    }
    packed = pack(entry)
    assert packed.resident.keys() == {"step", "count", "small"}
    assert packed.resident["small"] is entry["small"]
    assert len(packed.slots) == 3
    back = unpack(packed.stowed, region_of(packed))
    assert torch.equal(back["mean"], entry["mean"])
    assert torch.equal(back["nested"][0], entry["nested"][0])
    assert back["nested"][1] == {"x": 1}
    assert isinstance(back["nested"][2], Two)


def test_slots_do_not_overlap_and_are_aligned() -> None:
    packed = pack({str(i): torch.ones(n) for i, n in enumerate((5000, 300_001, 262_144, 4097))})
    ends = 0
    for slot in packed.slots:
        assert slot.offset >= ends
        assert slot.offset % 64 == 0
        ends = slot.offset + slot.nbytes
    assert packed.nbytes % 4096 == 0
    assert 0 <= packed.nbytes - ends < 4096


def test_strides_are_kept() -> None:
    turned = torch.randn(100, 200).t()
    packed = pack({"x": turned})
    back = unpack(packed.stowed, region_of(packed))["x"]
    assert back.stride() == turned.stride()
    assert torch.equal(back, turned)


def test_nothing_large_needs_no_room() -> None:
    assert pack({"step": 1, "x": torch.ones(3)}).nbytes == 0
    assert pack({"x": torch.ones(3)}, least=0).nbytes == 4096


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(1).expand(LARGE), torch.ones(2 * LARGE)[::2], torch.ones(LARGE).to_sparse()],
    ids=["expanded", "strided", "sparse"],
)
def test_what_is_not_one_run_of_bytes_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(DTypeError, match="one run"):
        pack({"x": tensor}, least=0)


def test_shared_memory_is_refused() -> None:
    a, b = torch.ones(4), torch.ones(4)
    refuse_aliases([a], b, "here", "try")
    for tensors, other in (([a, a[:2]], b), ([a], a.view(2, 2))):
        with pytest.raises(OptionError, match=r"copies here would diverge.*or try"):
            refuse_aliases(tensors, other, "here", "try")


def test_a_slices_states_are_numbers_or_as_long_as_it() -> None:
    refuse_unsliced({"step": torch.tensor(1.0), "x": torch.ones(8), "n": 3}, 8)
    for bad in (torch.ones(7), torch.ones(8, 1), [torch.ones(8)]):
        with pytest.raises(OptionError, match="'x'"):
            refuse_unsliced({"x": bad}, 8)


def test_copies_are_deep() -> None:
    entry = {"a": [torch.ones(2), 1]}
    copy = cloned(entry)
    copy["a"][0].zero_()
    assert entry["a"][0].sum() == 2
    assert len(tensors_in(entry)) == 1
