"""Ways to train one bf16 model on a device: with nothing offloaded, and ours."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.accelerator.place import Place
from tensorstow import usage
from tensorstow.base.plan import Plan
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import Overlap, UpdateOn
from tensorstow.fsdp.report import parameter_bytes
from tensorstow.fsdp.sharding import make_mesh
from tensorstow.fsdp.stow import stow
from tensorstow.optim.adam import AdamW
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.states.traffic import TraceEvent

LR = 1e-4
_OURS_DRAM = 26
"""Per bf16 parameter: m, v and the master's low half read and written, the weight too, the gradient
read."""
_STREAMED_DRAM = 22
"""The same where the device updates: the copies read 10 and write 12."""
_PARAMETER, _STATES = 2, 10
"""Bytes: of a bf16 weight or gradient, and of its moments and the low half of its master."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes since a training began."""

    down: float = 0
    up: float = 0
    read: float = 0
    written: float = 0

    def since(self, before: "Moved") -> "Moved":
        """Return what moved since ``before``."""
        return Moved(
            self.down - before.down,
            self.up - before.up,
            self.read - before.read,
            self.written - before.written,
        )

    def each(self, steps: int) -> "Moved":
        """Return a step's share."""
        whole = (self.down, self.up, self.read, self.written)
        return Moved(*(nbytes / steps for nbytes in whole))


@dataclass(frozen=True, slots=True)
class Site:
    """Where a training takes place."""

    place: Place
    directory: Path
    """For states and parameters on disk."""
    sequences: int
    """Of a batch."""


def always() -> bool:
    """Return True."""
    return True


@dataclass
class Training:
    """A model in training."""

    step: Callable[[torch.Tensor], torch.Tensor]
    """Takes one step with a batch of ids; returns the loss, on the device."""
    finish: Callable[[], None]
    """Returns when nothing runs behind the last step."""
    close: Callable[[], None]
    moved: Callable[[], Moved] | None = None
    """By our counters; None: nobody counts."""
    trace: Callable[[], list[TraceEvent]] | None = None
    """What our pipeline did in the last step."""
    is_warm: Callable[[], bool] = always
    """Whether steps are what they stay: ``update_on="auto"`` and ``"hybrid"`` try several first."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train; ``make`` raises whatever a peer's import or compiler does."""

    name: str
    make: Callable[[Site, nn.Module], Training]
    dram_bytes: int = 0
    """Per parameter and step, of host memory, that the update reads and writes."""
    is_ours: bool = False
    may_fail: bool = False
    """Whether the others go on without it, where it is not installed or has no room."""
    on_device: bool = False
    """Ours, parameters on DEVICE and states on HOST: what the targets are about."""
    host_bytes: int = 2
    """Per parameter, of host memory, that a training needs at most."""
    disk_bytes: int = 0
    """Per parameter, on the disk."""


def nothing() -> None:
    """Close what needs no end."""


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the usual loop's step."""

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


# --- nothing offloaded ---


def _computed(site: Site, model: nn.Module) -> Training:
    model = site.place.put(model)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(ids)
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return Training(step, site.place.wait, nothing)


def _whole(site: Site, model: nn.Module) -> Training:
    model = site.place.put(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    return Training(trained(model, optimizer), site.place.wait, nothing)


COMPUTE = Way("forward and backward alone", _computed)
WHOLE = Way("no offload", _whole, may_fail=True)


# --- ours ---


def _alone(site: Site, model: nn.Module, **how: Any) -> Training:  # noqa: ANN401  # AdamW's
    model = site.place.put(model)
    optimizer = AdamW(model.named_parameters(), lr=LR, module=model, **how)
    return _ours(site, model, optimizer)


def _stowed(site: Site, model: nn.Module, *, plan: Plan) -> Training:
    make = partial(AdamW, lr=LR)
    given: dict[str, Any] = {}
    if plan.parameters == Tier.DEVICE:
        site.place.put(model)
    else:  # without a mesh, the CPU in the device's place has nothing to move
        given["mesh"] = make_mesh(site.place.device, stage=plan.stage, replicas=plan.replicas)
    if plan.states == Tier.DISK:
        make = partial(make, durability="none")
        given["dir"] = site.directory
    model, optimizer = stow(model, make, plan=plan, **given)
    return _ours(site, model, optimizer)


def _ours(site: Site, model: nn.Module, optimizer: StowedAdam) -> Training:
    def finish() -> None:
        optimizer.wait()
        optimizer.synchronize()
        site.place.wait()

    def moved() -> Moved:
        states, weights = usage(optimizer=optimizer).traffic, parameter_bytes(model)
        return Moved(
            states.bytes_down + weights.link_bytes_down,
            states.bytes_up + weights.link_bytes_up,
            states.bytes_read + weights.bytes_read,
            states.bytes_written + weights.bytes_written,
        )

    def is_warm() -> bool:
        return optimizer._params().update_router.share_tuner.is_final  # noqa: SLF001  # nobody else asks

    step = trained(model, optimizer)
    return Training(step, finish, optimizer.close, moved, optimizer.trace, is_warm)


def stow_way(parameters: Tier, states: Tier, overlap: Overlap) -> Way:
    """Return the way of ``stow`` with weights and states on these tiers."""
    return Way(
        f"ours, stow, parameters {parameters.name}, states {states.name}, {overlap}",
        partial(_stowed, plan=Plan(parameters=parameters, states=states, overlap=overlap)),
        _OURS_DRAM,
        is_ours=True,
        on_device=parameters == Tier.DEVICE and states == Tier.HOST,
        host_bytes=_PARAMETER * (1 + 2 * (parameters == Tier.HOST))
        + _STATES * (states == Tier.HOST),
        disk_bytes=_PARAMETER * (parameters == Tier.DISK) + _STATES * (states == Tier.DISK),
    )


def _updated_on(update_on: UpdateOn, where: str, dram_bytes: int, overlap: Overlap = "none") -> Way:
    beside = "" if overlap == "none" else f", {overlap}"
    return Way(
        f"ours, the optimizer alone, states HOST, updated {where}{beside}",
        partial(_alone, update_on=update_on, overlap=overlap),
        dram_bytes,
        is_ours=True,
        host_bytes=_PARAMETER + _STATES,
    )


OURS = (
    Way(
        "ours, the optimizer alone, states HOST, backward",
        partial(_alone, overlap="backward"),
        _OURS_DRAM,
        is_ours=True,
        on_device=True,
        host_bytes=_PARAMETER + _STATES,
    ),
    stow_way(Tier.DEVICE, Tier.HOST, "backward"),
    stow_way(Tier.DEVICE, Tier.HOST, "forward"),
    _updated_on("device", "on the device", _STREAMED_DRAM),
    # Of both sides' bytes the more; what moves over the link is counted.
    _updated_on("hybrid", "on both sides", _OURS_DRAM),
    _updated_on("auto", "on the faster side", _OURS_DRAM),
    _updated_on("device", "on the device", _STREAMED_DRAM, "backward"),
    _updated_on("hybrid", "on both sides", _OURS_DRAM, "backward"),
    stow_way(Tier.HOST, Tier.HOST, "forward"),
    stow_way(Tier.HOST, Tier.DISK, "backward"),
    stow_way(Tier.DISK, Tier.DISK, "backward"),
)


def let_go(place: Place) -> None:
    """Give back what the last training held: the next one has the memory to itself."""
    gc.collect()
    place.clear()
    empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None)  # torch 2.13
    if place.is_real and empty_host_cache is not None:
        empty_host_cache()
