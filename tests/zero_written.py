"""Checkpoints in the layout of DeepSpeed's ZeRO, written without it.

The layout was compared with that of files which DeepSpeed 0.19.6 wrote by one and two ranks: the
same keys, shapes, padding and values, but for ``ds_config``.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

Tensors = Mapping[str, torch.Tensor]
STATES = ("exp_avg", "exp_avg_sq")


class LossScaler:
    """A static one, as it is pickled."""

    def __init__(self) -> None:
        """Scale by nothing."""
        self.cur_scale, self.dynamic = 1.0, False


class DynamicLossScaler:
    """One of fp16, as it is pickled, after 9 steps of which the one before the last overflowed."""

    def __init__(self) -> None:
        """Have the attributes that an update changes, and a dtype."""
        self.cur_scale, self.dynamic, self.dtype = 512.0, True, torch.float16
        self.cur_iter, self.last_overflow_iter, self.cur_hysteresis = 9, 7, 1


class ZeroStageEnum:
    """An enum is pickled as a call of its class."""

    def __init__(self, value: int) -> None:
        """Keep the value."""
        self.value = value

    def __reduce__(self) -> tuple[type, tuple[int]]:
        """Return the call."""
        return type(self), (self.value,)


@dataclass
class fragment_address:  # noqa: N801  # upstream's
    """Where a parameter is in a rank's part of a group."""

    numel: int
    start: int


_PLACES = {
    "deepspeed.runtime.fp16.loss_scaler": (LossScaler, DynamicLossScaler),
    "deepspeed.runtime.zero.config": (ZeroStageEnum,),
    "deepspeed.utils.tensor_fragment": (fragment_address,),
}


@contextmanager
def upstream_names() -> Iterator[None]:
    """Let the classes above be pickled by upstream's names."""
    modules: dict[str, ModuleType] = {}
    for name, classes in _PLACES.items():
        parents = name.split(".")
        for depth in range(1, len(parents) + 1):
            modules.setdefault(".".join(parents[:depth]), ModuleType(name))
        for kind in classes:
            kind.__module__ = name
            setattr(modules[name], kind.__name__, kind)
    with patch.dict(sys.modules, modules):
        yield


@dataclass
class ZeroRun:
    """What a run of DeepSpeed held when it was saved."""

    groups: list[dict[str, Tensors]]
    """Of each parameter group: fp32 weight and states by name, of trained parameters."""
    hyper: list[dict[str, Any]]
    frozen: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    """The first name of a weight, by its other one."""
    order: list[str] = field(default_factory=list)
    """The names of a state dict."""
    dtype: torch.dtype = torch.float32
    step: float = 3.0
    scaler: Any = field(default_factory=LossScaler)
    client: dict[str, Any] = field(default_factory=dict)
    counts: tuple[int, int, int] = (3, 0, 12)
    """Steps, skipped steps and samples."""
    scheduler: dict[str, Any] | None = None

    def write(self, folder: Path, stage: int, world: int) -> None:
        """Write the files of all ranks."""
        folder.mkdir(parents=True)
        prefix = "bf16_" if self.dtype == torch.bfloat16 else ""
        with upstream_names():
            for rank in range(world):
                optim = self._stage_3(rank, world) if stage == 3 else self._flat(rank, world, stage)
                saved = {"optimizer_state_dict": optim, "ds_config": {}, "ds_version": "0.19.6"}
                name = f"zero_pp_rank_{rank}_mp_rank_00"
                torch.save(saved, folder / f"{prefix}{name}_optim_states.pt")
                if stage == 3 or rank == 0:
                    name = name if stage == 3 else "mp_rank_00"
                    states = self._model_states(stage, rank, world)
                    torch.save(states, folder / f"{name}_model_states.pt")

    def write_universal(self, folder: Path, stage: int) -> None:
        """Write what upstream's ds_to_universal makes of a checkpoint of that stage."""
        (folder / "zero").mkdir(parents=True)
        with upstream_names():
            self._write_universal(folder, stage)

    def _write_universal(self, folder: Path, stage: int) -> None:
        for group in self.groups:
            for name, kept in group.items():
                place = folder / "zero" / name
                place.mkdir()
                for key, whole in kept.items():
                    flat = whole.flatten()
                    saved = flat if stage == 3 else {"cat_dim": 0, "param": whole}
                    torch.save(saved, place / f"{key}.pt")
                if stage < 3:
                    torch.save(torch.tensor(self.step), place / "step.pt")
        common = self._stage_3(0, 1) if stage == 3 else self._flat(0, 1, stage)
        base = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
        common["param_groups"] = common[base]["param_groups"]
        if stage < 3:
            for key in (base, "param_slice_mappings", "single_partition_of_fp32_groups"):
                del common[key]
            common["group_paddings"] = [0] * len(self.groups)
        torch.save(common, folder / "zero" / "optimizer_state.pt")
        name = "zero_pp_rank_0_mp_rank_00" if stage == 3 else "mp_rank_00"
        torch.save(self._model_states(stage, 0, 1), folder / f"{name}_model_states.pt")

    def _flat(self, rank: int, world: int, stage: int) -> dict[str, Any]:
        parts, paddings, mappings, states = [], [], [], {}
        for number, group in enumerate(self.groups):
            numel = sum(kept["fp32"].numel() for kept in group.values())
            each = 2 * -(-numel // (2 * world))
            padding = each * world - numel if rank == world - 1 else 0
            own = {
                key: torch.cat(
                    [*(kept[key].flatten() for kept in group.values()), torch.zeros(each * world)]
                )[rank * each : (rank + 1) * each].clone()
                for key in ("fp32", *STATES)
            }
            fp32 = own.pop("fp32")
            parts.append(torch.nn.Parameter(fp32)[: each - padding])
            paddings.append(padding)
            states[number] = {"step": torch.tensor(self.step), **own}
            mapping, start = OrderedDict(), 0
            for name, kept in group.items():
                first = max(start, rank * each)
                start += kept["fp32"].numel()
                end = min(start, (rank + 1) * each)
                if first < end:
                    mapping[name] = fragment_address(end - first, first - rank * each)
            mappings.append(mapping)
        groups = [{**hyper, "params": [i]} for i, hyper in enumerate(self.hyper)]
        return {
            "loss_scaler": self.scaler,
            "dynamic_loss_scale": self.scaler.dynamic,
            "overflow": False,
            "clip_grad": 1.0,
            "base_optimizer_state": {"state": states, "param_groups": groups},
            "single_partition_of_fp32_groups": parts,
            "zero_stage": ZeroStageEnum(stage),
            "group_paddings": paddings,
            "partition_count": [world] * len(parts),
            "ds_version": "0.19.6",
            "param_slice_mappings": mappings,
        }

    def _stage_3(self, rank: int, world: int) -> dict[str, Any]:
        states, flats = {}, []
        for number, group in enumerate(self.groups):
            own = {
                key: torch.cat([_part(kept[key], rank, world) for kept in group.values()])
                for key in ("fp32", *STATES)
            }
            flats.append(torch.nn.Parameter(own.pop("fp32")))
            states[number] = {"step": torch.tensor(self.step), **own}
        groups = [{**hyper, "params": [i]} for i, hyper in enumerate(self.hyper)]
        return {
            "zero_stage": ZeroStageEnum(3),
            "loss_scaler": self.scaler,
            "dynamic_loss_scale": self.scaler.dynamic,
            "overflow": False,
            "partition_count": world,
            "optimizer_state_dict": {"state": states, "param_groups": groups},
            "fp32_flat_groups": flats,
        }

    def _model_states(self, stage: int, rank: int, world: int) -> dict[str, Any]:
        whole = {name: kept["fp32"].to(self.dtype) for g in self.groups for name, kept in g.items()}
        whole |= self.frozen
        whole |= {name: whole[first] for name, first in self.tied.items()}
        left = {n: torch.empty(0, dtype=w.dtype) for n, w in whole.items()} if stage == 3 else whole
        module = OrderedDict((name, {**left, **self.buffers}[name]) for name in self.order)
        fragments = {n: _part(w, rank, world) if stage == 3 else w for n, w in self.frozen.items()}
        shapes = [OrderedDict((n, k["fp32"].shape) for n, k in g.items()) for g in self.groups]
        steps, skipped, samples = self.counts
        return {
            "module": module,
            "buffer_names": list(self.buffers),
            "optimizer": None,
            "param_shapes": shapes,
            "frozen_param_shapes": OrderedDict((n, w.shape) for n, w in self.frozen.items())
            if stage > 1
            else None,
            "shared_params": self.tied if rank == 0 else {},
            "frozen_param_fragments": OrderedDict(fragments) if stage > 1 else None,
            "lr_scheduler": self.scheduler,
            "data_sampler": None,
            "random_ltd": None,
            "sparse_tensor_module_names": set(),
            "skipped_steps": skipped,
            "global_steps": steps,
            "global_samples": samples,
            "dp_world_size": world,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": {},
            "ds_version": "0.19.6",
            **self.client,
        }


def _part(whole: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Return a rank's part under stage 3, whose padding has any value."""
    each = -(-whole.numel() // world)
    padded = torch.cat([whole.flatten(), torch.full((each,), torch.nan, dtype=whole.dtype)])
    return padded[rank * each : (rank + 1) * each].clone()
