"""The fused kernel on CUDA itself: the reference's bits, and code that rounds each operation."""

from typing import Any

import pytest
import torch

import ptx

if (
    not torch.cuda.is_available()
    or torch.version.hip is not None
    or "cuda" not in str(torch.accelerator.current_accelerator())
):
    pytest.skip("needs CUDA itself", allow_module_level=True)  # once, and not for each case
pytest.importorskip("triton")

from fused_cases import (
    FAMILIES,
    differences,
    make_case,
    updated_by_kernel,
    updated_by_reference,
)
from tensorstow.states.layout import Family
from tensorstow.step import fused_kernel
from tensorstow.step.fused_kernel import FusedRule
from tensorstow.step.update_rule import rule_on, why_not_fused

families = pytest.mark.parametrize("family", FAMILIES, ids=str)


@families
def test_it_is_what_updates_here(family: Family, device: torch.device) -> None:
    assert not why_not_fused(device)
    assert isinstance(rule_on(device, family).rule, FusedRule), rule_on(device, family)


@families
@pytest.mark.parametrize("seed", range(8))
def test_bits_are_the_reference_s(family: Family, seed: int, device: torch.device) -> None:
    sizes = [(1, 31, 33, 1023, 1025, 70_001, 4, 1 << 20)[(seed + n) % 8] for n in range(4)]
    case = make_case(family, sizes, seed)
    assert not list(differences(updated_by_kernel(case, device), updated_by_reference(case)))


@families
def test_the_compiled_code_rounds_each_operation(
    family: Family, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    kernel = fused_kernel.update_chunk

    class Kept:
        def __getitem__(self, grid: tuple[int]) -> Any:  # noqa: ANN401
            return lambda *given, **options: kept.append(kernel[grid](*given, **options))

    monkeypatch.setattr(fused_kernel, "update_chunk", Kept())
    updated_by_kernel(make_case(family, [3000], seed=0), device)
    (compiled,) = kept
    found = ptx.operations(compiled.asm["ptx"])
    assert found["div.rn.f32"] > 0
    assert found["sqrt.rn.f32"] > 0
    assert not ptx.inexact(found)  # `fma` among them
