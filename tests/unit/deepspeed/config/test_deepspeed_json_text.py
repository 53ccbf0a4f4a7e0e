"""A slip in JSON is shown with its file, line, column and a caret."""

import base64
import time
from pathlib import Path

import pytest

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.config.json_text import load, parse

# As the ZeRO-Offload tutorial prints it: a comma too many, then one too few.
TUTORIAL = """{
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {
            "device": "cpu",
        }
        "contiguous_gradients": true,
        "overlap_comm": true
    }
}
"""


def said(text: str) -> list[str]:
    with pytest.raises(OptionError) as caught:
        parse(text, "ds.json")
    return str(caught.value).splitlines()


def test_the_tutorials_comma_too_many_and_the_one_too_few_are_pointed_at() -> None:
    too_few = [
        "ds.json, line 6, column 10: a comma is missing here.",
        "            }",
        "             ^",
    ]
    assert said(TUTORIAL) == [
        "ds.json, line 5, column 28: this comma has nothing after it: remove it.",
        '                "device": "cpu",',
        "                               ^",
        *too_few,
    ]
    assert said(TUTORIAL.replace('"cpu",', '"cpu"')) == too_few


def test_the_tutorial_mended_is_read() -> None:
    mended = TUTORIAL.replace('"cpu",\n        }', '"cpu"\n        },')
    assert parse(mended, "ds.json")["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("{'stage': 2}", "line 1, column 2", "single quotes"),
        ('{"a": True}', "line 1, column 7", "writes true"),
        ('{"a": [1, 2,]}', "line 1, column 12", "remove it"),
        ('{"a": 1} {"b": 2}', "line 1, column 10", "has ended"),
        ('{"a": {"b": 1}\n', "line 1, column 15", "still open"),
        ('{"a": 1"b": 2}', "line 1, column 8", "comma is missing"),
        ("{a: 1}", "line 1, column 2", 'a has no quotes: write "a"'),
        ("{Name: 1}", "line 1, column 2", 'Name has no quotes: write "Name"'),
        ('{"a": None}', "line 1, column 7", "writes null"),
        ('{"a"\n: \n', "line 2, column 2", "still open"),
        ('{"a" 1}', "line 1, column 6", "expecting ':'"),
        ("", "line 1, column 1", "still open"),
    ],
)
def test_common_slips_are_named(text: str, place: str, words: str) -> None:
    head = said(text)[0]
    assert place in head
    assert words in head


def test_slips_behind_which_it_is_clear_how_to_read_on_are_told_at_once() -> None:
    text = '{"a": 1, # first\n"b": True\n"c": [3,],\n"d": None,\n}'
    heads = [line for line in said(text) if line.startswith("ds.json")]
    assert [head.partition(": ")[0].removeprefix("ds.json, ") for head in heads] == [
        "line 2, column 6",
        "line 2, column 10",
        "line 3, column 8",
        "line 4, column 6",
        "line 4, column 10",
    ]


def test_the_caret_stands_under_its_character_behind_tabs() -> None:
    assert said('{\n\t"a":\t1 2}')[1:] == ['    \t"a":\t1 2}', "    \t    \t ^"]


def test_a_key_twice_in_one_object_is_refused() -> None:
    assert (
        "'stage' 2 times in one object (in line 1, 2)"
        in said('{"z": {"stage": 1,\n "stage": 2}}')[0]
    )
    assert parse('{"a": {"x": 1}, "b": {"x": 2}}', "ds.json")["b"] == {"x": 2}


def test_nan_and_what_is_no_object_are_refused() -> None:
    assert "has NaN" in said('{"a": NaN}')[0]
    assert "holds a list" in said("[1]")[0]


def test_a_file_and_a_dict_are_both_sources(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('\ufeff{"a": 1}', encoding="utf-8")
    assert load(path) == load(str(path)) == load({"a": 1}) == {"a": 1}


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="No such file"):
        load(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="UTF-8"):
        load(tmp_path / "binary")
    with pytest.raises(OptionError, match="Pass a dict"):
        load(3)


def test_comments_are_blanks() -> None:
    text = """{ // https://here
        "a": "http://there#x", /* two
        lines */ # and
        "b": "\\"//\\"" }"""
    assert parse(text, "ds.json") == {"a": "http://there#x", "b": '"//"'}


def test_an_object_may_be_in_base64() -> None:
    encoded = base64.urlsafe_b64encode(b'{"train_batch_size": 8}').decode()
    assert load(encoded) == {"train_batch_size": 8}
    with pytest.raises(OptionError, match="cannot be read"):
        load(base64.urlsafe_b64encode(b"8").decode())


def test_a_number_of_thousands_of_digits_is_an_error_of_ours() -> None:
    assert "more digits than Python reads" in said('{"seed": ' + "9" * 5000 + "}")[0]


def test_many_slips_take_no_time_and_twenty_are_shown() -> None:
    begun = time.perf_counter()
    assert len(said('{"a": [' + "[1,]," * 3000 + "1]}")) == 3 * 20
    assert len(said("/* " * 50_000)[0]) < 200
    assert time.perf_counter() - begun < 2.0


def test_a_long_line_is_shown_around_the_slip() -> None:
    text = '{"a": "' + "x" * 100_000 + '", "b": 1,}'
    first, line, caret = said(text)
    assert first.startswith("ds.json, line 1, column 100017: ")
    assert len(line) < 300
    assert line[caret.index("^")] == ","


def test_a_text_without_an_end_takes_no_longer_than_its_length() -> None:
    """Each of its quotes was once the beginning of another try: 40 kB took half a minute."""
    text = '{"a": ' + '"\\' * 200_000
    begin = time.process_time()
    with pytest.raises(OptionError):
        parse(text, "ds.json")
    assert time.process_time() - begin < 5
