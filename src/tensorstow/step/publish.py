"""Publishes new weights that were written to a copy: copies them to the parameter."""

from dataclasses import replace

import torch

from tensorstow.step.managed_param import ManagedParam, StepPlan


def write_to_copies(plan: StepPlan) -> None:
    """Redirect the pipeline to copies of the weights, which tests then fill with NaN."""
    for update in plan.updates:
        param = update.param
        if param.host_weight is not None:
            if not param.updates_on_device:  # the device would write the weight in place
                param.host = param.host_weight.host  # this is a copy already
            continue
        param.host = param.parameter.detach().clone()
        row = plan.rows[param.number]
        plan.rows[param.number] = replace(row, weight=param.host)


@torch.no_grad()
def fill_with_nan(param: ManagedParam) -> None:
    """Fill a weight with NaN, so that a read before it is published gives NaN."""
    if param.host is not None:
        param.parameter.fill_(torch.nan)


@torch.no_grad()
def publish_weight(param: ManagedParam) -> None:
    """Copy the new weight from host memory to the parameter, if it was not updated in place."""
    if param.host is None:
        return
    if param.host_weight is None:  # otherwise the device feed copies it
        param.parameter.copy_(param.host)
    param.host = None
    param.remember()
