"""Copies a new weight from host memory of its own to the parameter."""

from dataclasses import replace

import torch

from tensorstow.step.managed_param import ManagedParam, StepPlan


def shadow(plan: StepPlan) -> None:
    """Let the pipeline write to copies of the weights: for tests, which ``hide`` the weights."""
    for update in plan.updates:
        param = update.param
        if param.host_weight is not None:
            if not param.updated_there:  # where the weight is written in its own memory
                param.host = param.host_weight.host  # which is a copy already
            continue
        param.host = param.parameter.detach().clone()
        row = plan.rows[param.number]
        plan.rows[param.number] = replace(row, weight=param.host)


@torch.no_grad()
def hide(param: ManagedParam) -> None:
    """Make a weight NaN: whoever reads it before it is delivered computes NaN."""
    if param.host is not None:
        param.parameter.fill_(torch.nan)


@torch.no_grad()
def deliver(param: ManagedParam) -> None:
    """Copy the new weight from host memory to the parameter, where the two are not one."""
    if param.host is None:
        return
    if param.host_weight is None:  # else the ferry does it
        param.parameter.copy_(param.host)
    param.host = None
    param.remember()
