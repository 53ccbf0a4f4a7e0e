"""The kernels in every state format against the reference, bit for bit, on every ISA."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tensorstow import _native
from tensorstow.formats.reference import (
    AdamScalars,
    AdamState,
    FormattedStates,
    adam_reference,
    adam_reference_in_format,
    adam_scalars,
)
from tensorstow.formats.state_format import StateFormat, decode, stores_master, streams_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ISAS = _native.supported_isas()
SPECIAL32 = torch.tensor(
    [
        *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x3F800000, 0x7F7FFFFF),
        *(0xFF7FFFFF, 0x7F7F8000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFC00001),
    ]
).to(torch.int32)
SPECIAL16 = torch.tensor(
    [
        *(0x0000, 0x8000, 0x0001, 0x8001, 0x7FFF, 0x0080, 0x3F80, 0xBF80, 0x7F7F, 0xFF7F),
        *(0x7F80, 0xFF80, 0x7F81, 0x7C00, 0x7BFF, 0x7E00, 0xFFFF, 0xFFC1),
    ]
).to(torch.int16)
NAMES = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master"),
    *("exp_avg_scale", "exp_avg_sq_scale", "ema"),
)
"""In the order of the native core's Stream."""

every_isa = pytest.mark.parametrize("isa", ISAS)
every_format = pytest.mark.parametrize("format_", StateFormat)
every_param = pytest.mark.parametrize("param_dtype", DTYPES, ids=str)

Fill = Callable[[int, torch.dtype, torch.Generator], Tensor]


@dataclass
class Problem:
    param: Tensor
    grad: Tensor
    kept: FormattedStates

    def copy(self, *, shift: int = 0) -> "Problem":
        """Return a copy that begins ``shift`` elements off an aligned address."""

        def moved(t: Tensor) -> Tensor:
            room = torch.empty(t.numel() + shift, dtype=t.dtype)
            return room[shift:].copy_(t)

        streams = [moved(s) for s in self.kept.streams]
        return Problem(moved(self.param), moved(self.grad), replace(self.kept, streams=streams))

    def decoded(self) -> dict[str, Tensor]:
        kept = self.kept
        options = {"amsgrad": kept.amsgrad, "ema": kept.ema}
        states = decode(kept.streams, self.param, kept.format, **options)
        return {"param": self.param, **states}


def any_bits(n: int, dtype: torch.dtype, random: torch.Generator) -> Tensor:
    if dtype.itemsize == 1:
        return torch.randint(0, 256, (n,), generator=random).to(torch.uint8).view(dtype)
    integer, special = (torch.int32, SPECIAL32) if dtype.itemsize == 4 else (torch.int16, SPECIAL16)
    bits = torch.randint(-(2**31), 2**31, (n,), generator=random).to(integer)
    chosen = special[torch.randint(0, len(special), (n,), generator=random)]
    return torch.where(torch.rand(n, generator=random) < 0.25, chosen, bits).view(dtype)


def ordinary(n: int, dtype: torch.dtype, random: torch.Generator) -> Tensor:
    if not dtype.is_floating_point:
        return any_bits(n, dtype, random)
    return torch.randn(n, generator=random).abs().to(dtype)


def make(
    fill: Fill,
    n: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    format_: StateFormat,
    *,
    amsgrad: bool,
    ema: bool = False,
    seed: int = 7,
) -> Problem:
    random = torch.Generator().manual_seed(seed)
    param, grad = (fill(n, dtype, random) for dtype in dtypes)
    specs = streams_of(dtypes[0], format_, amsgrad=amsgrad, ema=ema)
    streams = [fill(-(-n // s.per), s.dtype, random) for s in specs]
    return Problem(param, grad, FormattedStates(streams, format_, amsgrad, 3 * 32, ema))


@dataclass(frozen=True)
class Mode:
    isa: str | None = None
    seed_master: bool = False
    key: int = 5
    on_pool: bool = False


def run_kernel(problem: Problem, scalars: AdamScalars, mode: Mode) -> None:
    kept = problem.kept
    specs = streams_of(problem.param.dtype, kept.format, amsgrad=kept.amsgrad, ema=kept.ema)
    addresses = {s.name: t.data_ptr() for s, t in zip(specs, kept.streams, strict=True)}
    _native.adam_update(
        problem.param.data_ptr(),
        problem.grad.data_ptr(),
        [addresses.get(name, 0) for name in NAMES],
        problem.param.numel(),
        str(problem.param.dtype).removeprefix("torch."),
        str(problem.grad.dtype).removeprefix("torch."),
        kept.format,
        first=kept.first,
        key=mode.key,
        seed_master=mode.seed_master,
        hyper=scalars,
        isa=mode.isa,
        on_pool=mode.on_pool,
    )


def run_reference(problem: Problem, scalars: AdamScalars, mode: Mode) -> None:
    adam_reference_in_format(
        problem.param,
        problem.grad,
        problem.kept,
        scalars,
        key=mode.key,
        seed_master=mode.seed_master,
    )


def bits_of(t: Tensor) -> Tensor:
    return t.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[t.dtype.itemsize])


def assert_same(name: str, got: Tensor, want: Tensor, ignored: Tensor | None = None) -> None:
    different = bits_of(got) != bits_of(want)
    if got.dtype.is_floating_point:
        different &= ~(got.isnan() & want.isnan())
    if ignored is not None and ignored.numel() == different.numel():
        different &= ~ignored
    at = different.nonzero().flatten()[:4]
    assert not different.any(), f"{name} at {at.tolist()}: {got[at]} is not {want[at]}"


def assert_equal(got: Problem, want: Problem) -> None:
    """Compare what is kept and what it means; a NaN weight's low bits mean nothing."""
    theirs = want.decoded()
    for name, ours in got.decoded().items():
        assert_same(name, ours, theirs[name])
    nans = want.param.isnan()
    kept = got.kept
    specs = streams_of(got.param.dtype, kept.format, amsgrad=kept.amsgrad, ema=kept.ema)
    pairs = zip(specs, kept.streams, want.kept.streams, strict=True)
    for spec, ours, stream in pairs:
        assert_same(spec.name, ours, stream, nans)


def scalars_of(*, decoupled: bool, step: int = 3, ema_weight: float = 1e-4) -> AdamScalars:
    return adam_scalars(
        lr=1e-2,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.1,
        step=step,
        decoupled=decoupled,
        grad_factor=-0.37,
        ema_weight=ema_weight,
    )


def amsgrads(format_: StateFormat) -> tuple[bool, ...]:
    return (False, True) if format_.exact else (False,)


@every_format
@every_param
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fill", [ordinary, any_bits])
def test_equals_the_reference(
    format_: StateFormat,
    param_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    fill: Fill,
) -> None:
    weights = (1e-4, 0.5, 0.9, 1.0) if stores_master(param_dtype, format_) else (1.0,)
    for amsgrad, decoupled, weight in itertools.product(amsgrads(format_), (False, True), weights):
        ema = stores_master(param_dtype, format_)
        want = make(fill, 10_011, (param_dtype, grad_dtype), format_, amsgrad=amsgrad, ema=ema)
        by_isa = {isa: want.copy() for isa in ISAS}
        scalars = scalars_of(decoupled=decoupled, ema_weight=weight)
        run_reference(want, scalars, Mode(seed_master=decoupled))
        for isa, got in by_isa.items():
            run_kernel(got, scalars, Mode(isa, seed_master=decoupled))
            assert_equal(got, want)


@every_isa
@settings(deadline=None, max_examples=80)
@given(
    n=st.integers(0, 400),
    shift=st.integers(0, 40),
    seed=st.integers(0, 1000),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    format_=st.sampled_from(list(StateFormat)),
    seed_master=st.booleans(),
)
def test_equals_the_reference_at_any_length(
    isa: str,
    n: int,
    shift: int,
    seed: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    format_: StateFormat,
    seed_master: bool,  # noqa: FBT001  # hypothesis passes it by name
) -> None:
    ema = stores_master(dtypes[0], format_)
    want = make(any_bits, n, dtypes, format_, amsgrad=format_.exact, ema=ema, seed=seed)
    got = want.copy(shift=shift)
    mode = Mode(isa, seed_master)
    run_kernel(got, scalars_of(decoupled=True), mode)
    run_reference(want, scalars_of(decoupled=True), mode)
    assert_equal(got, want)


@every_format
@every_param
def test_threads_change_no_bit(format_: StateFormat, param_dtype: torch.dtype) -> None:
    ema = stores_master(param_dtype, format_)
    dtypes = (param_dtype, torch.bfloat16)
    got = make(ordinary, 200_003, dtypes, format_, amsgrad=False, ema=ema)
    want = got.copy()
    run_kernel(got, scalars_of(decoupled=True), Mode(on_pool=True))
    run_kernel(want, scalars_of(decoupled=True), Mode())
    assert_equal(got, want)


def groups_of(problem: Problem) -> Iterator[Problem]:
    """Cut at groups, each piece sharing the memory of the whole."""
    kept = problem.kept
    for begin in range(0, problem.param.numel(), 96):
        cut = slice(begin, begin + 96)
        streams = [
            s[cut] if s.numel() == problem.param.numel() else s[begin // 32 : begin // 32 + 3]
            for s in kept.streams
        ]
        part = replace(kept, streams=streams, first=kept.first + begin)
        yield Problem(problem.param[cut], problem.grad[cut], part)


@every_format
def test_the_reference_may_be_cut_too(format_: StateFormat) -> None:
    whole = make(ordinary, 1000, (torch.bfloat16, torch.float32), format_, amsgrad=False)
    parts = whole.copy()
    run_reference(whole, scalars_of(decoupled=True), Mode())
    for part in groups_of(parts):
        run_reference(part, scalars_of(decoupled=True), Mode())
    assert_equal(parts, whole)


@every_isa
def test_split_walks_where_fp32_walks(isa: str) -> None:
    """Small steps, so that masters wander through ties and the weights mostly stand still."""
    n, random = 20_000, torch.Generator().manual_seed(3)
    param = torch.randn(n, generator=random).bfloat16()
    state = AdamState(torch.zeros(n), torch.zeros(n), param.float(), torch.zeros(n))
    streams = [torch.zeros(n), torch.zeros(n), torch.zeros(n), torch.zeros(n, dtype=torch.int16)]
    split = Problem(param.clone(), param, FormattedStates(streams, StateFormat.SPLIT, amsgrad=True))
    ties = 0
    for step in range(1, 150):
        split.grad = torch.randn(n, generator=random).bfloat16()
        scalars = adam_scalars(
            lr=1e-4 if step % 50 else 1.0,
            betas=(0.9, 0.99),
            eps=1e-8,
            weight_decay=0.01,
            step=step,
            decoupled=True,
        )
        adam_reference(param, split.grad, state, scalars)
        run_kernel(split, scalars, Mode(isa))
        ties += int((streams[3] == -0x8000).sum())
    assert ties > 10
    got = split.decoded()
    wanted = {"exp_avg": state.m, "exp_avg_sq": state.v, "master": state.master, "param": param}
    for name, want in wanted.items():
        assert want is not None
        assert_same(name, got[name], want)


def test_an_int8_range_begins_at_a_group() -> None:
    problem = make(ordinary, 64, (torch.float32, torch.float32), StateFormat.INT8, amsgrad=False)
    problem.kept = replace(problem.kept, first=5)
    with pytest.raises(ValueError, match="multiple of 32"):
        run_kernel(problem, scalars_of(decoupled=True), Mode())
