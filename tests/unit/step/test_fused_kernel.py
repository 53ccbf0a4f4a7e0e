"""The fused kernel has the reference's bits, by Triton's interpreter, which is numpy.

And what it is compiled to for CUDA rounds each operation as the reference does.
"""

import itertools
import json
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ptx

pytest.importorskip("triton")  # the `kernel` extra

from fused_cases import (
    DTYPES,
    FAMILIES,
    differences,
    make_case,
    updated_by_kernel,
    updated_by_reference,
)
from tensorstow.formats.quantize import GROUP
from tensorstow.formats.state_format import StateFormat
from tensorstow.states.layout import Family
from tensorstow.step import fused_kernel
from tree import ROOT, TESTS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""conftest.py asks for the interpreter where there is no CUDA."""
ids = pytest.mark.parametrize("family", FAMILIES, ids=str)
BLOCK = fused_kernel.BLOCK


def found(family: Family, sizes: list[int], seed: int) -> list[str]:
    case = make_case(family, sizes, seed)
    return list(differences(updated_by_kernel(case, DEVICE), updated_by_reference(case)))


@ids
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.lists(st.integers(1, 3 * BLOCK // 2), min_size=1, max_size=5),
    seed=st.integers(0, 1 << 32),
)
def test_bits_are_the_reference_s(family: Family, sizes: list[int], seed: int) -> None:
    assert not found(family, sizes, seed)


@ids
def test_ends_of_groups_and_blocks(family: Family) -> None:
    sizes = [BLOCK, 1, GROUP - 1, GROUP, GROUP + 1, BLOCK - 1, BLOCK + 1, 1]
    assert not found(family, sizes, seed=1)


@ids
def test_one_bit_that_differs_is_seen(family: Family) -> None:
    case = make_case(family, [40], seed=3)
    got, want = updated_by_kernel(case, DEVICE), updated_by_reference(case)
    for number, stream in enumerate(got.streams):
        words = stream.view(torch.uint8)
        at = int((~want.streams[number].isnan()).nonzero()[0]) * stream.itemsize
        if family.specs[number].name == "master":
            at = int((~want.segments[0].weight.isnan()).nonzero()[0]) * stream.itemsize
        words[at] ^= 1
        assert list(differences(got, want))
        words[at] ^= 1
    assert not list(differences(got, want))


def test_a_table_tells_where_each_segment_begins() -> None:
    case = make_case(FAMILIES[0], [BLOCK + 1, 5, 3 * BLOCK], seed=0)
    table = torch.zeros(fused_kernel.table_bytes(3), dtype=torch.uint8)
    assert fused_kernel.fill_table(case.segments, table) == 6
    integers = table[: 3 * 8 * len(fused_kernel.COLUMNS)].view(torch.int64).view(3, -1)
    rows = [dict(zip(fused_kernel.COLUMNS, row, strict=True)) for row in integers.tolist()]
    assert [row["first_block"] for row in rows] == [0, 2, 3]
    assert [row["weight"] for row in rows] == [part.weight.data_ptr() for part in case.segments]


# --- what it is compiled to ---

CAPABILITIES = (80, 100)
EACH = [(number, CAPABILITIES[number % 2]) for number in range(len(FAMILIES))]
"""Each family for one generation: every dtype, format and state is compiled for both."""


def compiled(rows: list[tuple[int, int]]) -> dict[str, Counter[str]]:
    """Return the operations of families by generation; another process compiles, as CUDA's.

    Or it reads what it compiled before: Triton names it by the kernel's source and the compiler.
    """
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(ROOT / "build" / "triton"),
        "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)]),
    }
    command = [sys.executable, str(TESTS / "ptx.py"), json.dumps(rows)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {name: Counter(each) for name, each in json.loads(done.stdout).items()}
    assert len(found) == len(rows)
    return found


def check_rounding(found: dict[str, Counter[str]]) -> None:
    """Look for `fma`, approximations, and denormals that are flushed."""
    for name, each in found.items():
        assert each["div.rn.f32"] > 0, name
        assert each["sqrt.rn.f32"] > 0, name
        assert not ptx.inexact(each), name


@pytest.fixture(scope="module")
def operations() -> dict[str, Counter[str]]:
    return compiled(EACH)


@pytest.mark.timeout(600)
def test_cuda_s_code_rounds_each_operation(operations: dict[str, Counter[str]]) -> None:
    """Any family, and old and new generations."""
    check_rounding(operations)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_cuda_s_code_rounds_each_operation_of_any_family_on_any_generation() -> None:
    check_rounding(compiled(list(itertools.product(range(len(FAMILIES)), CAPABILITIES))))


def test_each_value_of_a_family_is_compiled_for_both_generations() -> None:
    for value in ("dtype", "format", "amsgrad", "ema"):
        met = {(getattr(FAMILIES[number], value), capability) for number, capability in EACH}
        assert met == set(itertools.product((getattr(f, value) for f in FAMILIES), CAPABILITIES))


def test_cuda_s_code_has_each_operation_of_the_rule_once(
    operations: dict[str, Counter[str]],
) -> None:
    """A thread's 8 elements: nothing is computed twice, left out, or put in another way."""
    each = operations["torch.float32 fp32 sm_80"]
    per_element = {"mul.rn.f32": 10, "sub.rn.f32": 2, "div.rn.f32": 1, "sqrt.rn.f32": 1}
    for name, count in per_element.items():
        assert each[name] == 8 * count, name
    assert each["add.rn.f32"] == 8 * 5 + 1  # and 1 - beta1, minus 1, once


def test_what_is_inexact_is_named() -> None:
    text = """
        fma.rn.f32 %f1, %f2, %f3, %f4;
        @%p1 div.full.f32 %f1, %f2, %f3;
        sqrt.approx.ftz.f32 %f1, %f2;
        mul.ftz.f32 %f1, %f2, %f3;
        fma.rn.f32x2 %f1, %f2, %f3, %f4;
        add.rn.f32 %f1, %f2, %f3;
    """
    want = ["div.full.f32", "fma.rn.f32", "fma.rn.f32x2", "mul.ftz.f32", "sqrt.approx.ftz.f32"]
    assert ptx.inexact(ptx.operations(text)) == want


def test_every_format_of_the_device_is_there() -> None:
    assert {family.format for family in FAMILIES} == set(StateFormat)
    assert {family.dtype for family in FAMILIES} == set(DTYPES)
