"""`tensorstow run recover`: write a new manifest for the intact part of a damaged store."""

import argparse
from contextlib import ExitStack
from typing import Any

from tensorstow.cli.output import make_console, print_by_rank
from tensorstow.cli.scrub import DAMAGED, reading_bar
from tensorstow.store.manifest_copy import DAMAGED_NAME
from tensorstow.store.rank_dirs import stores_in
from tensorstow.store.recovery import Recovery, hold_recovery, recover
from tensorstow.store.verify import describe

LOST = 3


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status.

    1 if something is damaged and was not repaired, 3 if the repair lost something.
    """
    with ExitStack() as locks:
        first, *other_directories = options.directories
        directories = [first] if other_directories else stores_in(first)
        show_progress = locks.enter_context(reading_bar(make_console(to_stderr=True)))
        recoveries = [
            locks.enter_context(hold_recovery([d, *other_directories], show_progress))
            for d in directories
        ]
        damaged = [recovery for recovery in recoveries if recovery.damage is not None]
        is_lossy = any(recovery.lost for recovery in damaged)
        # All ranks or none: their newest generations belong together.
        is_done = options.accept_loss or (options.yes and not is_lossy)
        for recovery in damaged if is_done else ():
            recover(recovery)
    if options.json:
        facts = [_facts(recovery, is_recovered=is_done) for recovery in recoveries]
        print_by_rank(facts, directories, first)
    else:
        for recovery in recoveries:
            print(*_lines(recovery, is_recovered=is_done), sep="\n")
        if damaged and not is_done:
            print(f"nothing was touched: add {_advice(damaged, is_lossy=is_lossy)}")
    if damaged and not is_done:
        return DAMAGED
    return LOST if is_lossy else 0


def _advice(damaged: list[Recovery], *, is_lossy: bool) -> str:
    if not is_lossy:
        return "--yes to go on, which loses nothing that was reported"
    action = (
        "go on from what is whole" if any(recovery.whole for recovery in damaged) else "begin anew"
    )
    return f"--accept-loss to {action}, or restore the directories from a copy"


def _facts(recovery: Recovery, *, is_recovered: bool) -> dict[str, Any]:
    return {
        "recovered": is_recovered and recovery.damage is not None,
        "directory": recovery.directories[0],
        "run": recovery.run,
        "damage": recovery.damage,
        "newest": {"generation": recovery.newest.generation, "step": recovery.newest.step},
        "whole": [
            {"generation": g.number, "step": g.step, "snapshots": g.names} for g in recovery.whole
        ],
        "lost": recovery.lost,
    }


def _lines(recovery: Recovery, *, is_recovered: bool) -> list[str]:
    directory = recovery.directories[0]
    if recovery.damage is None:
        return [f"{directory}: all was read, and nothing is damaged: there is nothing to do"]
    whole = ", ".join(map(describe, recovery.whole)) or "nothing"
    lines = [f"{directory}: {recovery.damage}", f"whole: {whole}"]
    lines += [
        f"damaged, or written over since: {describe(generation)}" for generation in recovery.damaged
    ]
    lines += [f"lost: {loss}" for loss in recovery.lost]
    if is_recovered and recovery.is_copy_only:
        lines.append("the second copy of the manifest is made anew")
    elif is_recovered:
        goes = "the run goes on from what is whole" if recovery.whole else "a new run begins there"
        lines.append(f"{goes}; the manifest before is {directory / DAMAGED_NAME}")
    return lines
