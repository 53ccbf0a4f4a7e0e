"""The axes of stowed training, and the combinations that cover any two values of two of them."""

from collections.abc import Mapping

import torch

from parity.cover import Axes, Row, Value, all_pairs
from ranks.stowed import Course
from tensorstow import Plan

AXES: dict[str, tuple[Value, ...]] = {
    "stage": (3, 0, 1, 2),
    "parameters": ("host", "device", "disk"),
    "states": ("host", "disk"),
    "overlap": ("none", "forward", "backward"),
    "accumulation": (1, 3),
    "clip": ("none", "ours", "torch"),
    "dtype": ("float32", "bfloat16"),
    "compute": ("same", "bfloat16"),
    "frozen": (False, True),
    "resume": ("none", "asked", "due"),
    "world": (1, 2, 4),
}
ON_DEVICE: dict[str, tuple[Value, ...]] = {
    **AXES,
    "parameters": ("device", "host", "disk", "host and device", "everywhere"),
    "update_on": ("host", "device", 0.4, "hybrid", "auto"),
    "replicas": (1, 2),
}
"""Where ranks have an accelerator."""
UNITS = {
    "host and device": {"blocks.1": "device"},
    "everywhere": {"blocks.1": "device", "blocks.2": "disk"},
}


def allowed(row: Mapping[str, Value]) -> bool:
    """Return whether a plan and its optimizer take this."""
    on_disk = row.get("parameters") in {"disk", "everywhere"}
    by_device = row.get("update_on", "host") != "host"
    return not (
        (by_device and row.get("parameters", "device") != "device")
        or (by_device and row.get("overlap") == "forward")
        # Replicas of one rank alone are none, and under stage 0 every rank is one.
        or (row.get("replicas") == 2 and (row.get("world") == 1 or row.get("stage") == 0))
        or (on_disk and (row.get("stage", 3) != 3 or row.get("overlap") == "forward"))
        or (row.get("overlap") == "backward" and row.get("clip", "none") != "none")
        # A sum of several ranks in bf16, or torch's norm in fp32, is another arithmetic.
        or (row.get("clip") == "torch" and row.get("dtype", "float32") != "float32")
    )


def courses(axes: Axes) -> list[tuple[Course, int]]:
    """Return (course, ranks) of every row of the cover."""
    return [(_course(row), int(row["world"])) for row in all_pairs(axes, allowed)]


def _course(row: Row) -> Course:
    units = UNITS.get(str(row["parameters"]), {})
    plan = Plan(
        parameters="host" if units else row["parameters"],
        units=units,
        update_on=row.get("update_on"),
        states=row["states"],
        stage=row["stage"],
        replicas=row.get("replicas", 1),
        overlap=row["overlap"],
        accumulation_steps=row["accumulation"],
    )
    return Course(
        plan,
        dtype=getattr(torch, str(row["dtype"])),
        compute_dtype=None if row["compute"] == "same" else torch.bfloat16,
        clip=None if row["clip"] == "none" else 0.05,
        torch_clips=row["clip"] == "torch",
        frozen=bool(row["frozen"]),
        resume=row["resume"],
        whole=row["world"] == 4,
    )
