"""`tensorstow recover`: write a new manifest of what is intact in a damaged one."""

import argparse
from contextlib import ExitStack
from typing import Any

from tensorstow.cli.output import by_rank, print_json
from tensorstow.store.rank_dirs import stores_in
from tensorstow.store.recovery import DAMAGED_NAME, Recovery, hold_recovery, recover
from tensorstow.store.verify import describe


def run(given: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    with ExitStack() as locks:
        first, *others = given.directories
        directories = [first] if others else stores_in(first)
        found = [locks.enter_context(hold_recovery([d, *others])) for d in directories]
        damaged = [each for each in found if each.damage is not None]
        for each in damaged if given.yes else ():
            recover(each)
    if given.json:
        facts = [_facts(each, is_recovered=given.yes) for each in found]
        print_json(by_rank(facts, directories, first))
        return 0
    for each in found:
        for line in _lines(each, is_recovered=given.yes):
            print(line)
    if damaged and not given.yes:
        what = "go on from what is whole" if any(each.whole for each in damaged) else "begin anew"
        print(f"nothing was touched: add --yes to {what}")
    return 0


def _facts(found: Recovery, *, is_recovered: bool) -> dict[str, Any]:
    return {
        "recovered": is_recovered and found.damage is not None,
        "directory": found.directories[0],
        "run": found.run,
        "damage": found.damage,
        "newest": {"generation": found.newest.generation, "step": found.newest.step},
        "whole": [
            {"generation": g.number, "step": g.step, "snapshots": g.names} for g in found.whole
        ],
    }


def _lines(found: Recovery, *, is_recovered: bool) -> list[str]:
    place = found.directories[0]
    if found.damage is None:
        return [f"{place}: nothing is damaged, there is nothing to do"]
    whole = ", ".join(map(describe, found.whole)) or "nothing"
    lines = [f"{place}: {found.damage}", f"whole: {whole}"]
    lines += [f"dropped, and written over since: {describe(each)}" for each in found.overwritten]
    if not found.has_newest:
        number, step = found.newest.generation, found.newest.step
        lines.append(f"lost: generation {number} (step {step}), the newest that was reported")
    if is_recovered:
        goes = "the run goes on from what is whole" if found.whole else "a new run begins there"
        lines.append(f"{goes}; the manifest before is {place / DAMAGED_NAME}")
    return lines
