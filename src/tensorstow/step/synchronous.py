"""``overlap="none"``: updates run inside ``step()``."""

from tensorstow.step.managed_param import StepPlan
from tensorstow.step.publish import deliver
from tensorstow.step.schedule import Schedule
from tensorstow.step.step_plan import States, record_step


class Synchronous(Schedule):
    """``overlap="none"``."""

    def step(self, plan: StepPlan, states: States) -> None:
        """Return when every weight is new."""
        path = self._params.path
        path.begin(plan)
        try:
            path.close()
            path.wait()
        except BaseException as error:
            self._params.store.pipeline.poison(error)
            raise
        record_step(plan, states)
        for update in plan.updates:
            deliver(update.param)
