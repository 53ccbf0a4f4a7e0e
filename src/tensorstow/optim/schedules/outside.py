"""``update_on="device"``: one step whose updates run on the accelerator."""

from tensorstow.optim.accelerator.mirrors import flat
from tensorstow.optim.accelerator.updater import Updater, Work
from tensorstow.optim.members import Members
from tensorstow.optim.reference import AdamScalars
from tensorstow.optim.states.pipeline import StepKind
from tensorstow.optim.updates import States, Turn, account


def run_on_device(turn: Turn, kept: Members, states: States, updater: Updater) -> None:
    """Return when every weight is new for whatever the caller's stream does next."""
    kind = StepKind(capture=turn.commits, outside=True)
    kept.store.pipeline.step(turn.rows, turn.scalars, kind)
    updater.run(works_of(turn), all_weights=turn.commits)
    account(turn, states)
    if not turn.commits:
        for due in turn.dues:
            due.member.leave_behind()


def works_of(turn: Turn) -> dict[int, Work]:
    """Return what the step does with each parameter, by number."""
    table = [AdamScalars(*row) for row in turn.scalars.tolist()]
    works = {}
    for due in turn.dues:
        row = turn.rows[due.member.number]
        if due.gradient is not None:
            gradient = flat(due.gradient)
            works[due.member.number] = Work(gradient, table[row.scalars], row.key, row.seed_master)
    return works
