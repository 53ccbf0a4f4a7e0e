"""A checkpoint that DeepSpeed wrote, loaded into an engine of any number of ranks.

Every rank maps the files of all ranks. One parameter at a time is put together, of which a rank
keeps its elements.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensorstow.base.errors import OptionError, StoreFormatError
from tensorstow.base.regular_file import is_there
from tensorstow.deepspeed.checkpoint.saved_values import (
    check_options,
    check_states,
    checking,
    counts_in,
)
from tensorstow.deepspeed.checkpoint.sharded import STRICT, ShardedCheckpoint, refuse_other_groups
from tensorstow.deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from tensorstow.deepspeed.checkpoint.zero_files import (
    FP32,
    UNIVERSAL_MAIN,
    Fragment,
    Partitions,
    SavedGroup,
    check_whole,
    joined,
    model_files,
    partitions_of,
    read_dict,
)
from tensorstow.deepspeed.states import StatesByName, group_names, set_states
from tensorstow.doorkit.checkpoint_checks import reading, refuse_other_names, refuse_other_shape
from tensorstow.fsdp.full_tensors import resharded
from tensorstow.fsdp.sharding import verify_together
from tensorstow.io.digest_list import DigestList
from tensorstow.optim.placed import PlacedOptimizer
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.tensors.dtensor import is_sharded, part_of, to_local

_COUNTS = ("global_steps", "skipped_steps", "global_samples")
_HYPER_PARAMETERS = frozenset({"lr", "betas", "eps", "weight_decay", "initial_lr"})
_OF_ADAM = frozenset({FP32, "exp_avg", "exp_avg_sq"})
_OF_DEEPSPEED = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
        *("shared_params", "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd"),
        *("sparse_tensor_module_names", "csr_tensor_module_names", "dp_world_size"),
        *("mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version"),
        *("universal_checkpoint_info", "num_experts", "ds_autoep_layers", *_COUNTS),
    }
)


class ZeroCheckpoint:
    """A folder that DeepSpeed's ``save_checkpoint`` or ``ds_to_universal`` wrote."""

    def __init__(self, folder: Path) -> None:
        """Verify the files if they have a list, and map those of weights; collective.

        Raises StoreFormatError for a layout that is not known.
        """
        files, ours = model_files(folder), DigestList(folder / UNIVERSAL_MAIN)
        verify_together(ours.main if is_there(ours.path) else files[0])
        self._folder = folder
        self.path = files[0]
        """The file of the values that are the same on every rank."""
        self._models = [read_dict(file, "module") for file in files]
        self._common = self._models[0]
        if self._common.get("num_experts") or self._common.get("ds_autoep_layers"):
            message = (
                f"{folder} is of a model with DeepSpeed's experts, which have files of their own:"
                " they are not read."
            )
            raise StoreFormatError(message)
        with checking(self.path):
            counts = counts_in(self._common, [n for n in _COUNTS if n in self._common])
        self.counts: dict[str, int] = {"micro_steps": 0, **counts}
        """The engine's counters; micro-batches begin again, as upstream."""

    @cached_property
    def _partitions(self) -> Partitions:
        with reading(self._folder):
            return partitions_of(self._folder, self._models)

    @property
    def client_state(self) -> dict[str, Any]:
        """The ``client_state`` of ``save_checkpoint``."""
        state = {key: value for key, value in self._common.items() if key not in _OF_DEEPSPEED}
        copies: dict[str, Any] = clone_tensors_for_torch_save(state)  # files may be replaced later
        return copies

    @property
    def scheduler(self) -> Any:
        """The scheduler's state; None if the engine had no scheduler."""
        return clone_tensors_for_torch_save(self._common.get("lr_scheduler"))

    @property
    def scale(self) -> dict[str, float | int] | None:
        """The state of a dynamic loss scale; None if the engine had none."""
        scaler: Any = self._partitions.scaler
        if scaler is None or not getattr(scaler, "dynamic", False):
            return None
        return {
            "scale": scaler.cur_scale,
            "patience": scaler.cur_hysteresis,
            "good_steps": scaler.cur_iter - scaler.last_overflow_iter - 1,
            "cur_iter": scaler.cur_iter,
        }

    def check(self, module: nn.Module, optimizer: PlacedOptimizer | None, *, strict: bool) -> None:
        """Raise an error if the checkpoint cannot be loaded; nothing is changed.

        ``optimizer`` None: weights alone are to be loaded. Raises OptionError for another model,
        other groups or another class, and for other names if ``strict``; StoreFormatError for
        values that cannot have been saved.
        """
        with reading(self.path):
            saved_state = dict(self._common["module"])
            shapes = {n: self._shapes.get(n, values.shape) for n, values in saved_state.items()}
        if strict:
            refuse_other_names(self._folder, saved_state, module.state_dict(), STRICT)
        for name, target in self._targets(module).items():
            refuse_other_shape(self._folder, name, shapes[name], target.shape)
            if saved_state[name].shape != target.shape:
                check_whole(*self._cut(name), name)
        if optimizer is not None:
            self._check_states(module, optimizer)

    def _targets(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Return the module's weights and buffers that the checkpoint has."""
        named = dict(resharded(module).named_parameters())
        targets: dict[str, torch.Tensor] = {**dict(module.named_buffers()), **named}
        return {name: t for name, t in targets.items() if name in self._common["module"]}

    @torch.no_grad()
    def load_module(self, module: nn.Module) -> None:
        """Load the weights and buffers that the checkpoint has, after ``check``."""
        for name, target in self._targets(module).items():
            values = self._common["module"][name]
            is_whole = values.shape == target.shape
            _write(target, values if is_whole else joined(*self._cut(name), name), name)

    def _check_states(self, module: nn.Module, optimizer: PlacedOptimizer) -> None:
        saved = self._partitions
        self._compare_groups(module, optimizer)
        keys = {key for fragments in saved.fragments.values() for key in fragments}
        if not isinstance(optimizer, StowedAdam) or not keys <= _OF_ADAM:
            message = (
                f"{self._folder} has the states {sorted(keys - {FP32})}, and the optimizer is"
                f" {type(optimizer).__name__}: DeepSpeed's are read for Adam and AdamW. Pass"
                " load_optimizer_states=False."
            )
            raise OptionError(message)
        named = dict(resharded(module).named_parameters())
        for name, shape in saved.shapes.items():
            refuse_other_shape(self._folder, name, shape, named[name].shape)
            for key, fragments in saved.fragments[name].items():
                check_whole(fragments, shape, f"{key} of {name}")
            states = {k: torch.empty(shape, device="meta") for k in saved.fragments[name]}
            entry = {**states, "step": saved.steps.get(name) or 0.0}
            del entry[FP32]
            with checking(self._folder):
                check_states(named[name], entry, name, amsgrad=False)
        with checking(self._folder):
            check_options(optimizer, [_hyper_parameters(group) for group in saved.groups])

    @torch.no_grad()
    def load_states(self, module: nn.Module, optimizer: PlacedOptimizer) -> None:
        """Load fp32 weights, states and hyper-parameters, after ``check``."""
        saved = self._partitions
        named = dict(resharded(module).named_parameters())
        states: StatesByName = {}
        for name in saved.shapes:
            parameter = named[name]
            whole = saved.whole(name, FP32)
            _write(parameter, whole, name)
            step = saved.steps.get(name)
            entry = {"step": torch.tensor(0.0 if step is None else step)}
            if parameter.dtype != torch.float32:
                entry["master"] = _own(whole, parameter, name)
            elif step is None:
                continue
            for key in saved.fragments[name].keys() - {FP32}:
                entry[key] = _own(saved.whole(name, key), parameter, name)
            states[name] = entry
        set_states(module, optimizer, states)
        for group, saved_group in zip(optimizer.param_groups, saved.groups, strict=True):
            group.update(_hyper_parameters(saved_group))

    def _compare_groups(self, module: nn.Module, optimizer: PlacedOptimizer) -> None:
        named = dict(resharded(module).named_parameters())
        trained = [
            {name for name in names if named[name].requires_grad}
            for names in group_names(module, optimizer)
        ]
        refuse_other_groups(self._folder, [g.names for g in self._partitions.groups], trained)

    @cached_property
    def _shapes(self) -> dict[str, torch.Size]:
        """Shapes of weights that stage 3 has cut: it leaves empty tensors in their places."""
        groups = self._common.get("param_shapes") or []
        frozen = self._common.get("frozen_param_shapes") or {}
        listed = [groups] if isinstance(groups, Mapping) else groups
        return {name: torch.Size(s) for group in (*listed, frozen) for name, s in group.items()}

    def _cut(self, name: str) -> tuple[list[Fragment], torch.Size]:
        """Return the fragments and the shape of a weight that stage 3 had cut."""
        if name in self._partitions.shapes:
            return self._partitions.fragments[name][FP32], self._partitions.shapes[name]
        cut = [model.get("frozen_param_fragments") or {} for model in self._models]
        if name not in cut[0]:
            message = (
                f"{self._folder} has no values of {name}: it was saved without frozen parameters."
                " Load them by themselves, and leave it out of the module until then."
            )
            raise StoreFormatError(message)
        shape, fragments, start = self._shapes[name], [], 0
        for fragment in cut:
            values = fragment[name].reshape(-1)[: shape.numel() - start]
            fragments.append(Fragment(start, values))
            start += values.numel()
        return fragments, shape


def open_checkpoint(folder: Path) -> ShardedCheckpoint | ZeroCheckpoint:
    """Return the checkpoint in ``folder``; raises StoreFormatError if there is none."""
    return ZeroCheckpoint(folder) if model_files(folder) else ShardedCheckpoint(folder)


def _hyper_parameters(group: SavedGroup) -> dict[str, Any]:
    return {key: value for key, value in group.values.items() if key in _HYPER_PARAMETERS}


def _write(target: torch.Tensor, whole: torch.Tensor, name: str) -> None:
    """Copy a whole tensor into a weight or buffer, of which this rank may have a part."""
    share = part_of(whole, target, name) if is_sharded(target) else whole
    to_local(target).copy_(share)


def _own(whole: torch.Tensor, parameter: torch.Tensor, name: str) -> torch.Tensor:
    """Return this rank's elements of a state, in memory of their own."""
    return part_of(whole, parameter, name).to(torch.float32, copy=True)
