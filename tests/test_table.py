import io

from rich.console import Console

from demo_results import make_results
from tensorstow.cli.demo.table import NONE, render, sections


def cells_of(steps: int = 3) -> dict[str, tuple[str, ...]]:
    return {
        f"{section.title}: {line.label}": line.cells
        for section in sections(make_results(steps))
        for line in section.lines
    }


def test_every_figure_is_there_for_every_row() -> None:
    cells = cells_of()
    assert all(len(row) == 5 for row in cells.values())
    assert cells["Result: loss, step 3"] == ("10.92000",) * 5
    assert cells["Seconds: later steps, median"] == ("3.50",) * 5
    assert cells["Seconds: later ones, median"] == ("0.500",) * 5
    assert cells["Process memory, MiB: peak RSS"] == ("200.0",) * 5
    below = cells["Process memory, MiB: end, below torch"]
    assert below == (NONE, "0.0", "30.0", "30.0", "30.0")
    assert cells["Optimizer states, MiB: in RAM, measured"] == ("1.0", "1.0", NONE, NONE, NONE)
    assert cells["Optimizer states, MiB: on disk, measured"] == (NONE, NONE, "1.0", "1.0", "1.0")
    assert cells["Disk traffic: read, GB"] == (NONE, NONE, *("0.00629",) * 3)
    assert cells["Disk traffic: not read again, GB"] == (NONE, NONE, NONE, *("0.00105",) * 2)
    assert cells["Disk traffic: GB/s in opt.step()"] == (NONE, NONE, *("0.00",) * 3)
    assert cells["Disk traffic: outside opt.step()"] == (NONE, NONE, *("33%",) * 3)


def test_one_step_has_no_later_ones() -> None:
    assert cells_of(steps=1)["Seconds: later steps, median"] == (NONE,) * 5


def test_it_fits_eighty_columns() -> None:
    wide, narrow = io.StringIO(), io.StringIO()
    for file, width in ((wide, 200), (narrow, 80)):
        Console(file=file, width=width).print(render(make_results()))
    assert "\N{HORIZONTAL ELLIPSIS}" not in narrow.getvalue()
    assert [line.split() for line in narrow.getvalue().splitlines() if line.strip(" \u2500")] == [
        line.split() for line in wide.getvalue().splitlines() if line.strip(" \u2500")
    ]
