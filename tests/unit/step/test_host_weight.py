from collections.abc import Callable

import pytest
import torch
from torch import nn

from remote import LateLink
from tensorstow.io.pinned import PinnedBlock
from tensorstow.step.host_weight import (
    HostWeight,
    host_weight_bytes,
    make_host_weights,
    refresh,
    stamp_of,
    upload,
)
from tensorstow.tensors.dtensor import flat


def parameters() -> list[nn.Parameter]:
    return [
        nn.Parameter(torch.randn(3, 5)),
        nn.Parameter(torch.randn(0, 2)),
        nn.Parameter(torch.randn(100).bfloat16()),
        nn.Parameter(torch.randn(()).half()),
    ]


def host_weights_of(given: list[nn.Parameter], link: LateLink) -> list[HostWeight]:
    return make_host_weights(given, link)[1]


def test_bytes_are_one_copy_aligned() -> None:
    assert host_weight_bytes(parameters()) == 128 + 0 + 256 + 128
    link = LateLink()
    block, host_weights = make_host_weights(parameters(), link)
    assert block.nbytes == 512
    assert [m.host.shape for m in host_weights] == [(3, 5), (0, 2), (100,), ()]
    assert [m.host.dtype for m in host_weights] == [p.dtype for p in parameters()]
    assert all(m.host.data_ptr() % 128 == 0 for m in host_weights if m.host.numel())


def test_those_that_nobody_looks_at_are_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []

    class Watched(PinnedBlock):
        def __init__(self, nbytes: int, device: torch.device, settle: Callable[[], None]) -> None:
            devices.append(device)
            super().__init__(nbytes, torch.device("cpu"), settle)

    monkeypatch.setattr("tensorstow.step.host_weight.PinnedBlock", Watched)
    link = LateLink()
    link.device = torch.device("cuda", 3)
    given = parameters()
    make_host_weights(given, link)
    _, (host_weight, *_) = make_host_weights(given, link, pinned=False)
    assert devices == [torch.device("cuda", 3), torch.device("cpu")]
    assert host_weight.host.shape == given[0].shape


def test_what_others_wrote_is_fetched_and_nothing_else() -> None:
    link, given = LateLink(), parameters()
    host_weights = host_weights_of(given, link)
    refresh(host_weights, link)
    assert all(torch.equal(m.host, p) for m, p in zip(host_weights, given, strict=True))
    first = link.bytes_down
    assert first == 60 + 200 + 2
    refresh(host_weights, link)
    assert link.bytes_down == first
    with torch.no_grad():
        given[2].mul_(2)
    given[3].data = torch.ones((), dtype=torch.float16)
    assert [m.is_stale for m in host_weights] == [False, False, True, True]
    refresh(host_weights, link)
    assert link.bytes_down == first + 200 + 2
    assert all(torch.equal(m.host, p) for m, p in zip(host_weights, given, strict=True))


def test_an_upload_is_no_writing_by_others_and_no_part_of_a_graph() -> None:
    link, given = LateLink(), parameters()
    host_weights = host_weights_of(given, link)
    refresh(host_weights, link)
    before = [stamp_of(p) for p in given]
    for host_weight in host_weights:
        host_weight.host.fill_(3)
    upload(host_weights, link)
    assert all(p.eq(3).all() for p in given)
    assert [stamp_of(p) for p in given] == before
    assert not any(m.is_stale for m in host_weights)
    assert not flat(given[0]).requires_grad
    upload([], link)
