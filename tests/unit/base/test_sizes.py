"""Sizes as people write and read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorstow.base.errors import OptionError
from tensorstow.base.sizes import Bytes, format_bytes, parse_size, parts_within


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (0, 0),
        (4096, 4096),
        (Bytes(48), 48),
        ("0", 0),
        ("2097152", 2**21),
        ("512M", 512 * 2**20),
        ("24g", 24 * 2**30),
        ("24gb", 24 * 10**9),
        ("17B", 17),
        ("512MiB", 512 * 2**20),
        ("512mib", 512 * 2**20),
        (" 1.5 GiB ", 3 * 2**29),
        ("1kB", 1000),
        ("64GB", 64 * 10**9),
        ("2TiB", 2 * 2**40),
        ("1PB", 10**15),
        ("0.3KiB", 307),
    ],
)
def test_parse(text: str | int, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize(
    "value",
    [
        "",
        "GiB",
        "-1GiB",
        "1e9",
        "48",
        "512Q",
        "5 parsecs",
        "1.5",
        "1..5GiB",
        "\u0661GiB",
        -1,
        1,
        48,
        4095,
    ],
)
def test_refused_by_value_and_name(value: str | int) -> None:
    with pytest.raises(OptionError) as caught:
        parse_size(value, "ram_budget")
    assert f"ram_budget={value!r}" in str(caught.value)
    assert "Give" in str(caught.value)


@pytest.mark.parametrize("value", [True, 1.5, None])
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(OptionError, match="is not a size"):
        parse_size(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (61_418_032_333, "57.2 GiB"),
        (-(3 * 2**29), "-1.5 GiB"),
        (2**60, "1024.0 PiB"),
    ],
)
def test_format(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(min_value=0, max_value=2**59))
def test_what_is_printed_reads_back_within_its_last_digit(count: int) -> None:
    assert parse_size(format_bytes(count)) == pytest.approx(count, rel=0.05)


@pytest.mark.parametrize(
    ("sizes", "most", "parts"),
    [
        ([], 3, [[]]),
        ([1, 2, 1], 3, [[1, 2], [1]]),
        ([4, 1, 5], 3, [[4], [1], [5]]),
        ([0, 3, 0], 3, [[0, 3, 0]]),
        ([4, 1, 5], None, [[4, 1, 5]]),
    ],
)
def test_parts_are_filled_in_order(
    sizes: list[int], most: int | None, parts: list[list[int]]
) -> None:
    assert list(parts_within(sizes, most, lambda size: size)) == parts


def test_one_item_alone_is_taken_after_a_part() -> None:
    items = iter([2, 2, 2, 2])
    assert next(parts_within(items, 4, lambda size: size)) == [2, 2]
    assert list(items) == [2]
