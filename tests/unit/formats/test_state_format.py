"""State formats: the streams that the native core knows, and the way to fp32 and back."""

import math

import pytest
import torch
from torch import Tensor

from tensorstow import _native
from tensorstow.base.errors import OptionError
from tensorstow.formats.state_format import (
    StateFormat,
    StreamSpec,
    decode,
    encode,
    join_bytes,
    join_halves,
    split_bytes,
    split_halves,
    state_names,
    stores_master,
    streams_of,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NATIVE_NAMES = {
    "m": "exp_avg",
    "v": "exp_avg_sq",
    "vmax": "max_exp_avg_sq",
    "master": "master",
    "m_scale": "exp_avg_scale",
    "v_scale": "exp_avg_sq_scale",
    "ema": "ema",
}
N = (1 << 19) + 77

every_format = pytest.mark.parametrize("format_", StateFormat)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def states_of(weight: Tensor, *, amsgrad: bool) -> dict[str, Tensor]:
    """Return ordinary states, with masters that round to the weight."""
    random = torch.Generator().manual_seed(5)
    n = weight.numel()
    made = {
        name: torch.randn(n, generator=random)
        for name in state_names(weight.dtype, amsgrad=amsgrad)
    }
    made["exp_avg_sq"].square_()
    if "master" in made:
        near = weight.float() * (1 + 2.0**-10 * torch.randn(n, generator=random))
        made["master"] = torch.where(near.to(weight.dtype) == weight, near, weight.float())
    return made


def weight_of(dtype: torch.dtype, n: int = N) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(6)).to(dtype)


def empty_streams(weight: Tensor, format_: StateFormat, *, amsgrad: bool) -> list[Tensor]:
    specs = streams_of(weight.dtype, format_, amsgrad=amsgrad)
    return [torch.empty(-(-weight.numel() // s.per), dtype=s.dtype) for s in specs]


def round_trip(
    states: dict[str, Tensor], weight: Tensor, format_: StateFormat, *, key: int | None = None
) -> dict[str, Tensor]:
    amsgrad = "max_exp_avg_sq" in states
    streams = empty_streams(weight, format_, amsgrad=amsgrad)
    encode(states, weight, streams, format_, amsgrad=amsgrad, key=key)
    return decode(streams, weight, format_, amsgrad=amsgrad)


@every_dtype
@every_format
@pytest.mark.parametrize("amsgrad", [False, True])
def test_the_native_core_has_the_same_streams(
    dtype: torch.dtype,
    format_: StateFormat,
    amsgrad: bool,  # noqa: FBT001  # a test's parameter
) -> None:
    name = str(dtype).removeprefix("torch.")
    if amsgrad and not format_.exact:
        with pytest.raises(OptionError, match="amsgrad"):
            streams_of(dtype, format_, amsgrad=amsgrad)
        with pytest.raises(ValueError, match="amsgrad"):
            _native.streams_of(name, format_, amsgrad, ema=False)
        return
    for ema in (False, stores_master(dtype, format_)):
        specs = streams_of(dtype, format_, amsgrad=amsgrad, ema=ema)
        rows = _native.streams_of(name, format_, amsgrad, ema=ema)
        theirs = [(NATIVE_NAMES[n], b, per) for n, b, per in rows]
        assert [(s.name, s.dtype.itemsize, s.per) for s in specs] == theirs


@every_format
def test_an_average_needs_a_whole_master(format_: StateFormat) -> None:
    if format_ == StateFormat.FP32:
        assert streams_of(torch.bfloat16, format_, amsgrad=False, ema=True)[-1].name == "ema"
        return
    with pytest.raises(OptionError, match="ema was requested with states in"):
        streams_of(torch.bfloat16, format_, amsgrad=False, ema=True)
    with pytest.raises(ValueError, match="masters in fp32"):
        _native.streams_of("bfloat16", format_, amsgrad=False, ema=True)


def bytes_per_element(dtype: torch.dtype, format_: StateFormat) -> float:
    return sum(s.dtype.itemsize / s.per for s in streams_of(dtype, format_, amsgrad=False))


def test_bytes_are_what_the_design_says() -> None:
    bf16 = {f: bytes_per_element(torch.bfloat16, f) for f in StateFormat}
    assert bf16 == {"fp32": 12, "split": 10, "bf16": 6, "int8": 3.125}
    fp32 = {f: bytes_per_element(torch.float32, f) for f in StateFormat}
    assert fp32 == {"fp32": 8, "split": 8, "bf16": 4, "int8": 2.125}
    assert bytes_per_element(torch.float16, StateFormat.SPLIT) == 12
    assert StreamSpec("master", torch.int16, 1) in streams_of(
        torch.bfloat16, StateFormat.SPLIT, amsgrad=True
    )


@every_dtype
@pytest.mark.parametrize("format_", [StateFormat.FP32, StateFormat.SPLIT])
def test_exact_formats_come_back(dtype: torch.dtype, format_: StateFormat) -> None:
    weight = weight_of(dtype)
    states = states_of(weight, amsgrad=True)
    back = round_trip(states, weight, format_)
    assert list(back) == list(states)
    for name, want in states.items():
        assert torch.equal(back[name], want)


@every_dtype
@pytest.mark.parametrize("format_", [StateFormat.BF16, StateFormat.INT8])
@pytest.mark.parametrize("key", [None, 3])
def test_inexact_formats_come_back_nearly(
    dtype: torch.dtype, format_: StateFormat, key: int | None
) -> None:
    weight = weight_of(dtype)
    states = states_of(weight, amsgrad=False)
    back = round_trip(states, weight, format_, key=key)
    assert list(back) == list(states)
    assert (back["exp_avg"] - states["exp_avg"]).abs().max() < 0.12
    assert (back["exp_avg_sq"].sqrt() - states["exp_avg_sq"].sqrt()).abs().max() < 0.04
    if "master" in back:
        bits = 15 if format_ == StateFormat.INT8 and dtype == torch.bfloat16 else 24
        error = (back["master"] - states["master"]).abs()
        assert (error <= states["master"].abs() * 2.0**-bits).all()
        assert torch.equal(back["master"].to(dtype), weight)


@every_dtype
def test_what_was_kept_in_bf16_comes_back_when_it_is_loaded(dtype: torch.dtype) -> None:
    weight = weight_of(dtype)
    kept = round_trip(states_of(weight, amsgrad=False), weight, StateFormat.BF16, key=3)
    again = round_trip(kept, weight, StateFormat.BF16)
    for name, want in kept.items():
        assert torch.equal(again[name], want)


@pytest.mark.parametrize("format_", [StateFormat.SPLIT, StateFormat.BF16, StateFormat.INT8])
def test_a_master_that_is_not_its_weights_is_refused(format_: StateFormat) -> None:
    weight = weight_of(torch.bfloat16, 40)
    states = states_of(weight, amsgrad=False)
    states["master"][7] *= 1.5
    with pytest.raises(OptionError, match="rounds to its weight"):
        round_trip(states, weight, format_)
    states["master"] = torch.where(weight == weight[3], math.nan, weight.float())
    weight[3] = math.nan
    assert round_trip(states, weight, format_)["master"].isnan().tolist() == weight.isnan().tolist()


@pytest.mark.parametrize("format_", [StateFormat.SPLIT, StateFormat.BF16, StateFormat.INT8])
def test_a_negative_second_moment_is_refused(format_: StateFormat) -> None:
    weight = weight_of(torch.bfloat16, 40)
    states = states_of(weight, amsgrad=False)
    states["exp_avg_sq"][5] = -0.0
    assert not round_trip(states, weight, format_)["exp_avg_sq"].signbit().any()
    states["exp_avg_sq"][5] = -1e-9
    with pytest.raises(OptionError, match="negative"):
        round_trip(states, weight, format_)


@every_format
def test_nothing_is_a_format_too(format_: StateFormat) -> None:
    weight = weight_of(torch.bfloat16, 0)
    back = round_trip(states_of(weight, amsgrad=False), weight, format_)
    assert all(t.numel() == 0 for t in back.values())


LOWS = torch.arange(1 << 16, dtype=torch.int32)
HIGHS = (
    *(0x0000, 0x8000, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x3F81, 0xBF80, 0xBFFF),
    *(0x7F7E, 0x7F7F, 0xFF7F, 0xFF7E, 0x4000, 0xC0FF),
    *range(1, 0x7F80, 997),
    *range(0x8001, 0xFF80, 997),
)


def masters(high: int) -> Tensor:
    return ((LOWS + (high << 16)).to(torch.int32)).view(torch.float32)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_split_masters_come_back_for_every_low_half() -> None:
    for high in HIGHS:
        master = masters(high)
        low, rounded_up = split_halves(master)
        assert same_bits(join_halves(master.bfloat16(), low, rounded_up), master)
        assert rounded_up.sum() == high % 2  # of all low halves only one is a tie


def test_split_masters_come_back_for_any_bits() -> None:
    random = torch.Generator().manual_seed(1)
    for _ in range(8):
        bits = torch.randint(-(2**31), 2**31, (1 << 20,), generator=random).to(torch.int32)
        master = bits.view(torch.float32)
        back = join_halves(master.bfloat16(), *split_halves(master))
        assert torch.equal(back.isnan(), master.isnan())
        assert same_bits(back[~back.isnan()], master[~back.isnan()])


def test_infinities_come_back_and_so_does_what_rounds_to_one() -> None:
    master = torch.tensor([math.inf, -math.inf, 3.4028235e38, -3.4028235e38, 3.3961776e38])
    weight = master.bfloat16()
    assert weight[2].isinf()
    assert same_bits(join_halves(weight, *split_halves(master)), master)


def test_a_nan_stays_one_whatever_its_low_half() -> None:
    for high in (0x7F80, 0x7FC0, 0x7FFF, 0xFF81, 0xFFFF):
        master = masters(high)[1:]
        assert join_halves(master.bfloat16(), *split_halves(master)).isnan().all()
        assert join_bytes(master.bfloat16(), split_bytes(master)).isnan().all()


def test_24_bits_are_the_nearest_but_for_ties() -> None:
    for high in HIGHS:
        master = masters(high)
        back = join_bytes(master.bfloat16(), split_bytes(master))
        bits = master.view(torch.int32)
        nearest = (bits + 0x7F + ((bits >> 8) & 1)) & ~0xFF
        off = (back.view(torch.int32) - nearest).abs()
        assert ((off == 0) | (off == 0x100)).all()
        half_way = (nearest & 0xFFFF) == 0x8000
        assert torch.equal(back.view(torch.int32) != nearest, half_way)
        assert same_bits(back.bfloat16().float(), master.bfloat16().float())
        assert torch.equal(split_bytes(back), split_bytes(master))
