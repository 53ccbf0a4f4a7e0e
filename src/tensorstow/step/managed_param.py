"""One parameter of an optimizer: its states' number and format, and its update in a step."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tensorstow.base.errors import OptionError, StowError
from tensorstow.base.tiers import Tier
from tensorstow.formats.reference import AdamScalars
from tensorstow.io import device_link
from tensorstow.states.layout import Family
from tensorstow.states.native_pipeline import StepRow
from tensorstow.step.host_weight import HostWeight
from tensorstow.tensors.dtensor import (
    Order,
    Pager,
    Stamp,
    in_order,
    order_of,
    out_of_order,
    pinned_by,
    stamp_of,
)


@dataclass(slots=True)
class ManagedParam:
    """A parameter whose states an optimizer keeps, and its number in the store."""

    owner: torch.Tensor
    """The user's parameter: in groups, in ``optimizer.state``, with ``.grad``."""
    shard: torch.Tensor
    """This rank's shard ([Note: Shards]); without FSDP2 the parameter itself."""
    number: int
    """Its name in the store."""
    family: Family
    numel: int
    views: dict[str, torch.Tensor]
    """Its entry in ``optimizer.state``: its states in its shape if all are in RAM, else
    placeholders."""
    host: torch.Tensor | None = None
    """A copy that the step updates in place of the weight, with ``nan_until_published``."""
    begun: bool = False
    """Whether it has states that are not zero."""
    written: Stamp | None = None
    """Version counter and address after our last update; a difference means a write by others."""
    host_weight: HostWeight | None = None
    """Its weight in host memory, if the parameter is on an accelerator."""
    pager: Pager | None = None
    """The buffer that holds its weight, if that is on disk."""
    order: Order | None = None
    """The order of its dimensions in memory; None: row-major ([Note: Memory formats])."""
    updates_on_device: bool = False
    """Whether the device updates elements of it."""
    updates_on_host: bool = True
    """Whether the host updates elements of it."""
    tier: Tier = Tier.HOST
    """The tier of its weight, which decides by which feed its gradient goes ([Note: Feeds])."""

    @property
    def parameter(self) -> torch.Tensor:
        """Return the shard as one run of elements in memory; most are one already.

        Raises OptionError if its data was replaced by data of other dimensions.
        """
        if self.order is None:
            return self.shard
        if self.shard.dim() != len(self.order):
            message = (
                f"A parameter has {self.shard.dim()} dimensions and had {len(self.order)} when the"
                " optimizer was made: its data was replaced. Make a new optimizer."
            )
            raise OptionError(message)
        return self.shard.detach().permute(self.order)

    def fits(self, group: Mapping[str, Any]) -> bool:
        """Return whether the parameter and its group still match its states."""
        family, parameter = self.family, self.parameter
        return (
            parameter.numel() == self.numel
            and parameter.dtype == family.dtype
            and bool(group["amsgrad"]) == family.amsgrad
            and (group.get("ema") is not None) == family.ema
            and device_link.is_remote(parameter) == (self.tier is Tier.DEVICE)
        )

    @property
    def written_by_others(self) -> bool:
        """Return whether a 16-bit weight must be compared with its master."""
        return self.written != stamp_of(self.parameter, self.owner)

    def held(self, *, for_write: bool = False) -> AbstractContextManager[None]:
        """Pin the weight in memory inside the block."""
        return pinned_by(self.pager, for_write=for_write)

    @property
    def weight(self) -> torch.Tensor:
        """Return the memory that the kernel writes."""
        if self.tier is Tier.DEVICE:
            return self.on_host.host
        return self.parameter if self.host is None else self.host

    @property
    def on_host(self) -> HostWeight:
        """Return the weight in host memory of a parameter on an accelerator."""
        if self.host_weight is None:
            message = f"A weight in host memory was requested, and the parameter is on {self.tier}."
            raise StowError(message)
        return self.host_weight

    def remember(self) -> None:
        """Mark the weight as written by us, so that later writes by others are detected."""
        self.written = stamp_of(self.parameter, self.owner)
        if self.tier is Tier.DEVICE:
            self.on_host.remember()

    def mark_stale(self) -> None:
        """Mark the host weight as stale if an update on the device did not copy all of it."""
        if self.updates_on_device and self.family.dtype == torch.float32:
            self.on_host.mark_stale()

    @property
    def needs_host_weight(self) -> bool:
        """Return whether a step that commits nothing reads the whole of a stale host weight.

        True for 16-bit weights, which masters must match. The host's elements of an fp32 weight
        have not changed since its last update, unless the user has written the parameter.
        """
        if self.family.dtype != torch.float32 or not self.updates_on_device:
            return True
        return self.updates_on_host and self.written_by_others


class ParamUpdate(NamedTuple):
    """A parameter that has a gradient in this step."""

    group: dict[str, Any]
    param: ManagedParam
    gradient: torch.Tensor | None
    """Contiguous; None if it is still to come."""
    scale: float = 1.0
    """The number by which the update divides ``gradient`` ([Note: Unscaling])."""


@dataclass(slots=True)
class StepPlan:
    """One step: the pipeline's input, and references that keep it alive until it is published."""

    updates: list[ParamUpdate]
    counts: list[torch.Tensor]
    """Each parameter's step count, before this step."""
    rows: list[StepRow]
    scalars: Sequence[AdamScalars] = ()
    """Those of the rows, by their numbers."""
    commits: bool = False
    uploads: bool = True
    """New weights go to their parameters on an accelerator; False: they stay in host memory."""


def in_order_of(param: ManagedParam, state: torch.Tensor) -> torch.Tensor:
    """Return a saved state of ``param``, of any shape, with its elements as in memory."""
    return state if param.order is None else state.reshape(param.shard.shape).permute(param.order)


def in_shape_of(shard: torch.Tensor, states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return 1-D states, in the order of the shard's memory, in its shape."""
    order = order_of(shard)
    shape = in_order(shard, order).shape
    return {name: out_of_order(state.view(shape), order) for name, state in states.items()}


# --- new weights that were written to a copy ---


def write_to_copies(plan: StepPlan) -> None:
    """Redirect the pipeline to copies of the weights, which tests then fill with NaN."""
    for update in plan.updates:
        param = update.param
        if param.host_weight is not None:
            if not param.updates_on_device:  # the device would write the weight in place
                param.host = param.host_weight.host  # this is a copy already
            continue
        if param.pager is not None:
            continue  # it is in memory while it is updated alone: a read of it waits anyway
        param.host = param.parameter.detach().clone()
        row = plan.rows[param.number]
        plan.rows[param.number] = row._replace(weight=param.host)


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
