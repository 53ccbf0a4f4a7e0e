"""What commands print, in many columns, in few, and into a pipe."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tensorstow.base.sizes import format_count
from tensorstow.cli.output import make_console, print_by_rank, print_facts, print_table

LONG = "/a/path/that/is/longer/than/forty/columns/of/a/terminal/states-0.bin"
HEADS = ("generation", "step", "snapshots")
ROWS = [("1", "7", "a-snapshot-whose-name-is-long, another-one"), ("2", "8", "")]


def console(width: int, *, terminal: bool = True) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)


def said(by: Console) -> str:
    assert isinstance(by.file, io.StringIO)
    return by.file.getvalue()


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_nothing_is_cut_off(width: int) -> None:
    terminal = console(width)
    print_facts(terminal, [("memlock", LONG)], 16)
    print_table(terminal, HEADS, ROWS)
    lines = said(terminal).splitlines()
    assert all(len(line) <= width for line in lines)
    run_together = "".join(line.strip() for line in lines).replace(" ", "")
    for piece in (LONG, *HEADS, *(cell for row in ROWS for cell in row)):
        assert piece.replace(" ", "") in run_together
    assert "\N{HORIZONTAL ELLIPSIS}" not in run_together


def test_a_table_that_does_not_fit_becomes_its_rows() -> None:
    narrow, wide = console(40), console(200)
    for terminal in (narrow, wide):
        print_table(terminal, HEADS, ROWS)
    assert "generation" in said(wide).splitlines()[1]
    assert said(narrow).count("generation") == 2
    assert said(narrow).count("snapshots") == 1  # an empty cell is no line


def test_programs_get_a_fact_a_line_and_no_markup_is_read() -> None:
    pipe = console(40, terminal=False)
    print_facts(pipe, [("memlock", LONG), ("file", "[bold]brackets[/] [x]")], 10)
    assert said(pipe) == f"memlock   {LONG}\nfile      [bold]brackets[/] [x]\n"


def test_json_is_a_list_where_there_are_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    here = Path("/run")
    print_by_rank([{"at": here}], [here], here)
    assert json.loads(capsys.readouterr().out) == {"at": "/run"}
    print_by_rank([1], [here / "rank-0-of-1"], here)
    assert json.loads(capsys.readouterr().out) == [1]


def test_one_and_many() -> None:
    counts = [format_count(count, "file") for count in (0, 1, 2, 9000)]
    assert counts == ["0 files", "1 file", "2 files", "9,000 files"]


def test_a_table_has_lines_on_a_terminal_alone() -> None:
    for terminal in (True, False):
        by = console(80, terminal=terminal)
        print_table(by, ["tier", "bytes"], [["host", "5"], ["disk", "7"]])
        assert said(by).isascii() == (not terminal)
        assert ["host", "5"] in [line.split() for line in said(by).splitlines()] or terminal


def test_a_name_between_colons_is_no_picture(capsys: pytest.CaptureFixture[str]) -> None:
    print_facts(make_console(), [("model", "mine:ok: 16,640 parameters")], 16)
    assert "mine:ok: 16,640 parameters" in capsys.readouterr().out
