"""``Stowed``: a Trainer of transformers whose model ``tensorstow.stow`` places.

[Note: In a Trainer] The model is placed when the Trainer makes its optimizer, or before the first
evaluation; the model is marked as prepared by accelerate, which then moves, wraps and casts
nothing. ``stow`` reads the weights of a checkpoint into place; if the checkpoint has a snapshot
reference, they come with the snapshot. Neither is whole in memory.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.tensor import DTensor
from transformers.trainer import TRAINING_ARGS_NAME

from tensorstow.base.errors import OptionError
from tensorstow.base.keywords import keyword_only, keywords_of, refuse_unknown_keywords
from tensorstow.base.new_file import new_stream, replace_files
from tensorstow.checkpoint.adapters import Adapters
from tensorstow.fsdp.export import save_safetensors
from tensorstow.fsdp.full_tensors import copy_from_files, full_copy
from tensorstow.fsdp.stow import plan_of, stow
from tensorstow.integrations.late_adamw import LateAdamW, is_durable, options_of
from tensorstow.integrations.trainer_refusals import refuse_for_model, refuse_plan
from tensorstow.integrations.trainer_snapshots import DropSnapshots, reference_in, take_snapshot
from tensorstow.optim.adam import AdamW
from tensorstow.optim.stowed_adam import StowedAdam

_OF_STOW = keyword_only(stow)


class Stowed(transformers.Trainer):
    """A Trainer whose model ``tensorstow.stow`` places, alone or as the first base class.

    ``class StowedSFT(Stowed, SFTTrainer)`` does it for a trainer built on that of transformers.
    """

    def __init__(self, *positional: Any, stow: Mapping[str, Any], **keywords: Any) -> None:
        """Create the Trainer; the model is not moved until training or evaluation begins.

        Args:
            *positional: Arguments of the Trainer.
            stow: Keywords of ``tensorstow.stow`` (``plan``, ``budget``, ``dir``,
                ``compute_dtype``), and others for its AdamW (``state_format``, ``policy``). With
                ``dir`` checkpoints are snapshot references, and commits are made for them alone.
            **keywords: Keywords of the Trainer.

        Raises:
            OptionError: A combination that would fail later, or go wrong in silence.
            KeywordError: A keyword of ``stow`` that neither it nor AdamW has.
        """
        of_adamw = [name for name in keywords_of(AdamW) or () if name != "params"]
        refuse_unknown_keywords("stow", stow, dict.fromkeys([*_OF_STOW, *of_adamw]))
        self._stow_keywords = {k: v for k, v in stow.items() if k in _OF_STOW}
        self._durable = is_durable(stow)
        super().__init__(*positional, **keywords)
        refuse_for_model(self, self._stow_keywords, durable=self._durable)
        rest = {k: v for k, v in stow.items() if k not in _OF_STOW}
        self._options = options_of(self.args, rest, durable=self._durable)
        if self._durable:
            self.add_callback(DropSnapshots())

    # --- placed instead of moved ---

    def create_optimizer(self, model: object = None) -> torch.optim.Optimizer:  # noqa: ARG002
        """Place the model and make its optimizer, once."""
        if self.optimizer is None:
            placed: Any = self.model
            make = partial(_make, placed, **self._options)
            _, self.optimizer = stow(placed, make, **self._stow_keywords)
            placed._is_accelerate_prepared = True  # noqa: SLF001  # accelerate's mark
            refuse_plan(self.args, plan_of(placed))  # plan="auto" has just chosen it
            if plan_of(placed).timing.begins_early:
                self._optimizer()._keep_norms()  # noqa: SLF001  # a hook of the engine
        return self.optimizer

    def _move_model_to_device(self, model: object, device: object) -> None:
        """Do nothing: ``stow`` moves the model when it is placed."""

    def _wrap_model(self, model: Any, *_: object, **__: object) -> Any:
        """Place the model if evaluation precedes training; nothing wraps it."""
        self.create_optimizer()
        return model

    def _optimizer(self) -> StowedAdam:
        optimizer: Any = self.optimizer
        real: StowedAdam = getattr(optimizer, "optimizer", optimizer)  # inside accelerate's wrapper
        return real

    # --- gradients that may be in host memory, or already used ---

    def _clip_grad_norm(self, model: object) -> torch.Tensor:  # noqa: ARG002
        return self._optimizer().clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: object, grad_norm: Any = None) -> Any:  # noqa: ARG002
        return self._optimizer().grad_norm() if grad_norm is None else grad_norm

    # --- checkpoints ---

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model's files, a tensor at a time, on every rank's call; adapters by peft."""
        model: Any = self.model
        has_adapters = hasattr(model, "peft_config")
        if self.optimizer is None or (has_adapters and self.args.world_size == 1):
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(str(self.args.output_dir if output_dir is None else output_dir))
        if has_adapters:
            self._save(str(folder), _adapter_tensors(model))
        else:
            save_safetensors(model, folder)
        # For adapters the Trainer's ``_save`` has written these.
        if self.args.should_save and not has_adapters:
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                replace_files(folder, tokenizer.save_pretrained)
            with new_stream(folder / TRAINING_ARGS_NAME) as stream:
                torch.save(self.args, stream)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # Here, on every rank: the Trainer asks rank 0 alone for the optimizer's state dict.
        if self._durable and self.args.world_size > 1:
            take_snapshot(self._optimizer(), self.state.global_step)
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Leave the weights to the reference, if there is one, else to ``stow``."""
        if hasattr(self.model, "peft_config"):
            if self.optimizer is None and isinstance(self.model, torch.nn.Module):
                Adapters(self.model).initialize()  # peft loads nothing to the meta device
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif (
            reference := reference_in(Path(resume_from_checkpoint))
        ) and reference.snapshot is not None:
            return
        elif self.optimizer is None:
            self._stow_keywords["weights"] = resume_from_checkpoint
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Read the weights of the best checkpoint into place, on every rank's call."""
        if hasattr(self.model, "peft_config"):
            super()._load_best_model()
            return
        # An update that still runs would write over the weights that are read.
        self._optimizer().wait()
        model: Any = self.model
        copy_from_files(model, str(self.state.best_model_checkpoint))


def _make(model: torch.nn.Module, _: Iterable[object], **options: Any) -> StowedAdam:
    """Make the optimizer of a placed model: the factory that ``stow`` calls."""
    return LateAdamW()(model, **options)


def _adapter_tensors(model: Any) -> dict[str, torch.Tensor]:  # a PeftModel
    """Return the state dict of ``model``, in which all that peft saves is whole; collective.

    peft chooses by the names of a state dict. Everything else in it is this rank's part.

    Raises:
        OptionError: peft computes what it saves from a parameter, of which a rank has a part.
    """
    from peft import get_peft_model_state_dict  # noqa: PLC0415  # the caller has imported it

    state: dict[str, torch.Tensor] = model.state_dict()
    names = {id(tensor): name for name, tensor in state.items()}
    chosen: dict[str, torch.Tensor] = {}
    for adapter in model.peft_config:
        saved = get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter)
        for saved_name, tensor in saved.items():
            if id(tensor) in names:
                chosen[names[id(tensor)]] = tensor
            elif isinstance(tensor, DTensor):
                message = (
                    f"Stowed: peft computes {saved_name!r} from a parameter when it saves, and each"
                    " rank has a part of that. Train these adapters on one process."
                )
                raise OptionError(message)
    return state | {name: full_copy(chosen[name]) for name in state if name in chosen}
