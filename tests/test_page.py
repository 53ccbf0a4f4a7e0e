import json
import re
from html.parser import HTMLParser

from demo_results import make_results, spoil
from tensorstow.cli.demo.page import Pictures, compose
from tensorstow.cli.demo.rows import ROWS
from tensorstow.cli.demo.verdict import judge

VOID = {"meta", "img", "br"}


class Reader(HTMLParser):
    """Checks that elements nest, and keeps their text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [v or "" for k, v in attrs if k in {"src", "href"}]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(results: list) -> str:
    return compose(
        results, "a <heading> & more", judge(results), Pictures(b"one", b"two"), "x = '</pre>'"
    )


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def test_it_needs_nothing_else() -> None:
    page = page_of(make_results())
    assert not re.search(r"https?://", page)
    assert all(link.startswith("data:") for link in read(page).links)


def test_it_holds_table_verdict_and_lines() -> None:
    text = read(page_of(make_results())).text
    for piece in ("a <heading> & more", "bitwise equal", "10.92000", "33%", "x = '</pre>'"):
        assert piece in text
    assert "$" not in re.sub(r"\$\{", "", text.split('"use strict"')[0])


def test_a_difference_is_shown_as_one() -> None:
    page = page_of(spoil(make_results(), "full", checksum="3" * 64))
    assert 'class="verdict different"' in page
    assert 'class="verdict equal"' not in page


def test_the_log_is_json_with_every_lane() -> None:
    found = re.search(
        r'<script id="log" type="application/json">(.*?)</script>', page_of(make_results())
    )
    assert found
    log = json.loads(found[1])
    assert [row["title"] for row in log["rows"]] == [row.name for row in ROWS]
    lanes = [[lane["name"] for lane in row["lanes"]] for row in log["rows"]]
    assert lanes[0] == ["compute"]
    assert lanes[-1] == ["compute", "read", "update", "write"]
    assert [name for name, _, _ in log["views"]] == [
        "whole run",
        "step 2",
        "opt.step() of tensorstow, 100% disk",
    ]
