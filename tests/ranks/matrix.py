"""The axes of stowed training, and the combinations that cover any two values of two of them."""

from collections.abc import Mapping
from typing import Any

import torch

from parity.cover import Axes, Row, Value, all_pairs
from ranks.stowed import RunConfig
from tensorstow import Plan

AXES: dict[str, tuple[Value, ...]] = {
    "stage": (3, 0, 1, 2),
    "parameters": ("host", "device", "disk"),
    "states": ("host", "disk"),
    "overlap": ("none", "forward", "backward", "speculative"),
    "accumulation": (1, 3),
    "micro_batches": (1, 2),
    "clip": ("none", "ours", "torch"),
    "dtype": ("float32", "bfloat16"),
    "compute": ("same", "bfloat16"),
    "frozen": (False, True),
    "resume": ("none", "asked", "due"),
    "activations": ("keep", "disk", "recompute", "all on disk"),
    "in_parts": (False, True),
    "world": (1, 2, 4),
}
ON_DEVICE: dict[str, tuple[Value, ...]] = {
    **AXES,
    "parameters": ("device", "host", "disk", "host and device", "everywhere"),
    "update_on": ("host", "device", 0.4, "hybrid", "auto"),
    "replicas": (1, 2),
    "stay": (False, True),
    "activations": ("keep", "host", "disk", "recompute"),
}
"""Where ranks have an accelerator."""
GEMINI: dict[str, tuple[Value, ...]] = {
    "accumulation": (1, 2),
    "clip": (False, True),
    "dtype": ("float32", "bfloat16", "float32 in bfloat16"),
    "tied": (True, False),
    "frozen": (False, True),
    "saved": ("no", "one", "many"),
    "on disk": (0.0, 0.6),
    "sharded": (1.0, 0.0),
    "world": (1, 2),
}
"""Through ``GeminiPlugin``."""
PLACED: dict[str, dict[str, Any]] = {
    "states off": {"offload_optim_frac": 1.0, "shard_param_frac": 0.0},
    "half off": {"offload_optim_frac": 1.0, "offload_param_frac": 0.5, "max_prefetch": 1},
    "all off": {"offload_optim_frac": 1.0, "offload_param_frac": 1.0},
}
"""Arguments that have all updates on the host, where they are ours."""
GEMINI_ON_DEVICE: dict[str, tuple[Value, ...]] = {
    "placed": tuple(PLACED),
    **GEMINI,
    "saved": ("no", "many"),
    "sharded": (1.0,),
}
UNITS = {
    "host and device": {"blocks.1": "device"},
    "everywhere": {"blocks.1": "device", "blocks.2": "disk"},
}


def allowed(row: Mapping[str, Value]) -> bool:
    """Return whether a plan and its optimizer take this."""
    on_disk = row.get("parameters") in {"disk", "everywhere"}
    by_device = row.get("update_on", "host") != "host"
    in_host_memory = row.get("parameters", "host") not in {"device", "disk"}
    in_units = row.get("parameters") != "device" and row.get("stage", 3) == 3 and not by_device
    in_parts = row.get("in_parts") or row.get("world") == 4
    return not (
        # It is for weights that are read, and sums what runs whole (a loss in chunks) at once.
        (row.get("micro_batches") == 2 and (not in_units or in_parts))
        # What four ranks compute has gradients of few values, by a forward of its own.
        or (row.get("in_parts") and row.get("world") == 4)
        # Copies stay of what is in host memory, and gathered twice.
        or (row.get("stay") and (not in_host_memory or by_device or row.get("stage", 3) != 3))
        or (by_device and row.get("parameters", "device") != "device")
        or (by_device and row.get("overlap") == "forward")
        # Replicas of one rank alone are none, and under stage 0 every rank is one.
        or (row.get("replicas") == 2 and (row.get("world") == 1 or row.get("stage") == 0))
        or (on_disk and row.get("stage", 3) != 3)
        or (row.get("overlap") == "backward" and row.get("clip", "none") != "none")
        or (row.get("overlap") == "speculative" and not _can_undo(row, by_device=by_device))
        # A sum of several ranks in bf16, or torch's norm in fp32, is another arithmetic.
        or (row.get("clip") == "torch" and row.get("dtype", "float32") != "float32")
    )


def _can_undo(row: Mapping[str, Value], *, by_device: bool) -> bool:
    return row.get("states", "disk") == "disk" and not by_device


def configs(axes: Axes) -> list[tuple[RunConfig, int]]:
    """Return (config, ranks) of every row of the cover."""
    return [(_config(row), int(row["world"])) for row in all_pairs(axes, allowed)]


def _config(row: Row) -> RunConfig:
    units = UNITS.get(str(row["parameters"]), {})
    plan = Plan(
        parameters="host" if units else row["parameters"],
        parameter_units=units,
        update_on=row.get("update_on"),
        states=row["states"],
        stage=row["stage"],
        replicas=row.get("replicas", 1),
        overlap=row["overlap"],
        accumulation_steps=row["accumulation"],
        micro_batches=row["micro_batches"],
        device_budget="1GiB" if row.get("stay") else None,
        activations="keep" if row["activations"] == "all on disk" else row["activations"],
        activation_ram_budget=0 if row["activations"] == "disk" else None,
    )
    return RunConfig(
        plan,
        dtype=getattr(torch, str(row["dtype"])),
        compute_dtype=None if row["compute"] == "same" else torch.bfloat16,
        clip=None if row["clip"] == "none" else 0.05,
        torch_clips=row["clip"] == "torch",
        frozen=bool(row["frozen"]),
        resume=row["resume"],
        offloads_all=row["activations"] == "all on disk",
        in_parts=bool(row["in_parts"]),
        tied=row["micro_batches"] == 1,
        whole=row["world"] == 4,
    )


def every(row: Mapping[str, Value]) -> bool:
    """Return True: the door refuses none of its combinations."""
    del row
    return True


def boosted_configs(axes: Axes) -> list[tuple[RunConfig, dict[str, Any], str, int]]:
    """Return (config, arguments of the plugin, how it is saved, ranks) of every row of the cover.

    ``nvme_offload_fraction`` among the arguments is the optimizer's.
    """
    found = []
    for row in all_pairs(axes, every):
        stored, _, computed = str(row["dtype"]).partition(" in ")
        config = RunConfig(
            Plan(accumulation_steps=row["accumulation"]),
            dtype=getattr(torch, stored),
            compute_dtype=getattr(torch, computed) if computed else None,
            clip=0.05 if row["clip"] else None,
            frozen=bool(row["frozen"]),
            tied=bool(row["tied"]),
        )
        given = {
            "shard_param_frac": row["sharded"],
            "nvme_offload_fraction": row["on disk"],
            **PLACED.get(str(row.get("placed")), {}),
        }
        found.append((config, given, str(row["saved"]), int(row["world"])))
    return found


def named(configs: list[tuple[RunConfig, dict[str, Any], str, int]]) -> list[str]:
    """Return the ids of these configs."""
    return [
        "-".join([str(c), *(f"{k}={v}" for k, v in given.items()), saved, f"world{world}"])
        for c, given, saved, world in configs
    ]
