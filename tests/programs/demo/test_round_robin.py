"""Rows take turns: in which order, and whether all of them are there at once."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from demo_results import make_result

from demo import round_robin
from demo.configurations import CONFIGURATIONS, FULL, SMALL
from demo.round_robin import fits_at_once, run_rows, turns_of

THREE = CONFIGURATIONS[:3]


class Stand:
    """Stands for a row's process: says at once what a real one says in time."""

    def __init__(self, key: str, log: list[str]) -> None:
        self.key = key
        self.log = log
        self.said: list[dict[str, Any]] = [{"step": -1, "part": "build"}, {"waits": 0}]

    def messages(self) -> Iterator[dict[str, Any]]:
        while self.said:
            if "build" in self.said[0].values():
                self.log.append(f"{self.key} is loaded")
            yield self.said.pop(0)

    def tell(self, line: str) -> None:
        self.log.append(f"{self.key} {line}")
        self.said += [{"step": 0, "part": "forward"}, {"waits": 2}]

    def tell_no_more(self) -> None:
        row = next(row for row in CONFIGURATIONS if row.key == self.key)
        self.said.append(json.loads(make_result(row).to_json()))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []

    @contextmanager
    def started(_name: str, _module: str, arguments: list[str], _folder: Path) -> Iterator[Stand]:
        key = arguments[1]
        lines.append(f"{key} begins")
        yield Stand(key, lines)
        lines.append(f"{key} ends")

    monkeypatch.setattr(round_robin, "started", started)
    return lines


def run(*, at_once: bool) -> list[str]:
    announced: list[str] = []
    results = run_rows(
        THREE,
        5,
        [],
        lambda row, step, part: announced.append(f"{row.key} {step} {part}"),
        at_once=at_once,
    )
    assert [result.key for result in results] == ["torch", "ram", "naive"]
    return announced


def test_rows_take_turns_there_and_back(log: list[str]) -> None:
    announced = run(at_once=True)
    assert log == [
        "torch begins", "torch is loaded", "ram begins", "naive begins",
        "ram is loaded", "naive is loaded",
        "torch 2", "ram 2", "naive 2",
        "naive 2", "ram 2", "torch 2",
        "torch 1", "ram 1", "naive 1",
        "naive ends", "ram ends", "torch ends",
    ]  # fmt: skip
    assert announced[:4] == ["torch -1 build", "ram -1 build", "naive -1 build", "torch 0 forward"]


def test_one_behind_the_other_where_there_is_no_room(log: list[str]) -> None:
    run(at_once=False)
    took = ["torch 2", "torch 2", "torch 1"]
    assert log[:7] == ["torch begins", "torch is loaded", *took, "torch ends", "ram begins"]


def test_steps_are_cut_into_turns() -> None:
    assert [turns_of(n) for n in (1, 2, 5)] == [[1], [2], [2, 2, 1]]


def test_all_rows_at_once_need_room_in_ram_and_on_disk() -> None:
    ram, disk = FULL.rows_ram_bytes, FULL.rows_disk_bytes
    assert fits_at_once(FULL, disk, ram)
    assert not fits_at_once(FULL, disk - 1, ram)
    assert not fits_at_once(FULL, disk, ram - 1)
    assert SMALL.rows_ram_bytes < ram
