"""Which rule updates on an accelerator; a step by the fused kernel is a step by any other."""

import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fused_cases import DTYPES, FAMILIES
from models import Vectors
from remote import make_remote
from tensorstow import AdamW, PipelinePolicy
from tensorstow.formats.state_format import StateFormat
from tensorstow.states.layout import Family
from tensorstow.step import device_updater, update_rule
from tensorstow.step.segment_update import SegmentUpdate
from tensorstow.step.update_rule import (
    Choice,
    TorchRule,
    rule_on,
    why_not_fused,
)

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
FAMILY = Family(torch.float32, amsgrad=False)
SIZES = (3000, 10, 500, 1, 5000, 700)
SMALL = PipelinePolicy(chunk_elements=1024)


@pytest.fixture(autouse=True)
def _nothing_is_chosen_yet() -> None:
    rule_on.cache_clear()


@pytest.fixture
def triton() -> Iterator[ModuleType]:
    """Return Triton; its kernels are interpreted here, by numpy."""
    found: ModuleType = pytest.importorskip("triton")
    with np.errstate(all="ignore"):
        yield found


# --- what is lacking ---


def test_other_devices_get_torch_s_operations() -> None:
    for kind in ("cpu", "xpu", "meta"):
        choice = rule_on(torch.device(kind), FAMILY)
        assert isinstance(choice.rule, TorchRule)
        assert choice.why_not_fused == f"the fused kernel is compiled for CUDA, and this is {kind}"


def test_rocm_gets_torch_s_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "ROCm" in why_not_fused(CUDA)


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    choice = rule_on(CUDA, FAMILY)
    assert isinstance(choice.rule, TorchRule)
    assert "pip install triton" in choice.why_not_fused


@pytest.mark.parametrize(
    ("version", "interpret", "want"),
    [
        ("3.5.1", False, "Triton 3.5.1 is older than 3.6"),
        ("3.6.0", True, "TRITON_INTERPRET is set"),
        ("3.6.0", False, ""),
        ("3.10.0", False, ""),
        ("4.0.0+git1234", False, ""),
    ],
)
def test_versions_of_triton(
    version: str,
    interpret: bool,  # noqa: FBT001
    want: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    knobs = SimpleNamespace(runtime=SimpleNamespace(interpret=interpret))
    fake = SimpleNamespace(__version__=version, knobs=knobs)
    monkeypatch.setitem(sys.modules, "triton", fake)
    assert why_not_fused(CUDA).startswith(want)
    assert bool(why_not_fused(CUDA)) == bool(want)


def test_nobody_needs_triton_who_does_not_update_on_cuda() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; import tensorstow, tensorstow.step.update_rule"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the trial ---


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[pytest.mark.soak] * (f.dtype != torch.bfloat16)) for f in FAMILIES],
    ids=str,
)
def test_a_trial_of_the_kernel_agrees(family: Family, triton: ModuleType) -> None:
    assert triton.knobs.runtime.interpret
    from tensorstow.step.fused_kernel import FusedRule  # noqa: PLC0415  # needs Triton

    assert update_rule._agrees(FusedRule(), CPU, family)


class OneBit(TorchRule):
    """Differs from the reference in the lowest bit of one weight."""

    def prepare(self, segments: Any, *given: Any) -> Any:  # noqa: ANN401
        pairs, update = super().prepare(segments, *given)

        def differently(streams: Any) -> None:  # noqa: ANN401
            update(streams)
            segments[-1].weight.view(torch.uint8)[0] ^= 1

        return pairs, differently


class Broken(TorchRule):
    """Has no compiler."""

    def prepare(self, segments: Any, *given: Any) -> Any:  # noqa: ANN401
        del segments, given
        message = "Failed to find C compiler"
        raise RuntimeError(message)


@pytest.mark.parametrize(
    ("rule", "want"),
    [
        (TorchRule, ""),
        (OneBit, "the fused kernel's bits are not the reference's on this device"),
        (
            Broken,
            "the fused kernel failed when it was tried: RuntimeError: Failed to find C compiler",
        ),
    ],
)
def test_a_kernel_that_fails_its_trial_is_not_used(
    rule: type[TorchRule],
    want: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(update_rule, "why_not_fused", lambda _: "")
    kernel = SimpleNamespace(FusedRule=rule)
    monkeypatch.setitem(sys.modules, "tensorstow.step.fused_kernel", kernel)
    with caplog.at_level("INFO", logger="tensorstow"):
        choice = rule_on(CPU, FAMILY)
    assert choice.why_not_fused == want
    assert (type(choice.rule) is rule) == (not want)
    assert want in caplog.text
    assert rule_on(CPU, FAMILY) is choice
    assert len(caplog.records) == 1


# --- steps by the fused kernel, the CPU being the device ---


def train(net: Vectors, optimizer: AdamW, steps: int) -> None:
    """Take steps; in each another parameter has no gradient, and one is written between them."""
    for step in range(steps):
        optimizer.zero_grad()
        for number, part in enumerate(net.parts):
            if number != step:
                part.grad = (part.detach() * 3).sin()
        optimizer.step()
        with torch.no_grad():
            net.parts[2].mul_(1.5)


def make(net: Vectors, **given: Any) -> AdamW:  # noqa: ANN401  # keywords of AdamW
    return AdamW(net.parameters(), lr=0.01, policy=SMALL, **given)


@pytest.fixture
def launches(triton: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the CPU be the device, and the kernel update there; return its launches' segments."""
    del triton
    from tensorstow.step import fused_kernel as kernel  # noqa: PLC0415  # needs Triton

    update, taken = kernel.update, []

    def counted(table: torch.Tensor, segments: int, *given: Any) -> None:  # noqa: ANN401
        taken.append(segments)
        update(table, segments, *given)

    monkeypatch.setattr(kernel, "update", counted)
    monkeypatch.setattr(device_updater, "rule_on", lambda *_: Choice(kernel.FusedRule()))
    return taken


FORMATS = [(dtype, kept, False) for dtype in DTYPES for kept in StateFormat]
WITH_A_MAXIMUM = [
    (torch.float32, StateFormat.FP32, True),
    (torch.bfloat16, StateFormat.SPLIT, True),
    (torch.float16, StateFormat.FP32, True),
]


@pytest.mark.parametrize(("dtype", "state_format", "amsgrad"), FORMATS + WITH_A_MAXIMUM)
def test_steps_have_the_bits_of_the_host(
    dtype: torch.dtype,
    state_format: StateFormat,
    amsgrad: bool,  # noqa: FBT001
    launches: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a chunk takes one launch, however many parameters it has."""
    given = {"state_format": state_format, "states": 0.5, "amsgrad": amsgrad}
    want, net = Vectors(SIZES, dtype), Vectors(SIZES, dtype)
    reference = make(want, **given)
    train(want, reference, 4)
    assert not launches
    make_remote(monkeypatch)
    optimizer = make(net, update_on="device", **given)
    train(net, optimizer, 4)
    assert all(map(torch.equal, net.parameters(), want.parameters()))
    ours, theirs = optimizer.state_dict()["state"], reference.state_dict()["state"]
    assert all(
        torch.equal(value, theirs[key][name])
        for key, entry in ours.items()
        for name, value in entry.items()
    )
    assert len(launches) == optimizer._traffic().chunks_updated
    assert max(launches) > 1


def test_tables_are_in_the_slots_and_in_what_goes_up(
    launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_remote(monkeypatch)
    net = Vectors(SIZES)
    optimizer = make(net, update_on="device", states="disk")
    from tensorstow.step import fused_kernel as kernel  # noqa: PLC0415  # needs Triton

    chunks = optimizer._states().chunks
    tables = [kernel.table_bytes(len(chunk.plan.runs)) for chunk in chunks]
    states = max(c.family.state_bytes(c.plan.elements) for c in chunks)
    held = optimizer._memory().device_bytes
    assert held == device_updater.MOST_DEVICE_SLOTS * (states + max(tables))
    for part in net.parts:
        part.grad = torch.ones_like(part)
    before = optimizer._traffic().bytes_up
    optimizer.step()
    moved = sum(c.family.state_bytes(c.plan.elements) for c in chunks)
    assert optimizer._traffic().bytes_up - before == moved + sum(tables)
    assert sorted(launches) == sorted(len(chunk.plan.runs) for chunk in chunks)


def test_parameters_without_elements_take_no_launch(launches: list[int]) -> None:
    scalars = update_rule._Trial(FAMILY, CPU).segments[0].scalars
    empty = torch.empty(0)
    segment = SegmentUpdate(empty, empty, 0, 0, scalars, key=0, seed_master=False)
    rule = device_updater.rule_on(CPU, FAMILY).rule
    table = torch.empty(rule.table_bytes(1), dtype=torch.uint8)
    _, update = rule.prepare([segment], FAMILY, table, table.clone())
    update([torch.empty(0), torch.empty(0)])
    assert launches == []
