"""The kernels against the reference, bit for bit, on every instruction set of this machine."""

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tensorstow import PipelinePolicy, _native
from tensorstow.formats.reference import (
    NORM_BLOCK,
    AdamScalars,
    AdamState,
    adam_reference,
    adam_scalars,
    squared_norm_reference,
)
from tensorstow.states.kernels import team_of

DTypes = tuple[torch.dtype, torch.dtype]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ISAS = _native.supported_isas()
SPECIAL = (
    *(0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 1.1754944e-38, 1.0, -1.0, 3.4028235e38),
    *(math.inf, -math.inf, math.nan, 6e-8, 6.1e-5, 65504.0, 65520.0, 1.00390625, 1.01171875),
)

every_isa = pytest.mark.parametrize("isa", ISAS)
every_param = pytest.mark.parametrize("param_dtype", DTYPES, ids=str)
every_grad = pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@dataclass(frozen=True)
class Problem:
    param: Tensor
    grad: Tensor
    state: AdamState

    def tensors(self) -> tuple[Tensor | None, ...]:
        state = self.state
        return (self.param, self.grad, state.master, state.m, state.v, state.vmax)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Problem":
        new = [None if t is None else change(t) for t in self.tensors()]
        param, grad, master, m, v, vmax = new
        assert param is not None
        assert grad is not None
        assert m is not None
        assert v is not None
        return Problem(param, grad, AdamState(m, v, master, vmax))


@dataclass(frozen=True)
class Mode:
    isa: str | None = None
    seed_master: bool = False
    threads_ok: bool = False


def run_kernel(problem: Problem, scalars: AdamScalars, mode: Mode) -> None:
    param, grad, master, m, v, vmax = (pointer(t) for t in problem.tensors())
    _native.adam_update(
        param,
        grad,
        [m, v, vmax, master, 0, 0, 0],
        problem.param.numel(),
        name_of(problem.param.dtype),
        name_of(problem.grad.dtype),
        "fp32",
        first=0,
        key=0,
        seed_master=mode.seed_master,
        hyper=scalars,
        isa=mode.isa,
        on_pool=mode.threads_ok,
    )


def any_bits(n: int, dtype: torch.dtype, random: torch.Generator) -> Tensor:
    """Return any bit pattern; every fourth element is a special value."""
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    limit = torch.iinfo(integer)
    bits = torch.randint(limit.min, limit.max + 1, (n,), generator=random, dtype=torch.int64)
    values = bits.to(integer).view(dtype)
    chosen = torch.randint(0, len(SPECIAL), (n,), generator=random)
    special = torch.tensor(SPECIAL).to(dtype)[chosen]
    return torch.where(torch.rand(n, generator=random) < 0.25, special, values)


def ordinary(n: int, dtype: torch.dtype, random: torch.Generator) -> Tensor:
    return torch.randn(n, generator=random).to(dtype)


Fill = Callable[[int, torch.dtype, torch.Generator], Tensor]


def make(fill: Fill, n: int, dtypes: DTypes, *, amsgrad: bool, seed: int = 7) -> Problem:
    """Return a problem whose parameter and gradient have the two `dtypes`."""
    random = torch.Generator().manual_seed(seed)
    param, grad = (fill(n, dtype, random) for dtype in dtypes)
    m, v, vmax, master = (fill(n, torch.float32, random) for _ in range(4))
    if fill is ordinary:
        v, vmax = v * v, vmax * vmax
    half = dtypes[0] != torch.float32
    return Problem(
        param, grad, AdamState(m, v, master if half else None, vmax if amsgrad else None)
    )


def assert_same(got: Tensor | None, want: Tensor | None) -> None:
    if got is None or want is None:
        assert got is want
        return
    integer = torch.int32 if got.dtype == torch.float32 else torch.int16
    different = (got.view(integer) != want.view(integer)) & ~(got.isnan() & want.isnan())
    where = different.nonzero().flatten()[:4]
    assert not different.any(), f"at {where.tolist()}: {got[where]} is not {want[where]}"


def check_step(problem: Problem, scalars: AdamScalars, mode: Mode) -> None:
    want = problem.map(Tensor.clone)
    seed_master = mode.seed_master
    adam_reference(want.param, want.grad, want.state, scalars, seed_master=seed_master)
    run_kernel(problem, scalars, mode)
    for ours, theirs in zip(problem.tensors(), want.tensors(), strict=True):
        assert_same(ours, theirs)


def scalars_of(*, decoupled: bool, beta1: float = 0.9, step: int = 3) -> AdamScalars:
    return adam_scalars(
        lr=1e-2,
        betas=(beta1, 0.999),
        eps=1e-8,
        weight_decay=0.1,
        step=step,
        decoupled=decoupled,
        grad_factor=-0.37,
    )


@every_isa
@every_param
@every_grad
@pytest.mark.parametrize("fill", [ordinary, any_bits])
def test_equals_the_reference(
    isa: str, param_dtype: torch.dtype, grad_dtype: torch.dtype, fill: Fill
) -> None:
    flags = itertools.product((False, True), (False, True), (0.0, 0.5, 0.9))
    for amsgrad, decoupled, beta1 in flags:
        problem = make(fill, 10_011, (param_dtype, grad_dtype), amsgrad=amsgrad)
        check_step(problem, scalars_of(decoupled=decoupled, beta1=beta1), Mode(isa))


@every_isa
@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(0, 400),
    offset=st.integers(0, 70),
    seed=st.integers(0, 1000),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    switches=st.tuples(st.booleans(), st.booleans()),
)
def test_equals_the_reference_at_any_length(
    isa: str, n: int, offset: int, seed: int, dtypes: DTypes, switches: tuple[bool, bool]
) -> None:
    amsgrad, seed_master = switches
    whole = make(any_bits, n + offset, dtypes, amsgrad=amsgrad, seed=seed)
    shifted = whole.map(lambda t: t[offset:])
    check_step(shifted, scalars_of(decoupled=False), Mode(isa, seed_master))


@every_param
def test_threads_change_no_bit(param_dtype: torch.dtype) -> None:
    problem = make(ordinary, 100_003, (param_dtype, torch.bfloat16), amsgrad=True)
    check_step(problem, scalars_of(decoupled=True), Mode(threads_ok=True))


def test_seeding_a_master_takes_the_parameter() -> None:
    problem = make(ordinary, 1000, (torch.bfloat16, torch.float32), amsgrad=False)
    before = problem.param.float()
    still = AdamScalars(0.1, 0.9, 0.1, 1.0, 0.0, 0.0, 1.0, 1e-8, 1.0)
    run_kernel(problem, still, Mode(seed_master=True))
    assert_same(problem.state.master, before)


def test_a_flushing_caller_changes_no_bit() -> None:
    got = make(any_bits, 4000, (torch.float32, torch.float32), amsgrad=True)
    want = got.map(Tensor.clone)
    run_kernel(want, scalars_of(decoupled=True), Mode())
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        run_kernel(got, scalars_of(decoupled=True), Mode())
    finally:
        torch.set_flush_denormal(False)
    for ours, theirs in zip(got.tensors(), want.tensors(), strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_isa
@pytest.mark.parametrize("n", [0, 1, 17, NORM_BLOCK - 1, NORM_BLOCK, 3 * NORM_BLOCK + 5])
def test_norm_equals_the_reference_and_torch(isa: str, dtype: torch.dtype, n: int) -> None:
    grad = ordinary(n, dtype, torch.Generator().manual_seed(5))
    got = _native.squared_norm(grad.data_ptr(), n, name_of(dtype), isa)
    assert got == squared_norm_reference(grad)
    assert got == pytest.approx(grad.double().square().sum().item(), rel=1e-13)


@every_isa
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_norm_is_finite_exactly_where_every_element_is(isa: str, bad: float) -> None:
    grad = torch.full((NORM_BLOCK + 3,), torch.finfo(torch.float32).max)
    assert math.isfinite(_native.squared_norm(grad.data_ptr(), grad.numel(), "float32", isa))
    grad[-1] = bad
    assert not math.isfinite(_native.squared_norm(grad.data_ptr(), grad.numel(), "float32", isa))


@pytest.mark.parametrize(
    ("threads", "beside"), [(1, (1, 1)), (2, (2, 2)), (4, (4, 4)), (16, (4, 15))]
)
def test_fewer_threads_update_while_the_caller_uses_cores(
    threads: int, beside: tuple[int, int]
) -> None:
    team = team_of(PipelinePolicy(threads=threads))
    assert (team.beside("computes"), team.beside("launches")) == beside
    assert team.beside("waits") == team.beside("updates") == threads


_CODE = """
import os
import torch
from tensorstow import AdamW

def busy():
    seconds = {}
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/schedstat") as f:
            seconds[thread] = int(f.read().split()[0]) / 1e9
    return seconds

torch.set_num_threads(2)
matrix = torch.rand(700, 700)
for _ in range(20):
    matrix @ matrix  # starts torch's team
weights = [torch.nn.Parameter(torch.rand(1 << 21)) for _ in range(2)]
with_team = set(os.listdir("/proc/self/task"))
optimizer = AdamW(weights, **OPTIONS)
for p in weights:
    p.grad = torch.rand_like(p)
optimizer.step()
before = busy()
for _ in range(60):
    optimizer.step()
after = busy()
grown = {t: after[t] - before.get(t, 0) for t in after}
ours = sum(v for t, v in grown.items() if t not in with_team)
theirs = sum(v for t, v in grown.items() if t in with_team)
print(ours, theirs)
optimizer.close()
"""


def busy_seconds(options: str) -> tuple[float, float]:
    """Return the seconds that threads of ours, and torch's, were busy in 60 steps."""
    done = subprocess.run(
        [sys.executable, "-c", _CODE.replace("OPTIONS", options)],
        capture_output=True,
        text=True,
        check=True,
    )
    ours, theirs = done.stdout.split()
    return float(ours), float(theirs)


@pytest.mark.parametrize("options", ["{}", "{'states': 'disk'}"])
def test_updates_run_on_torchs_threads(options: str) -> None:
    ours, theirs = busy_seconds(options)
    assert theirs > 0.1
    assert ours < theirs / 5  # threads of I/O sum and copy nothing


def test_another_number_of_threads_is_our_pools() -> None:
    policy = "{'policy': __import__('tensorstow').PipelinePolicy(threads=3)}"
    ours, theirs = busy_seconds(policy)
    assert ours > theirs / 4
