"""Weights that the kernel writes in host memory of their own, and how they get to the parameter."""

from dataclasses import replace

import torch

from tensorstow.step.param_table import Member
from tensorstow.step.step_plan import Turn


def shadow(turn: Turn) -> None:
    """Let the pipeline write to copies of the weights: for tests, which ``hide`` the weights."""
    for due in turn.dues:
        member = due.member
        if member.mirror is not None:
            member.host = member.mirror.host  # which is a copy already
            continue
        member.host = member.parameter.detach().clone()
        row = turn.rows[member.number]
        turn.rows[member.number] = replace(row, weight=member.host)


@torch.no_grad()
def hide(member: Member) -> None:
    """Make a weight NaN: whoever reads it before it is delivered computes NaN."""
    if member.host is not None:
        member.parameter.fill_(torch.nan)


@torch.no_grad()
def deliver(member: Member) -> None:
    """Copy the new weight from host memory to the parameter, where the two are not one."""
    if member.host is None:
        return
    if member.mirror is None:  # else the ferry does it
        member.parameter.copy_(member.host)
    member.host = None
    member.remember()
