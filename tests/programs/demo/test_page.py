import json
import re
from dataclasses import replace

from demo_results import judged, make_results, spoil

from demo.configurations import CONFIGURATIONS
from demo.page import Plots, compose
from demo.plots import Plot
from demo.table import sections
from page_reader import read


def page_of(results: list, others: float = 0.0) -> str:
    plots = Plots(*(Plot(b"", f"<b>{n} wide</b>", f"<b>{n} narrow</b>") for n in "tm"))
    parity = judged(results, others=others)
    return compose(results, "a <heading> & more", parity, plots, "x = '</pre>'")


def test_it_needs_nothing_else() -> None:
    page = page_of(make_results())
    assert not re.search(r"https?://", page)
    assert read(page).links == []


def test_it_holds_table_verdict_and_lines() -> None:
    text = read(page_of(make_results())).text
    for piece in (
        "a <heading> & more",
        "bitwise equal",
        "10.92000",
        "33%",
        "x = '</pre>'",
        "m narrow",
        "t wide",
    ):
        assert piece in text
    for row in CONFIGURATIONS:
        assert row.about in text
    for section in sections(make_results()):
        assert section.note in text
    assert "$" not in re.sub(r"\$\{", "", text.split('"use strict"')[0])


def test_a_difference_is_shown_as_one() -> None:
    page = page_of(spoil(make_results(), "full", checksum="3" * 64))
    assert 'class="parity different"' in page
    assert 'class="parity equal"' not in page


def test_a_busy_machine_is_shown_as_one() -> None:
    page = page_of(make_results(), others=0.5)
    assert 'class="parity doubtful"' in page
    assert "THE MACHINE WAS BUSY" in page


def test_noise_is_shown_and_is_not_said_to_be_others() -> None:
    results = make_results(4)
    spans = tuple(
        replace(s, stop=s.stop + 3.5) if (s.name, s.step) == ("opt.step", 3) else s
        for s in results[2].spans
    )
    page = page_of(spoil(results, "naive", spans=spans), others=0.01)
    assert 'class="parity doubtful"' in page
    assert "THE MACHINE WAS BUSY" not in page


def test_it_follows_the_system_into_the_dark_and_fits_a_phone() -> None:
    page = page_of(make_results())
    assert "color-scheme: light dark" in page
    assert "@media (prefers-color-scheme: dark)" in page
    assert "@media (max-width: 640px)" in page
    colors = re.findall(r"#[0-9a-f]{6}", page.split("</style>")[1].split('<script id="log"')[0])
    assert colors == []  # all of them are variables


def test_the_log_is_json_with_every_lane() -> None:
    found = re.search(
        r'<script id="log" type="application/json">(.*?)</script>', page_of(make_results())
    )
    assert found
    log = json.loads(found[1])
    assert [row["title"] for row in log["rows"]] == [row.name for row in CONFIGURATIONS]
    lanes = [[lane["name"] for lane in row["lanes"]] for row in log["rows"]]
    assert lanes[0] == ["compute"]
    assert lanes[-1] == ["compute", "read", "update", "write"]
    assert [name for name, _, _ in log["views"]] == [
        "whole run",
        "step 2",
        "opt.step() of tensorstow, 100% disk",
    ]
