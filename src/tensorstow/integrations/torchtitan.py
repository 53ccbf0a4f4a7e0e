"""torchtitan: an override that puts optimizer states in host memory or on disk.

torchtitan tells an optimizer neither in which folder its state dict is saved nor which folders
are removed, so snapshots are never dropped here: one may be what a checkpoint needs.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer.utils import (
    get_flat_optim_state_dict,
    init_optim_state,
    load_flat_optim_state_dict,
)
from torchtitan.config import override
from torchtitan.config.override import derive

from tensorstow.base.errors import OptionError
from tensorstow.base.keywords import with_new_names
from tensorstow.base.update_on import timing_of
from tensorstow.checkpoint.snapshot_reference import new_name
from tensorstow.optim.adam import Adam, AdamW
from tensorstow.optim.stowed_adam import StowedAdam

logger = logging.getLogger("tensorstow")

_OURS: dict[str, type[StowedAdam]] = {"Adam": Adam, "AdamW": AdamW}
_BACKWARD = (
    'overlap="backward" was given: torchtitan asks for the norm of all gradients after backward,'
    ' when they are already used. Use overlap="none" or "forward".'
)
_BF16_STATES = (
    'implementation="fused_opt_states_bf16" was given, which changes torch\'s own optimizers alone:'
    ' leave it at "fused", and give "state_format" to the override.'
)
_GRAPHS = (
    'overlap="forward" was given with CUDA graphs, whose replays call no hook that waits for an'
    " update. Add --training.disable_cuda_graphs."
)
_SEVERAL = (
    "dir={directory!r} was given for {count} optimizers (of pipeline stages, or of several"
    " classes), and one run is of one: leave dir= out for scratch files."
)


class StowedOptimizers(OptimizersContainer):
    """torchtitan's container; its Adam and AdamW are ``tensorstow``'s."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """torchtitan's options, and the placement of the states."""

        keywords: dict[str, Any] = field(default_factory=dict)
        """Keywords of ``tensorstow.AdamW``."""

    def __init__(self, config: Config, *, model_parts: list[torch.nn.Module]) -> None:
        """Make an optimizer for each part of the model, and for each class that groups name.

        Args:
            config: The options.
            model_parts: The parts, on the devices that train them.

        Raises:
            OptionError: A combination that would fail later, or go wrong in silence.
        """
        self._timing = timing_of(config.keywords.get("overlap", "auto"))
        if self._timing.begins_early:
            raise OptionError(_BACKWARD)
        if config.implementation == "fused_opt_states_bf16":
            raise OptionError(_BF16_STATES)
        self._adam_keywords = with_new_names("AdamW", config.keywords)
        self._logged_that_all_are_kept = False
        directory, count = self._adam_keywords.get("dir"), len(model_parts)
        count *= len({group.optimizer_name for group in config.param_groups})
        if directory is not None and count > 1:
            raise OptionError(_SEVERAL.format(directory=directory, count=count))
        self._has_references = (
            directory is not None and self._adam_keywords.get("durability") != "none"
        )
        if self._has_references:  # only checkpoints commit: they have the trainer's state
            self._adam_keywords = {
                "checkpoints": "reference",
                "commit_every": None,
                **self._adam_keywords,
            }
            self._has_references = self._adam_keywords["checkpoints"] == "reference"
        super().__init__(config, model_parts=model_parts)

    def _resolve_optimizer_factory(self, name: str) -> Any:  # torch's or ours
        if name in _OURS:
            return partial(self._make, _OURS[name])
        return super()._resolve_optimizer_factory(name)

    def _make(
        self, kind: type[StowedAdam], groups: list[dict[str, Any]], **options: Any
    ) -> StowedAdam:
        first = groups[0]["params"][0]
        part = next(m for m in self.model_parts if any(p is first for p in m.parameters()))
        return kind(groups, **{"module": part, **self._adam_keywords, **options})

    def zero_grad(self, set_to_none: bool = True) -> None:  # torch's
        """Drop gradients, or zero them in place: CUDA graphs write to the same memory again.

        Raises:
            OptionError: CUDA graphs with ``overlap="forward"``.
        """
        if not set_to_none and self._timing.waits_by_module:
            raise OptionError(_GRAPHS)
        super().zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return a checkpoint's entries: a reference with ``dir=``, else all states by name."""
        entries: dict[str, Any] = {}
        for key, optimizer in self._by_key():
            if key is None:
                init_optim_state(optimizer)
                entries |= get_flat_optim_state_dict(optimizer)
            else:
                # First: the state dict then refers to this snapshot, which every rank has.
                self._name_snapshot(optimizer)
                entries[key] = _packed(optimizer.state_dict())
        return entries

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a snapshot reference, or load states."""
        for key, optimizer in self._by_key():
            if key is None:
                init_optim_state(optimizer)
                load_flat_optim_state_dict(optimizer, state_dict)
            else:
                optimizer.load_state_dict(_unpacked(state_dict[key]))

    def _by_key(self) -> Iterator[tuple[str | None, Any]]:
        """Yield each optimizer and the key of its reference; None if it saves states."""
        for index, optimizer in enumerate(self.optimizers):
            is_reference = self._has_references and isinstance(optimizer, StowedAdam)
            # The key of earlier versions: torchtitan looks entries up by it.
            yield f"ticket.{index}" if is_reference else None, optimizer

    def _name_snapshot(self, optimizer: StowedAdam) -> None:
        """Name the current state on every rank."""
        states = next(iter(optimizer.state.values()), None)
        if states is None:
            return  # no step was taken
        name = [new_name(int(states["step"]))]
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast_object_list(name)
        optimizer.snapshot(name[0])
        if not self._logged_that_all_are_kept:
            self._logged_that_all_are_kept = True
            logger.warning(
                "Snapshot %s of %s has the states of a checkpoint, and stays if torchtitan removes"
                " the checkpoint (checkpoint.keep_latest_k), as do all later ones."
                " optimizer.snapshots() lists them, optimizer.drop(name) frees their disk space",
                *(name[0], self._adam_keywords["dir"]),
            )


def _packed(reference: dict[str, Any]) -> bytes:
    """Return a reference as one value; a dict would be an entry for each of its values."""
    torch.save(reference, file := BytesIO())
    return file.getvalue()


def _unpacked(packed: bytes) -> dict[str, Any]:
    reference: dict[str, Any] = torch.load(BytesIO(packed), weights_only=True)
    return reference


@override(target=OptimizersContainer.Config, description="States in host memory or on disk")
def stowed(config: OptimizersContainer.Config, **keywords: Any) -> StowedOptimizers.Config:
    """Place the states of torchtitan's Adam and AdamW; name it in ``--override.imports``.

    Args:
        config: torchtitan's options of optimizers.
        **keywords: Keywords of ``tensorstow.AdamW``: ``states``, ``dir``, ``ram_budget``. With
            ``dir`` a checkpoint has a snapshot reference instead of the states, and its snapshot is
            kept until you drop it.

    Returns:
        The options of ``StowedOptimizers``.
    """
    options: StowedOptimizers.Config = derive(config, StowedOptimizers.Config, keywords=keywords)
    return options
