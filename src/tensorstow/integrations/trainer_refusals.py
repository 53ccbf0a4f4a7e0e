"""Checks of a transformers Trainer: refuse what would fail late or go wrong in silence."""

import os
from collections.abc import Mapping
from typing import Any

import transformers

from tensorstow.base.errors import OptionError
from tensorstow.base.launch import launched
from tensorstow.base.plan import Plan
from tensorstow.base.sizes import format_count
from tensorstow.base.update_on import timing_of
from tensorstow.fsdp.sharding import current_device, world_size
from tensorstow.integrations.late_adamw import is_durable

_DEEPSPEED = (
    "A Trainer with deepspeed= was given: accelerate would put DeepSpeed's own optimizer in the"
    " place of this one, with another weight decay. Leave deepspeed= out, and"
    " pass from_deepspeed(file, args) as optimizer_cls_and_kwargs."
)
_FSDP = (
    "A Trainer with fsdp= was given: it exchanges the parameters when the optimizer is made, whose"
    " memory and disk are for whole ones by then, on every rank. Leave fsdp= out: Stowed shards."
)
_ALIKE = frozenset({"adamw_torch", "adamw_torch_fused"})
"""Values of ``optim=`` that mean AdamW."""


def _refuse_if(applies: object, message: str) -> None:
    if applies:
        raise OptionError(message)


def _refuse_stowed_if(applies: object, message: str) -> None:
    _refuse_if(applies, f"Stowed: {message}.")


def refuse_for_optimizer(args: transformers.TrainingArguments, keywords: Mapping[str, Any]) -> None:
    """Refuse arguments that do not work with ``adamw``, an optimizer alone."""
    durable, directory = is_durable(keywords), keywords.get("dir")
    other = _other_optimizer(args)
    timing = timing_of(keywords.get("overlap", "auto"))
    _refuse_if(
        timing.begins_early,
        f"{timing.keyword} was given: a Trainer asks for the norm of all gradients after backward,"
        ' also with max_grad_norm=0, when they are already used. Use overlap="none" or "forward";'
        " or Stowed, which has the norm.",
    )
    _refuse_if(args.deepspeed, _DEEPSPEED)
    _refuse_if(
        args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() in {"1", "true"}, _FSDP
    )
    _refuse_if(
        durable and args.world_size > 1,
        f"dir={directory!r} was given for {args.world_size} processes: each has all parameters and"
        " would keep a copy of all states, and a checkpoint is of rank 0 alone. Leave dir= out for"
        " scratch files, or shard with Stowed.",
    )
    _refuse_if(
        durable and args.auto_find_batch_size,
        f"dir={directory!r} was given with auto_find_batch_size=True: the second try would find the"
        " run of the first one in it. Choose per_device_train_batch_size yourself.",
    )
    _refuse_if(other, f"{other} was given, and the optimizer is tensorstow.AdamW: leave it out.")


def refuse_to_attach(trainer: transformers.Trainer, *, whole: bool) -> None:
    """Refuse a trainer whose optimizer ``attach`` must not make; ``whole``: its model is placed."""
    _refuse_if(whole, "attach() was called for a Stowed trainer: pass the keywords in its stow=.")
    _refuse_if(
        trainer.optimizer is not None,
        "attach() was called for a trainer that has an optimizer already"
        f" ({type(trainer.optimizer).__name__}). Make the trainer without optimizers=, and call"
        " attach() before train().",
    )
    _refuse_if(trainer.is_deepspeed_enabled, _DEEPSPEED)
    _refuse_if(trainer.is_fsdp_enabled, _FSDP)


def refuse_plan(args: transformers.TrainingArguments, plan: Plan) -> None:
    """Refuse a plan that contradicts a Trainer's arguments."""
    steps, planned = args.gradient_accumulation_steps, plan.accumulation_steps
    # What can be undone is undone by the next micro-batch.
    begins_early = plan.timing.begins_early and not plan.timing.can_undo
    _refuse_stowed_if(
        not plan.timing.allows_clipping and args.max_grad_norm > 0,
        f'overlap="backward" is in the plan with max_grad_norm={args.max_grad_norm}: gradients are'
        ' used before their norm is known. Set max_grad_norm=0, or use overlap="none", "forward" or'
        ' "speculative"',
    )
    _refuse_stowed_if(
        (plan.reduces_with_last or begins_early) and steps != planned,
        f"a plan of stage={plan.stage} and {plan.timing.keyword} counts micro-batches, up to"
        f" accumulation_steps={planned}, and the arguments have gradient_accumulation_steps="
        f"{steps}: make them equal",
    )
    _refuse_stowed_if(
        plan.ordered_reduce == "sum",
        'ordered_reduce="sum" is in the plan, and a Trainer divides the loss for a mean over ranks:'
        ' use ordered_reduce="mean"',
    )


def refuse_for_model(
    trainer: transformers.Trainer, keywords: Mapping[str, Any], *, durable: bool
) -> None:
    """Refuse a trainer in which a placed model would not train correctly.

    ``keywords`` are those of ``stow``; ``durable``: whether the run commits.
    """
    args: Any = trainer.args  # TRL's too
    _refuse_placing_too(trainer, args)
    _refuse_readers_of_weights(args)
    _refuse_parted_checkpoints(args, durable=durable)
    # The Trainer would train and save as a single process.
    _refuse_stowed_if(
        args.world_size != world_size(),
        f"the Trainer knows of {format_count(args.world_size, 'rank')}, and stow of"
        f" {world_size()} ({launched().source or 'its process group'}): start them with torchrun",
    )
    if isinstance(keywords.get("plan"), Plan):
        refuse_plan(trainer.args, keywords["plan"])


def _refuse_placing_too(trainer: transformers.Trainer, args: Any) -> None:
    """Refuse a Trainer that would also place, cast or make what ``stow`` does."""
    precision, device_type = trainer.accelerator.mixed_precision, current_device().type
    optimizer, other = trainer.optimizer or trainer.optimizer_cls_and_kwargs, _other_optimizer(args)
    _refuse_stowed_if(
        trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled,
        "deepspeed= or fsdp= was given, which place the model too: leave it out",
    )
    _refuse_stowed_if(
        precision != "no",
        f"a Trainer in mixed precision ({precision}) was given for a model that is placed:"
        " torch.autocast keeps a 16-bit copy of every weight until forward ends, so that the whole"
        " model would be in memory. Leave bf16= and fp16= out, and give"
        " compute_dtype=torch.bfloat16 in stow=",
    )
    _refuse_stowed_if(
        args.fp16_full_eval or args.bf16_full_eval,
        "fp16_full_eval or bf16_full_eval was given, which casts the model: leave it out",
    )
    _refuse_stowed_if(
        args.torch_compile,
        "torch_compile=True was given, and the model is placed: compile its blocks before",
    )
    _refuse_stowed_if(
        args.n_gpu > 1,
        f"{args.n_gpu} GPUs were found for one process: start one for each GPU, with torchrun",
    )
    _refuse_stowed_if(
        args.device.type != device_type,
        f"the Trainer computes on {args.device.type}, and stow on {device_type}: leave use_cpu="
        " out, or hide the device from this process",
    )
    _refuse_stowed_if(
        trainer.model_init is not None,
        "model_init= was given, which makes a model anew in train(): pass the model",
    )
    _refuse_stowed_if(
        optimizer is not None,
        "an optimizer was given, and a placed model's is made with it: leave optimizers= and"
        " optimizer_cls_and_kwargs= out, and pass AdamW's keywords in stow=",
    )
    _refuse_stowed_if(other, f"{other} was given, and a placed model has AdamW: leave it out")


def _refuse_readers_of_weights(args: Any) -> None:
    """Refuse what reads whole weights, of which a rank or its memory has only a part."""
    _refuse_stowed_if(
        getattr(args, "use_vllm", False),
        "use_vllm=True was given: vLLM is sent the weights parameter by parameter, and a placed one"
        " is not in memory. Leave it out: the model generates itself",
    )
    _refuse_stowed_if(
        getattr(args, "sync_ref_model", False),
        "sync_ref_model=True was given: the reference model is moved towards the weights parameter"
        " by parameter, and a placed one is not in memory. Leave it out",
    )


def _refuse_parted_checkpoints(args: Any, *, durable: bool) -> None:
    """Refuse a checkpoint that would be incomplete, and a retry that would begin in mid-step."""
    saves = args.save_strategy != "no" and not args.save_only_model
    _refuse_stowed_if(
        args.auto_find_batch_size,
        "auto_find_batch_size=True was given: a second try would go on in the middle of a step",
    )
    _refuse_stowed_if(
        args.world_size > 1 and saves and not durable,
        f"{args.world_size} processes save checkpoints, and rank 0 alone saves the optimizer's"
        " state dict, in which it has its part of the states. Give dir= in stow=, so that"
        ' checkpoints are snapshot references; or save_only_model=True, or save_strategy="no"',
    )


def _other_optimizer(args: Any) -> str | None:
    """Return the argument that asks for another optimizer than AdamW, as it was given."""
    kind = str(getattr(args.optim, "value", args.optim))
    if kind not in _ALIKE:
        return f'optim="{kind}"'
    return f'optim_args="{args.optim_args}"' if args.optim_args else None
