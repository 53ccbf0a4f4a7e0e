"""Checkpoints of an engine, by upstream's calls: what they save and load of it."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensorstow.base.directories import make_folder
from tensorstow.base.errors import OptionError, StoreFormatError
from tensorstow.checkpoint.serialize import flatten
from tensorstow.deepspeed.checkpoint.saved_values import check_others
from tensorstow.deepspeed.checkpoint.sharded import (
    COUNTS,
    LATEST,
    LATEST_UNIVERSAL,
    latest_tag,
    save,
    validate_same_folder,
)
from tensorstow.deepspeed.checkpoint.zero_checkpoint import open_checkpoint
from tensorstow.deepspeed.engine_settings import ConfiguredModule
from tensorstow.deepspeed.loss_scale import LossScale
from tensorstow.deepspeed.states import drop_unused_masters
from tensorstow.fsdp.full_tensors import whole_weights
from tensorstow.fsdp.sharding import on_every_rank
from tensorstow.io.digest_list import DigestList
from tensorstow.optim.placed import PlacedOptimizer


class SavedModule(ConfiguredModule):
    """A module whose training is saved and loaded; the engine sets its attributes."""

    module: nn.Module
    optimizer: PlacedOptimizer | None
    lr_scheduler: Any
    global_rank: int
    micro_steps: int
    _scale: LossScale | None

    def _begin_step_again(self) -> None:
        """Drop the gradients that wait for ``step()``: the next backward is the first of a step."""
        raise NotImplementedError

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write weights, states and counters to ``save_dir/tag``; call it on every rank.

        Args:
            save_dir: The directory.
            tag: The subdirectory. Default: None, "global_step<n>".
            client_state: What ``load_checkpoint`` returns: numbers, text, bytes, lists, tuples,
                sets, dicts, namespaces, paths, dtypes, devices, tensors and NumPy arrays.
            save_latest: Whether the file ``latest`` names the tag.
            exclude_frozen_parameters: Whether parameters that require no gradients are left out:
                ``load_checkpoint(..., load_module_strict=False)`` leaves those of the model as
                they are.

        Returns:
            True.

        Raises:
            TypeError: A value in ``client_state`` of another type.
            OptionError: There is no directory, or ranks passed different ones or different tags.
            StowError: Another rank could not write. That rank raises its own error.
        """
        if not save_dir:
            message = f"save_checkpoint({save_dir!r}) was called: pass a directory."
            raise OptionError(message)
        tag = str(f"global_step{self.global_steps}" if tag is None else tag)
        validate_same_folder(save_dir, tag, "save_checkpoint()")
        folder = Path(save_dir) / tag

        def prepare() -> object:
            make_folder(folder)
            return flatten(client_state or {}, "client_state")

        common = {name: getattr(self, name) for name in COUNTS}
        common["client_state"] = on_every_rank(prepare, f"begin a checkpoint in {folder}")
        common["scale"] = None if self._scale is None else self._scale.state_dict()
        common["scheduler"] = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        has_frozen = not exclude_frozen_parameters
        save(folder, self.module, self.optimizer, common, has_frozen=has_frozen, latest=save_latest)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load what ``save_checkpoint`` wrote, on any number of ranks; call it on every rank.

        It also loads checkpoints that DeepSpeed wrote under stages 1 to 3, and its universal ones.
        The next backward is that of a step's first micro-batch: gradients that wait for ``step()``,
        in this engine or when it was saved, are dropped. Names, shapes, groups, hyper-parameters
        and counters are checked before anything is changed.

        Args:
            load_dir: The directory.
            tag: The subdirectory. Default: None, the one that ``latest`` names, or
                ``latest_universal`` with ``checkpoint.load_universal``.
            load_module_strict: Whether the module must have the checkpoint's names.
            load_optimizer_states: Whether states, groups and the loss scale are loaded.
            load_lr_scheduler_states: Whether the scheduler's state is loaded.
            load_module_only: Whether only the weights are loaded.

        Returns:
            The checkpoint's directory and ``client_state``; (None, None) if nothing was saved.

        Raises:
            StoreFormatError: There is no checkpoint that can be read.
            OptionError: The checkpoint is of another model, or of other groups; or ranks found
                different tags, or have different directories on one host.
            StowError: Another rank could not read. That rank raises its own error.
        """
        folder = self._folder_to_load(Path(load_dir), tag)
        if folder is None:
            return None, None
        saved = on_every_rank(partial(open_checkpoint, folder), f"read {folder}")
        optimizer = self.optimizer if load_optimizer_states and not load_module_only else None
        scale = None if optimizer is None else self._scale
        scheduler = None if load_module_only or not load_lr_scheduler_states else self.lr_scheduler

        def check() -> dict[str, Any]:
            saved.check(self.module, optimizer, strict=load_module_strict)
            check_others(saved, scale, scheduler)
            return saved.client_state

        client_state = on_every_rank(check, f"check {folder}")
        self._begin_step_again()
        on_every_rank(partial(saved.load_module, self.module), f"load the weights in {folder}")
        # Before the states are loaded, whose master weights may be unused by a step, too.
        if self.optimizer is not None:
            drop_unused_masters(self.optimizer)
        if load_module_only:
            return str(folder), client_state
        if optimizer is not None:
            on_every_rank(
                partial(saved.load_states, self.module, optimizer), f"load the states in {folder}"
            )
            if scale is not None and saved.scale is not None:
                scale.load_state_dict(saved.scale)
        if scheduler is not None and saved.scheduler is not None:
            scheduler.load_state_dict(saved.scheduler)
        for name, count in saved.counts.items():
            setattr(self, name, count)
        # Another number of ranks changes a step's micro-batches, so the step begins again.
        self.micro_steps -= self.micro_steps % self.gradient_accumulation_steps()
        return str(folder), client_state

    def _folder_to_load(self, directory: Path, tag: str | int | None) -> Path | None:
        """Return the folder of a checkpoint, the newest without ``tag``; None if there is none."""
        universal = self.settings.load_universal
        latest = LATEST_UNIVERSAL if universal else LATEST
        found_tag = latest_tag(directory, latest) if tag is None else str(tag)
        validate_same_folder(directory, found_tag, "load_checkpoint()")
        if found_tag is None and universal:
            message = (
                f"{directory} has no file latest_universal, which checkpoint.load_universal asks"
                " for: convert a checkpoint by ds_to_universal, or leave the key out."
            )
            raise StoreFormatError(message)
        return None if found_tag is None else directory / found_tag

    def module_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict, with DTensors for sharded parameters."""
        return self.module.state_dict()

    def load_module_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load what ``module_state_dict`` returned.

        Args:
            state_dict: The state dict.
            strict: Whether the names must be the module's.
        """
        self.module.load_state_dict(state_dict, strict)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the full weights to one file that torch loads; call it on every rank.

        The dtype is that of the weights. One weight at a time is gathered. Rank 0 holds all of them
        in host memory. A list of digests (``save_filename`` with ``.digests``) is written with it.

        Args:
            save_dir: The directory.
            save_filename: The file's name.
            exclude_frozen_parameters: Whether parameters that require no gradients are left out.

        Returns:
            True.

        Raises:
            StowError: Rank 0 could not write, and raises its own error.
        """
        whole = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        file = Path(save_dir) / save_filename

        def write() -> None:
            if whole is not None:
                make_folder(file.parent)
                DigestList(file).write_main(partial(torch.save, whole))

        on_every_rank(write, f"write {file}")
        return True

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Return the full weights, in host memory, on rank 0, and None on others; collective.

        Users call it by upstream's name.
        """
        excluded = {
            name
            for name, p in self.module.named_parameters()
            if exclude_frozen_parameters and not p.requires_grad
        }
        first = self.global_rank == 0
        weights = whole_weights(self.module)
        whole = {n: values for n, values in weights if first and n not in excluded}
        return whole if first else None
