"""``estimate_zero2_...`` and ``estimate_zero3_...``: DeepSpeed's estimators for this engine.

For ``P`` parameters, all trained, on ``R`` ranks, Adam needs, per rank and in the state format that
loses nothing::

                 weights      gradients    states
    bf16         2 P / R      2 P / R      10 P / R    (both moments, the rest of the fp32 master)
    fp32         4 P / R      4 P / R       8 P / R    (both moments)

Gradients are in host memory, except those of weights on the device. States are in host memory, or
on disk with a ring of 48 MiB; never on the device, even without offload_optimizer. offload_param
places the weights: on the device, with a copy of the rank's share in host memory, which updates
write; or on disk, with three units' in host memory at once, and more if max_in_cpu allows it. In
addition to its share, a rank has two units' weights on the device at once in stage 3, and all of
them in stage 2; a single rank gathers nothing if its weights are on the device. Activations,
buffers and the allocator's rounding are not counted.
"""

import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.base.plan import Plan
from tensorstow.base.sizes import format_bytes
from tensorstow.base.tiers import Tier
from tensorstow.deepspeed.plans import state_format_of
from tensorstow.doorkit.keyword_table import Table, describes, honoured
from tensorstow.fsdp.units import units_of
from tensorstow.planner.placement import Conditions, bytes_of
from tensorstow.planner.sizes import Sizes, UnitSizes

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_DEVICES = {Tier.DEVICE: "none", Tier.HOST: "cpu", Tier.DISK: "nvme"}
_PLANS = {
    2: [Plan(Tier.DEVICE, states, stage=2) for states in (Tier.DISK, Tier.HOST)],
    3: [
        Plan(parameters, states)
        for parameters in (Tier.DISK, Tier.HOST, Tier.DEVICE)
        for states in (Tier.DISK, Tier.HOST)
    ],
}


_CLUSTER: Table = {
    "model": honoured("The model."),
    "total_params": honoured("The number of parameters."),
    "num_gpus_per_node": honoured("GPUs per node; fewer than 1 raise OptionError."),
    "num_nodes": honoured("Nodes; fewer than 1 raise OptionError."),
    "additional_buffer_factor": honoured("Bytes are multiplied by it; DeepSpeed's default is 1.5."),
}


class _Setup(NamedTuple):
    """The arguments of an estimate."""

    total_params: int
    largest_layer_params: int
    num_gpus_per_node: int
    num_nodes: int
    additional_buffer_factor: float

    @property
    def ranks(self) -> int:
        return self.num_gpus_per_node * self.num_nodes


@describes(_CLUSTER)
def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """Print the memory that a model needs in stage 2."""
    total = sum(p.numel() for p in model.parameters())
    estimate_zero2_model_states_mem_needs_all_cold(
        total, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


@describes(_CLUSTER)
def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """Print the memory that a model of a given size needs in stage 2."""
    setup = _Setup(int(total_params), 0, num_gpus_per_node, num_nodes, additional_buffer_factor)
    sys.stdout.write(_table(2, setup))


@describes(_CLUSTER)
def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """Print the memory that a model needs in stage 3; its units are those of ``stow``."""
    units = [sum(p.numel() for p in unit.parameters.values()) for unit in units_of(model)]
    estimate_zero3_model_states_mem_needs_all_cold(
        sum(units), max(units), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


@describes(_CLUSTER)
def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> None:
    """Print the memory that a model of a given size needs in stage 3.

    Args:
        largest_layer_params: The parameters of the largest unit: a transformer block, or the
            embeddings with the head.
    """
    setup = _Setup(
        int(total_params),
        int(largest_layer_params),
        num_gpus_per_node,
        num_nodes,
        additional_buffer_factor,
    )
    sys.stdout.write(_table(3, setup))


def _table(stage: int, setup: _Setup) -> str:
    for name, value, least in zip(setup._fields, setup, (0, 0, 1, 1, 0), strict=True):
        if value < least:
            message = f"{name}={value} was given: it is at least {least}."
            raise OptionError(message)
    title = (
        f"Weights, gradients and Adam's states in ZeRO-{stage}: {setup.total_params:,} parameters,"
        f" {setup.num_nodes} x {setup.num_gpus_per_node} = {setup.ranks} GPUs."
    )
    head = f"{'per GPU':>12} | {'host per node':>13} | {'disk per node':>13} | options"
    return "\n".join([title, head, *_rows(stage, setup), ""])


def _rows(stage: int, setup: _Setup) -> Iterator[str]:
    for dtype in _DTYPES:
        for plan in _PLANS[stage]:
            gpu, host, disk = (format_bytes(n) for n in _needs(plan, dtype, setup))
            places = f"offload_optimizer={_DEVICES[plan.states]}"
            if stage == 3:
                places = f"offload_param={_DEVICES[plan.parameters]}, {places}"
            yield f"{gpu:>12} | {host:>13} | {disk:>13} | {dtype}, {places}"


def _needs(plan: Plan, dtype: str, setup: _Setup) -> tuple[int, int, int]:
    """Return bytes per GPU, and of host memory and of disk space per node."""
    kept_as = state_format_of(_DTYPES[dtype])
    conditions = Conditions(device_is_host=False, state_format=kept_as)
    held = bytes_of(plan, _sizes(_DTYPES[dtype], setup), conditions)
    per_rank = setup.additional_buffer_factor
    per_node = setup.num_gpus_per_node * per_rank
    gpu, host, disk = held[Tier.DEVICE], held[Tier.HOST], held[Tier.DISK]
    return int(gpu * per_rank), int(host * per_node), int(disk * per_node)


def _sizes(dtype: torch.dtype, setup: _Setup) -> Sizes:
    """Return a model of units of the largest size, and one of what is left."""
    total, ranks = setup.total_params, setup.ranks
    largest = min(setup.largest_layer_params or total, total)
    count, rest = divmod(total, largest) if largest else (0, 0)
    units: list[UnitSizes] = []
    for elements in [*[largest] * count, *[rest] * bool(rest)]:
        share = -(-elements // ranks)
        nbytes = dtype.itemsize * share
        units.append(
            UnitSizes(str(len(units)), dtype.itemsize * elements, nbytes, ((dtype, share),))
        )
    return Sizes(tuple(units), ranks)
