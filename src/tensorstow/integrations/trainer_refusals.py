"""Checks of a transformers Trainer: refuse what would fail late or go wrong in silence."""

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, ParamSpec

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

_P = ParamSpec("_P")


class _Refusal(NamedTuple):
    applies: object
    message: str


def _refusing(form: str = "{}") -> Callable[[Callable[_P, Iterator[_Refusal]]], Callable[_P, None]]:
    """Return a decorator: a function raises OptionError for the first refusal that applies."""

    def decorate(refusals: Callable[_P, Iterator[_Refusal]]) -> Callable[_P, None]:
        @functools.wraps(refusals)
        def refuse(*args: _P.args, **kwargs: _P.kwargs) -> None:
            for refusal in refusals(*args, **kwargs):
                if refusal.applies:
                    raise OptionError(form.format(refusal.message))

        return refuse

    return decorate


@_refusing()
def refuse_for_optimizer(
    args: transformers.TrainingArguments, keywords: Mapping[str, Any]
) -> Iterator[_Refusal]:
    """Refuse arguments that do not work with ``adamw``, an optimizer alone."""
    durable, directory = is_durable(keywords), keywords.get("dir")
    other = _other_optimizer(args)
    timing = timing_of(keywords.get("overlap", "none"))
    yield _Refusal(
        timing.begins_early,
        f"{timing.keyword} was given: a Trainer asks for the norm of all gradients after backward,"
        ' also with max_grad_norm=0, when they are already used. Use overlap="none" or "forward";'
        " or Stowed, which has the norm.",
    )
    yield _Refusal(args.deepspeed, _DEEPSPEED)
    yield _Refusal(
        args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() in {"1", "true"}, _FSDP
    )
    yield _Refusal(
        durable and args.world_size > 1,
        f"dir={directory!r} was given for {args.world_size} processes: each has all parameters and"
        " would keep a copy of all states, and a checkpoint is of rank 0 alone. Leave dir= out for"
        " scratch files, or shard with Stowed.",
    )
    yield _Refusal(
        durable and args.auto_find_batch_size,
        f"dir={directory!r} was given with auto_find_batch_size=True: the second try would find the"
        " run of the first one in it. Choose per_device_train_batch_size yourself.",
    )
    yield _Refusal(
        other, f"{other} was given, and the optimizer is tensorstow.AdamW: leave it out."
    )


@_refusing()
def refuse_to_attach(trainer: transformers.Trainer, *, whole: bool) -> Iterator[_Refusal]:
    """Refuse a trainer whose optimizer ``attach`` must not make; ``whole``: its model is placed."""
    yield _Refusal(
        whole, "attach() was called for a Stowed trainer: pass the keywords in its stow=."
    )
    yield _Refusal(
        trainer.optimizer is not None,
        "attach() was called for a trainer that has an optimizer already"
        f" ({type(trainer.optimizer).__name__}). Make the trainer without optimizers=, and call"
        " attach() before train().",
    )
    yield _Refusal(trainer.is_deepspeed_enabled, _DEEPSPEED)
    yield _Refusal(trainer.is_fsdp_enabled, _FSDP)


@_refusing("Stowed: {}.")
def refuse_plan(args: transformers.TrainingArguments, plan: Plan) -> Iterator[_Refusal]:
    """Refuse a plan that contradicts a Trainer's arguments."""
    steps, planned = args.gradient_accumulation_steps, plan.accumulation_steps
    begins_early = plan.timing.begins_early
    yield _Refusal(
        not plan.timing.allows_clipping and args.max_grad_norm > 0,
        f'overlap="backward" is in the plan with max_grad_norm={args.max_grad_norm}: gradients are'
        ' used before their norm is known. Set max_grad_norm=0, or use overlap="none", "forward" or'
        ' "speculative"',
    )
    yield _Refusal(
        (plan.reduces_with_last or begins_early) and steps != planned,
        f"a plan of stage={plan.stage} and {plan.timing.keyword} counts micro-batches, up to"
        f" accumulation_steps={planned}, and the arguments have gradient_accumulation_steps="
        f"{steps}: make them equal",
    )
    yield _Refusal(
        plan.ordered_reduce == "sum",
        'ordered_reduce="sum" is in the plan, and a Trainer divides the loss for a mean over ranks:'
        ' use ordered_reduce="mean"',
    )


@_refusing("Stowed: {}.")
def refuse_for_model(
    trainer: transformers.Trainer, keywords: Mapping[str, Any], *, durable: bool
) -> Iterator[_Refusal]:
    """Refuse a trainer in which a placed model would not train correctly.

    ``keywords`` are those of ``stow``; ``durable``: whether the run commits.
    """
    args: Any = trainer.args  # TRL's too
    precision, device_type = trainer.accelerator.mixed_precision, current_device().type
    optimizer = trainer.optimizer or trainer.optimizer_cls_and_kwargs
    other, saves = _other_optimizer(args), args.save_strategy != "no" and not args.save_only_model
    # The Trainer would also place, cast or make what stow() does.
    yield _Refusal(
        trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled,
        "deepspeed= or fsdp= was given, which place the model too: leave it out",
    )
    yield _Refusal(
        precision != "no",
        f"a Trainer in mixed precision ({precision}) was given for a model that is placed:"
        " torch.autocast keeps a 16-bit copy of every weight until forward ends, so that the whole"
        " model would be in memory. Leave bf16= and fp16= out, and give"
        " compute_dtype=torch.bfloat16 in stow=",
    )
    yield _Refusal(
        args.fp16_full_eval or args.bf16_full_eval,
        "fp16_full_eval or bf16_full_eval was given, which casts the model: leave it out",
    )
    yield _Refusal(
        args.torch_compile,
        "torch_compile=True was given, and the model is placed: compile its blocks before",
    )
    yield _Refusal(
        args.n_gpu > 1,
        f"{args.n_gpu} GPUs were found for one process: start one for each GPU, with torchrun",
    )
    yield _Refusal(
        args.device.type != device_type,
        f"the Trainer computes on {args.device.type}, and stow on {device_type}: leave use_cpu="
        " out, or hide the device from this process",
    )
    yield _Refusal(
        trainer.model_init is not None,
        "model_init= was given, which makes a model anew in train(): pass the model",
    )
    yield _Refusal(
        optimizer is not None,
        "an optimizer was given, and a placed model's is made with it: leave optimizers= and"
        " optimizer_cls_and_kwargs= out, and pass AdamW's keywords in stow=",
    )
    yield _Refusal(other, f"{other} was given, and a placed model has AdamW: leave it out")
    # Others read whole weights, of which a rank or its memory has only a part.
    yield _Refusal(
        getattr(args, "use_vllm", False),
        "use_vllm=True was given: vLLM is sent the weights parameter by parameter, and a placed one"
        " is not in memory. Leave it out: the model generates itself",
    )
    yield _Refusal(
        getattr(args, "sync_ref_model", False),
        "sync_ref_model=True was given: the reference model is moved towards the weights parameter"
        " by parameter, and a placed one is not in memory. Leave it out",
    )
    # A checkpoint would be incomplete, or a retry would begin in mid-step.
    yield _Refusal(
        args.auto_find_batch_size,
        "auto_find_batch_size=True was given: a second try would go on in the middle of a step",
    )
    yield _Refusal(
        args.world_size > 1 and saves and not durable,
        f"{args.world_size} processes save checkpoints, and rank 0 alone saves the optimizer's"
        " state dict, in which it has its part of the states. Give dir= in stow=, so that"
        ' checkpoints are snapshot references; or save_only_model=True, or save_strategy="no"',
    )
    # The Trainer would train and save as a single process.
    yield _Refusal(
        args.world_size != world_size(),
        f"the Trainer knows of {format_count(args.world_size, 'rank')}, and stow of"
        f" {world_size()} ({launched().source or 'its process group'}): start them with torchrun",
    )
    if isinstance(keywords.get("plan"), Plan):
        refuse_plan(trainer.args, keywords["plan"])


def _other_optimizer(args: Any) -> str | None:
    """Return the argument that asks for another optimizer than AdamW, as it was given."""
    kind = str(getattr(args.optim, "value", args.optim))
    if kind not in _ALIKE:
        return f'optim="{kind}"'
    return f'optim_args="{args.optim_args}"' if args.optim_args else None
