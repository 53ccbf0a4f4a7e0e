import io
import json
import re

import pytest
from demo_results import make_results
from rich.console import Console

from demo.configurations import CONFIGURATIONS
from demo.table import NONE, figures_of, print_tables, sections


def cells_of(steps: int = 3) -> dict[str, tuple[str, ...]]:
    return {
        f"{section.title}: {line.label}": line.cells
        for section in sections(make_results(steps))
        for line in section.lines
    }


def test_every_figure_is_there_for_every_row() -> None:
    cells = cells_of()
    assert all(len(row) == len(CONFIGURATIONS) for row in cells.values())
    assert cells["Result: loss, step 3"] == ("10.92000",) * 8
    assert cells["Seconds: steady step"] == ("3.50",) * 8
    assert cells["Seconds:   of it opt.step()"] == ("0.500",) * 8
    assert cells["Seconds:   against torch"] == (NONE, *("+0%",) * 7)
    assert cells["Process memory, MiB: peak RSS"] == ("200.0",) * 8
    below = cells["Process memory, MiB:   less than torch"]
    assert below == (NONE, "0.0", *("30.0",) * 6)
    assert cells["Process memory, MiB:   of states' size"] == (NONE, "0%", *("3000%",) * 6)
    assert cells["Optimizer states, MiB: in RAM, measured"] == ("1.0", "1.0", *(NONE,) * 6)
    assert cells["Optimizer states, MiB: on disk, measured"] == (NONE, NONE, *("1.0",) * 6)
    assert cells["Optimizer states, MiB: on disk, predicted"][-1] == NONE
    assert cells["Disk traffic of states: read, GB"] == (NONE, NONE, *("0.00629",) * 6)
    spared = cells["Disk traffic of states: not read again, GB"]
    assert spared == (NONE, NONE, NONE, *("0.00105",) * 5)
    assert cells["Disk traffic of states: GB/s in opt.step()"] == (NONE, NONE, *("0.00",) * 6)
    assert cells["Disk traffic of states: outside opt.step()"] == (NONE, NONE, *("33%",) * 6)


def test_one_step_has_no_steady_ones() -> None:
    assert cells_of(steps=1)["Seconds: steady step"] == (NONE,) * 8
    assert cells_of(steps=3)["Seconds:   spread"] == (NONE,) * 8
    assert cells_of(steps=4)["Seconds:   spread"] == ("0%",) * 8


@pytest.mark.parametrize(("width", "blocks"), [(200, 1), (80, 2), (40, 8)])
def test_a_narrow_terminal_gets_fewer_columns_at_a_time_and_all_of_them(
    width: int, blocks: int
) -> None:
    file = io.StringIO()
    print_tables(Console(file=file, width=width), make_results())
    printed = file.getvalue()
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed
    assert all(len(line) <= width for line in printed.splitlines())
    losses = re.findall(r"loss, step 1 +(.*)", printed)
    assert len(losses) == blocks
    assert " ".join(losses).split() == ["10.90000"] * 8
    for row in CONFIGURATIONS:
        assert all(piece in printed for piece in row.title.split())
    run_together = " ".join(printed.split())
    for word in (
        *(row.about for row in CONFIGURATIONS),
        *(s.note for s in sections(make_results())),
    ):
        assert word in run_together


def test_what_json_says_is_what_was_measured() -> None:
    torch, *_, last = make_results(4)
    figures = json.loads(json.dumps(figures_of(last, torch)))
    assert figures["checksum"] == "1" * 64
    assert figures["steady_step_seconds"] == pytest.approx(3.5)
    assert figures["less_bytes_than_torch"] == 30 << 20
    assert "spans" not in figures
