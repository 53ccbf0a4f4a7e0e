"""The site's own pictures and conventions: flowcharts, tabs, notes, links."""

import importlib.util
import re
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from tree import ROOT


def tool(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a program of tools/ as a module; ``site`` is also one of Python's."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / f"tools/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return tool("site", monkeypatch)


@pytest.fixture
def flowchart(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return tool("flowchart", monkeypatch)


def test_bold_lines_between_two_comments_become_tabs(site: ModuleType) -> None:
    text = (
        "Before.\n\n<!-- tabs -->\n\n**Trainer**\n\n```python\na = 1\n```\n\n"
        "**Plain loop**\n\nWith **bold** words.\n\n<!-- end of tabs -->\n\nAfter.\n"
    )
    made = site.tabs(text)
    item = r"^:::::\{tab-item\} ([^\n]+)\n:sync: ([^\n]+)\n\n(.*?)\n:::::$"
    items = re.findall(item, made, re.MULTILINE | re.DOTALL)
    assert items == [
        ("Trainer", "trainer", "```python\na = 1\n```"),
        ("Plain loop", "plain loop", "With **bold** words."),
    ]
    assert made.startswith("Before.\n\n\n::::::{tab-set}\n")
    assert made.endswith("\n::::::\n\nAfter.\n")


def test_quotations_that_say_so_become_notes(site: ModuleType) -> None:
    text = "A.\n\n> **Warning:** Keep `dir`.\n>\n> * It has\n>   the states.\n\n> Other words.\n"
    expected = "A.\n\n:::{warning}\nKeep `dir`.\n\n* It has\n  the states.\n:::\n\n> Other words.\n"
    assert site.admonitions(text) == expected


def test_links_lead_to_where_the_site_has_the_page(site: ModuleType, tmp_path: Path) -> None:
    def moved(link: str, source: str, target: str) -> str:
        text: str = site.moved(f"[x]({link})", source, target, tmp_path)
        return text.removeprefix("[x](").removesuffix(")")

    guide = ("docs/guides/lora.md", "guides/lora.md")
    assert moved("../../README.md#install", *guide) == "../index.md#install"
    assert moved("planning.md", *guide) == "../guides/planning.md"
    assert moved("https://example.org/a.md", *guide) == "https://example.org/a.md"
    assert moved("../../examples/generation.py", *guide) == "../examples/generation.md"
    assert moved("docs/adr/", "README.md", "index.md") == "adr/index.md"
    licence = moved("LICENSE", "README.md", "index.md")
    assert (tmp_path / licence).read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_boxes_of_a_flowchart_do_not_overlap_and_arrows_lead_down(flowchart: ModuleType) -> None:
    charts = flowchart.FENCE.findall((ROOT / "ARCHITECTURE.md").read_text("utf-8"))
    assert charts
    for chart in charts:
        boxes, links = flowchart._parse(chart)
        rows, arrows = flowchart._rows(boxes, links)
        flowchart._place(rows)
        assert sum(len(row) for row in rows) >= len(boxes)
        for row in rows:
            for one, two in pairwise(row):
                assert one.x + one.width / 2 < two.x - two.width / 2
        assert len(arrows) == len(links)
        assert all(arrow.chain[0].row < arrow.chain[-1].row for arrow in arrows)
        assert sum(all(arrow.heads) for arrow in arrows) == chart.count("<-")
        picture = flowchart.svg(chart)
        for text in re.findall(r'["\[(]([\w ,./:]+)["\])]', chart):
            assert text in picture
        assert picture.count('class="arrow"') == len(links)
        assert re.findall(r"https?:", picture) == []


def test_an_arrow_that_closes_a_circle_points_up(flowchart: ModuleType) -> None:
    chart = 'flowchart LR\n    a[one] --> b[two]\n    b -- "again" --> a\n'
    _, arrows = flowchart._rows(*flowchart._parse(chart))
    assert [arrow.heads for arrow in arrows] == [(False, True), (True, False)]
    assert [arrow.chain[0].lines for arrow in arrows] == [["one"], ["one"]]


def test_a_flowchart_that_cannot_be_read_is_an_error(flowchart: ModuleType) -> None:
    with pytest.raises(ValueError, match="does not read"):
        flowchart.svg("flowchart LR\n    a{choice} --> b\n")
