"""The NUMA nodes that accelerators are attached to."""

from dataclasses import dataclass

import torch

from tensorstow.base.nodes import node_of_device


@dataclass(frozen=True, slots=True)
class AcceleratorNodes:
    """The node of each device that the process sees; None if it is unknown."""

    nodes: tuple[int | None, ...]
    current: int
    """The device that this process uses."""


def accelerator_nodes(*, initialise: bool = False) -> AcceleratorNodes | None:
    """Return the nodes of CUDA's or ROCm's devices; None if there is none, or it is not in use.

    ``initialise``: look also where the process has not used a device yet. A process that forks
    later must not.
    """
    is_in_use = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    if not is_in_use and not (initialise and torch.cuda.is_available()):
        return None
    nodes = tuple(
        _node_of(torch.cuda.get_device_properties(index))
        for index in range(torch.cuda.device_count())
    )
    return AcceleratorNodes(nodes, torch.cuda.current_device())


def _node_of(properties: object) -> int | None:
    """Return the node of the device with these properties of torch's."""
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    domain, bus, device = parts
    if domain is None or bus is None or device is None:
        return None
    return node_of_device(f"{domain:04x}:{bus:02x}:{device:02x}.0")
