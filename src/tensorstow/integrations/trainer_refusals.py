"""Checks of a transformers Trainer: refuse what would fail late or go wrong in silence."""

import os
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import transformers

from tensorstow.base.errors import OptionError
from tensorstow.base.launch import launched
from tensorstow.base.plan import Plan
from tensorstow.base.sizes import format_count
from tensorstow.base.update_timing import timing_of
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
_BACKWARD = (
    'overlap="backward" was given: a Trainer asks for the norm of all gradients after backward,'
    ' also with max_grad_norm=0, when they are already used. Use overlap="none" or "forward";'
    " or Stowed, which has the norm."
)
_RANKS = (
    "dir={directory!r} was given for {world} processes: each has all parameters and would keep a"
    " copy of all states, and a checkpoint is of rank 0 alone. Leave dir= out for scratch files, or"
    " shard with Stowed."
)
_BATCH_SIZE = (
    "dir={directory!r} was given with auto_find_batch_size=True: the second try would find the run"
    " of the first one in it. Choose per_device_train_batch_size yourself."
)

_ALIKE = frozenset({"adamw_torch", "adamw_torch_fused"})
"""Values of ``optim=`` that mean AdamW."""


def uses_fsdp(args: transformers.TrainingArguments) -> bool:
    """Return whether accelerate would shard: by the arguments, or its launcher's variable."""
    return bool(args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "").lower() in {"1", "true"}


def refuse_for_optimizer(args: transformers.TrainingArguments, keywords: Mapping[str, Any]) -> None:
    """Raise OptionError for arguments that do not work with ``adamw``, an optimizer alone."""
    message = None
    if timing_of(keywords.get("overlap", "none")).begins_early:
        message = _BACKWARD
    elif args.deepspeed:
        message = _DEEPSPEED
    elif uses_fsdp(args):
        message = _FSDP
    elif is_durable(keywords) and args.world_size > 1:
        message = _RANKS.format(directory=keywords["dir"], world=args.world_size)
    elif is_durable(keywords) and args.auto_find_batch_size:
        message = _BATCH_SIZE.format(directory=keywords["dir"])
    elif (other := _other_optimizer(args)) is not None:
        message = f"{other} was given, and the optimizer is tensorstow.AdamW: leave it out."
    if message is not None:
        raise OptionError(message)


def _other_optimizer(args: Any) -> str | None:  # noqa: ANN401
    """Return the argument that asks for another optimizer than AdamW, as it was given."""
    kind = str(getattr(args.optim, "value", args.optim))
    if kind not in _ALIKE:
        return f'optim="{kind}"'
    return f'optim_args="{args.optim_args}"' if args.optim_args else None


def refuse_to_attach(trainer: transformers.Trainer, *, whole: bool) -> None:
    """Raise OptionError for a trainer whose optimizer ``attach`` must not make.

    ``whole``: its model is placed, too.
    """
    if whole:
        message = "attach() was called for a Stowed trainer: pass the keywords in its stow=."
        raise OptionError(message)
    if trainer.optimizer is not None:
        kind = type(trainer.optimizer).__name__
        message = (
            f"attach() was called for a trainer that has an optimizer already ({kind}). Make the"
            " trainer without optimizers=, and call attach() before train()."
        )
        raise OptionError(message)
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise OptionError(_DEEPSPEED if trainer.is_deepspeed_enabled else _FSDP)


# --- whole models ---


def refuse_for_model(
    trainer: transformers.Trainer, keywords: Mapping[str, Any], *, durable: bool
) -> None:
    """Raise OptionError for a trainer in which a placed model would not train correctly.

    Args:
        trainer: The trainer, before its model is placed.
        keywords: The keywords of ``stow``.
        durable: Whether the run commits.
    """
    args: Any = trainer.args
    reasons = chain(
        _placed_twice(trainer),
        _read_elsewhere(args),
        _saved_in_part(trainer, durable),
        _launched_otherwise(args),
    )
    for is_refused, reason in reasons:
        if is_refused:
            message = f"Stowed: {reason}."
            raise OptionError(message)
    if isinstance(keywords.get("plan"), Plan):
        refuse_plan(args, keywords["plan"])


def refuse_plan(args: transformers.TrainingArguments, plan: Plan) -> None:
    """Raise OptionError for a plan that contradicts a Trainer's arguments."""
    steps, planned_steps = args.gradient_accumulation_steps, plan.accumulation_steps
    counts_micro_batches = plan.stage == 1 or plan.timing.begins_early
    message = None
    if plan.timing.begins_early and args.max_grad_norm > 0:
        message = (
            f'Stowed: overlap="backward" is in the plan with max_grad_norm={args.max_grad_norm}:'
            " gradients are used before their norm is known. Set max_grad_norm=0, or use"
            ' overlap="none".'
        )
    elif counts_micro_batches and steps != planned_steps:
        message = (
            f"Stowed: a plan of stage={plan.stage} and {plan.timing.keyword} counts"
            f" micro-batches, up to accumulation_steps={planned_steps}, and the arguments have"
            f" gradient_accumulation_steps={steps}: make them equal."
        )
    if message is not None:
        raise OptionError(message)


_Reasons = Iterator[tuple[bool, str]]
"""Pairs: whether to refuse, and the reason."""


def _placed_twice(trainer: transformers.Trainer) -> _Reasons:
    """Yield options by which the Trainer would also place, cast or make what ``stow`` does."""
    args: Any = trainer.args
    precision, device_type = trainer.accelerator.mixed_precision, current_device().type
    optimizer = trainer.optimizer or trainer.optimizer_cls_and_kwargs
    other = _other_optimizer(args)
    yield (
        trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled,
        "deepspeed= or fsdp= was given, which place the model too: leave it out",
    )
    yield (
        precision != "no",
        (
            f"a Trainer in mixed precision ({precision}) was given for a model that is placed:"
            " torch.autocast keeps a 16-bit copy of every weight until forward ends, so that the"
            " whole model would be in memory. Leave bf16= and fp16= out, and give"
            " compute_dtype=torch.bfloat16 in stow="
        ),
    )
    yield (
        args.fp16_full_eval or args.bf16_full_eval,
        "fp16_full_eval or bf16_full_eval was given, which casts the model: leave it out",
    )
    yield (
        args.torch_compile,
        "torch_compile=True was given, and the model is placed: compile its blocks before",
    )
    yield (
        args.n_gpu > 1,
        f"{args.n_gpu} GPUs were found for one process: start one for each GPU, with torchrun",
    )
    yield (
        args.device.type != device_type,
        (
            f"the Trainer computes on {args.device.type}, and stow on {device_type}: leave"
            " use_cpu= out, or hide the device from this process"
        ),
    )
    yield (
        trainer.model_init is not None,
        "model_init= was given, which makes a model anew in train(): pass the model",
    )
    yield (
        optimizer is not None,
        (
            "an optimizer was given, and a placed model's is made with it: leave optimizers= and"
            " optimizer_cls_and_kwargs= out, and pass AdamW's keywords in stow="
        ),
    )
    yield (
        other is not None,
        f"{other} was given, and a placed model has AdamW: leave it out",
    )


def _read_elsewhere(args: Any) -> _Reasons:  # noqa: ANN401  # TRL's too
    """Yield readers of whole weights, of which a rank or its memory has only a part."""
    yield (
        getattr(args, "use_vllm", False),
        (
            "use_vllm=True was given: vLLM is sent the weights parameter by parameter, and a placed"
            " one is not in memory. Leave it out: the model generates itself"
        ),
    )
    yield (
        getattr(args, "sync_ref_model", False),
        (
            "sync_ref_model=True was given: the reference model is moved towards the weights"
            " parameter by parameter, and a placed one is not in memory. Leave it out"
        ),
    )


def _saved_in_part(trainer: transformers.Trainer, durable: bool) -> _Reasons:  # noqa: FBT001
    """Yield options by which a checkpoint is incomplete, or a retry begins in mid-step."""
    args: Any = trainer.args
    saves = args.save_strategy != "no" and not args.save_only_model
    yield (
        args.auto_find_batch_size,
        "auto_find_batch_size=True was given: a second try would go on in the middle of a step",
    )
    yield (
        args.world_size > 1 and hasattr(trainer.model, "peft_config"),
        (
            f"adapters of peft were given on {args.world_size} processes: peft saves from rank 0,"
            " which has a part of each. Train them on one process, or with adamw() on several"
        ),
    )
    yield (
        args.world_size > 1 and saves and not durable,
        (
            f"{args.world_size} processes save checkpoints, and rank 0 alone saves the optimizer's"
            " state dict, in which it has its part of the states. Give dir= in stow=, so that"
            ' checkpoints are tickets; or save_only_model=True, or save_strategy="no"'
        ),
    )


def _launched_otherwise(args: Any) -> _Reasons:  # noqa: ANN401
    """Yield the mismatch by which the Trainer would train and save as a single process."""
    yield (
        args.world_size != world_size(),
        (
            f"the Trainer knows of {format_count(args.world_size, 'rank')}, and stow of"
            f" {world_size()} ({launched().source or 'its process group'}): start them with"
            " torchrun"
        ),
    )
