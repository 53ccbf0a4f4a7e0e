"""``load_state_dict`` of Adam: states bypass torch, which would cast them."""

from typing import Any

import torch
from torch.optim import Optimizer

from tensorstow.optim import options
from tensorstow.optim.runtime import OptimizerRuntime
from tensorstow.optim.step_runner import ParamFilter
from tensorstow.states.layout import OptionalStates
from tensorstow.step import validation
from tensorstow.step.managed_param import in_order_of
from tensorstow.step.step_plan import as_step, step_of
from tensorstow.tensors.dtensor import part_of


class StateLoad:
    """One ``load_state_dict`` under way, and the states that are kept back from torch."""

    def __init__(self, runtime: OptimizerRuntime, param_filter: ParamFilter) -> None:
        """Begin with no states kept back; ``param_filter`` decides which parameters have some."""
        self._runtime = runtime
        self._filter = param_filter
        self._kept: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def keep_tensors_back(self, optimizer: Optimizer, full: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict with step counts only; the last hook before torch's own loading.

        Raises OptionError for states that do not fit their parameters, or impossible options.
        """
        options.check_state_dict(full)
        contents = self._runtime.steps.contents
        for group, loaded in zip(contents.groups, full["param_groups"], strict=False):
            validation.check_hyper({**group, **loaded})
        saved = [(key, g) for g in full["param_groups"] for key in g["params"]]
        owner = dict(zip((key for key, _ in saved), contents.parameters(), strict=False))
        # Groups that lack an option get the default of this optimizer.
        optional = {key: OptionalStates.of({**optimizer.defaults, **g}) for key, g in saved}
        light = dict(full["state"])
        for key, entry in full["state"].items():
            if entry and key in owner and self._filter.manages(owner[key]):
                name = f"Parameter {key}"
                validation.check_saved(entry, owner[key], name, optional[key])
                # Raises an error where the format has no place for the states of the saved group.
                self._runtime.params.offload_policy.family(owner[key].dtype, optional[key]).check()
                self._kept[owner[key]] = entry
                light[key] = {"step": as_step(entry["step"])}
        groups = options.with_own_flags(full["param_groups"], contents.groups)
        return {**full, "state": light, "param_groups": groups}

    def put_tensors_in_place(self, optimizer: Optimizer) -> None:
        """Load the states that were kept back; the first hook after torch's own loading."""
        self._put(optimizer.state)
        self._runtime.commits.saved = None
        self._runtime.is_half_loaded = False
        self._runtime.call_lock.allows_reads = True  # for users' hooks

    def _put(self, entries: dict[torch.Tensor, Any]) -> None:
        params, contents = self._runtime.params, self._runtime.steps.contents
        optional = {id(p): OptionalStates.of(g) for g in contents.groups for p in g["params"]}
        if params.differ(optional):
            params.renew()  # the saved groups have another amsgrad or ema: other states exist
        self._runtime.steps.attach(
            p for p in contents.parameters() if validation.is_to_be_trained(p) or p in self._kept
        )
        managed = [(params.get(parameter), entry) for parameter, entry in self._kept.items()]
        states: dict[int, dict[str, torch.Tensor]] = {m.number: {} for m in params.all()}
        for param, entry in managed:
            states[param.number] = {
                k: in_order_of(param, part_of(v, param.owner, f"The saved {k!r}"))
                for k, v in entry.items()
                if k != "step"
            }
        params.store.put(states)
        for param in params.all():
            param.written = None  # compared with its master at the next update
        for param, entry in managed:
            param.begun = False
            entries[param.owner] = {"step": as_step(entry["step"]), **param.views}
            step_of(param, entries[param.owner], params.store)
