"""One step whose updates run on the accelerator, all or some of them."""

from contextlib import suppress

from tensorstow.formats.reference import AdamScalars
from tensorstow.states.native_pipeline import StepKind
from tensorstow.step.device_update import Work
from tensorstow.step.host_weight import flat
from tensorstow.step.param_table import Members
from tensorstow.step.sides import Sides
from tensorstow.step.step_plan import States, Turn, account


def run_on_device(turn: Turn, kept: Members, states: States, sides: Sides) -> None:
    """Return when every weight is new for whatever the caller's stream does next."""
    pipeline, division = kept.store.pipeline, kept.division
    kind = StepKind(open=True, capture=turn.commits, outside=True)
    pipeline.step(turn.rows, turn.scalars, kind)
    try:
        host, device = sides.run(works_of(turn), all_weights=turn.commits, measured=division.counts)
        pipeline.end_outside()
    except BaseException as error:  # an interrupt too: a chunk may be half a step ahead
        pipeline.poison(error)
        # Whoever goes on from a commit writes to the weights that may still be coming down.
        with suppress(RuntimeError):  # the device fails here once more, and has been told
            sides.link.settle()
        raise
    division.note(host, device, commits=turn.commits)
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
