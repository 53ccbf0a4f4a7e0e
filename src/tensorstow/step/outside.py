"""One step whose updates run on the accelerator, all or some of them."""

from contextlib import suppress

from tensorstow.formats.reference import AdamScalars
from tensorstow.states.native_pipeline import StepKind
from tensorstow.step.device_update import Work
from tensorstow.step.host_weight import flat
from tensorstow.step.param_table import ParamTable
from tensorstow.step.sides import Sides
from tensorstow.step.step_plan import States, StepPlan, record_step


def run_on_device(plan: StepPlan, params: ParamTable, states: States, sides: Sides) -> None:
    """Return when every weight is new for whatever the caller's stream does next."""
    pipeline, division = params.store.pipeline, params.division
    kind = StepKind(open=True, capture=plan.commits, outside=True)
    pipeline.step(plan.rows, plan.scalars, kind)
    try:
        host, device = sides.run(works_of(plan), all_weights=plan.commits, measured=division.counts)
        pipeline.end_outside()
    except BaseException as error:  # an interrupt too: a chunk may be half a step ahead
        pipeline.poison(error)
        # Whoever goes on from a commit writes to the weights that may still be coming down.
        with suppress(RuntimeError):  # the device fails here once more, and has been told
            sides.link.synchronize()
        raise
    division.note(host, device, commits=plan.commits)
    record_step(plan, states)
    if not plan.commits:
        for update in plan.updates:
            update.param.leave_behind()


def works_of(plan: StepPlan) -> dict[int, Work]:
    """Return what the step does with each parameter, by number."""
    table = [AdamScalars(*row) for row in plan.scalars.tolist()]
    works = {}
    for update in plan.updates:
        row = plan.rows[update.param.number]
        if update.gradient is not None:
            gradient = flat(update.gradient)
            works[update.param.number] = Work(
                gradient, table[row.scalars], row.key, row.seed_master
            )
    return works
