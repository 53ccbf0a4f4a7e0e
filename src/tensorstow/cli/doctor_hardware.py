"""What is special about a machine that `tensorstow doctor` looks at, and the setting that helps."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tensorstow.base.cores import read_or_empty
from tensorstow.base.nodes import parse_list

_INTEGRATED = ("Jetson", "DGX Spark", "DGX_Spark", "GB10")
"""Words in the names of machines whose GPU has no memory of its own."""


def examine_hardware(root: Path = Path("/")) -> dict[str, Any]:
    """Return what is special about this machine, as plain values.

    Args:
        root: Where the system's files are.
    """
    nodes = root / "sys/devices/system/node"
    with_cores = parse_list(read_or_empty(nodes / "has_cpu"))
    with_memory = parse_list(read_or_empty(nodes / "has_memory"))
    names = (
        read_or_empty(root / "proc/device-tree/model"),
        read_or_empty(root / "sys/class/dmi/id/product_name"),
    )
    return {
        "is_wsl": "microsoft" in read_or_empty(root / "proc/sys/kernel/osrelease").lower(),
        "nodes_with_cores": with_cores,
        "memory_nodes": [number for number in with_memory if number not in with_cores],
        "is_unified": any(mark in name for mark in _INTEGRATED for name in names)
        or _is_integrated(),
        "build": build_of_torch(),
    }


def build_of_torch() -> str | None:
    """Return "ROCm" or "XPU" for a torch of that build with a device to use; else None."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return None
    if torch.version.hip is not None:
        return "ROCm"
    return "XPU" if device.type == "xpu" else None


def _is_integrated() -> bool:
    """Return whether the current accelerator says that it shares the machine's memory."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type not in {"cuda", "xpu"}:
        return False
    properties: Any = torch.get_device_module(device).get_device_properties()
    return bool(getattr(properties, "is_integrated", False))


def notes_of(hardware: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each fact that changes what is best, with the setting that helps."""
    if hardware["is_unified"]:
        yield (
            "The GPU has no memory of its own: what goes to host memory frees none of it. Put"
            ' states, and weights if need be, on disk: Plan(states="disk").'
        )
    if hardware["memory_nodes"] and hardware["nodes_with_cores"]:
        numbers, usual = (
            ",".join(map(str, hardware[key])) for key in ("memory_nodes", "nodes_with_cores")
        )
        yield (
            f"NUMA node {numbers} is memory without cores, as that of a GPU (GH200) or of CXL. Keep"
            f" host memory out of it: numactl --membind={usual} python train.py."
        )
    if hardware["is_wsl"]:
        yield (
            "This is WSL: drives of Windows (/mnt/c) are slow, and memory is what .wslconfig"
            " grants. Keep dir= and $TMPDIR in Linux's own filesystem, and raise memory= there."
        )
    if hardware["build"] is not None:
        yield (
            f"This torch is for {hardware['build']}, on which our tests have not run: updates on"
            " the GPU are torch's own operations. Try `tensorstow verify` before a long run."
        )
