"""Training in which a forward or a backward is ended by an exception, and goes on."""

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import tensorstow
from ranks.stowed import finish, groups_of, loss_of, model_of
from tensorstow import Plan

BROKEN_STEP = 1
STEPS = 4


class BoomError(Exception):
    """What ends it."""


class BoomInBackward(torch.autograd.Function):
    """Passes on, and raises on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        """Return a copy."""
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        """Raise."""
        del ctx, gradients
        raise BoomError


def _in_forward(module: nn.Module, *_: object) -> None:
    del module
    raise BoomError


def _in_backward(module: nn.Module, _: object, out: torch.Tensor) -> torch.Tensor:
    del module
    return BoomInBackward.apply(out)


HOOKS = {"forward": _in_forward, "backward": _in_backward}


def run_into(model: nn.Module, where: str, step: int) -> None:
    """Let a forward, or the backward behind it, end by an exception in the middle block."""
    handle = model.blocks[1].register_forward_hook(HOOKS[where])
    try:
        loss_of(model, dist.get_rank(), step, 0).backward()
    except BoomError:
        pass
    else:
        message = "nothing was raised"
        raise AssertionError(message)
    finally:
        handle.remove()


def _mesh() -> Any:  # noqa: ANN401
    return init_device_mesh("cpu", (dist.get_world_size(),))


def broken(plan: Plan, where: str, *, sharded: bool) -> list[torch.Tensor]:
    """Train with one step broken, whose gradients are dropped; return whole weights."""
    mesh = _mesh() if sharded else None
    model, optimizer = model_of(torch.float32), None
    if sharded:
        model, optimizer = tensorstow.stow(model, groups_of, plan=plan, mesh=mesh)
    else:
        optimizer = groups_of(list(model.named_parameters()))
    for step in range(STEPS):
        if step == BROKEN_STEP:
            run_into(model, where, step)
            optimizer.zero_grad()
            continue
        loss_of(model, dist.get_rank(), step, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return finish(model, optimizer)


def aborted_look(plan: Plan, *, sharded: bool) -> tuple[list[torch.Tensor], float]:
    """End a look (a forward without gradients) between backward and step; clip by torch."""
    model = model_of(torch.float32)
    if sharded:
        model, optimizer = tensorstow.stow(model, groups_of, plan=plan, mesh=_mesh())
    else:
        optimizer = groups_of(list(model.named_parameters()))
    norm = 0.0
    for step in range(STEPS):
        loss_of(model, dist.get_rank(), step, 0).backward()
        with torch.no_grad():
            handle = model.blocks[1].register_forward_hook(_in_forward)
            with suppress(BoomError):
                loss_of(model, dist.get_rank(), step, 0)
            handle.remove()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        optimizer.step()
        optimizer.zero_grad()
    return finish(model, optimizer), norm


def half_a_backward(plan: Plan) -> str:
    """Step by the gradients of half a backward; return what is said."""
    model, optimizer = tensorstow.stow(model_of(torch.float32), groups_of, plan=plan, mesh=_mesh())
    loss_of(model, 0, 0, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    run_into(model, "backward", 1)
    try:
        optimizer.step()
    except tensorstow.StowError as error:
        return str(error)
    return "nothing was said"


def resumed(directory: Path, plan: Plan, where: str) -> tuple[list[float], list[float]]:
    """Return losses behind a resume that follows a broken step, and those that are right."""
    make = partial(groups_of, dir=directory, commit_every=None)
    model, optimizer = tensorstow.stow(model_of(torch.float32), make, plan=plan, mesh=_mesh())

    def train(steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = loss_of(model, dist.get_rank(), step, 0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    train(range(2))
    optimizer.commit()
    right = train(range(2, 4))
    run_into(model, where, 4)
    optimizer.resume()
    got = train(range(2, 4))
    optimizer.close()
    return got, right


def tied_sums(*, sharded: bool) -> list[torch.Tensor]:
    """Train a bf16 model whose embedding is used twice, in several micro-batches."""
    model = model_of(torch.bfloat16)
    mesh = _mesh() if sharded else None
    model, optimizer = tensorstow.stow(model, groups_of, plan=Plan(), mesh=mesh)
    for step in range(2):
        for micro in range(4):
            loss_of(model, 0, step, micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    return finish(model, optimizer)


def unrecoverable() -> str:
    """End a backward where torch has no way of recovering; return what is said."""
    model, optimizer = tensorstow.stow(
        model_of(torch.float32), groups_of, plan=Plan(), mesh=_mesh()
    )
    run_into(model, "backward", 0)
    optimizer.zero_grad()
    with patch.object(FSDPModule, "reset_iter_state", None):
        try:
            loss_of(model, 0, 0, 0)
        except tensorstow.StowError as error:
            return str(error)
    return "nothing was said"
