"""DeepSpeed's configuration as keywords of an optimizer in a Trainer that has no ``deepspeed=``.

The file is compared with the Trainer's arguments as transformers compares it: "auto" takes theirs,
and a value that contradicts them is an error with both. Values that the file omits are theirs, too.
"""

import logging
from collections.abc import Mapping
from typing import Any

import transformers

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.config.json_text import Source, load
from tensorstow.deepspeed.config.reading import read_settings
from tensorstow.deepspeed.config.settings import Settings
from tensorstow.deepspeed.config.summary import summary_of
from tensorstow.states.policy import PipelinePolicy

logger = logging.getLogger("tensorstow")

_OPTIMIZER = "optimizer.params."
_DEFAULT_FLAGS = {"adam_w_mode": True, "bias_correction": True, "amsgrad": False}
_OF_IMPLEMENTATIONS = ("torch_adam", "fused", "foreach")


def placement_in(source: Source, args: transformers.TrainingArguments) -> dict[str, Any]:
    """Return the keywords that place states as a configuration asks; raises OptionError.

    ``source`` is a file or a dict; ``args``, of the Trainer, replace "auto".
    """
    written = load(source)
    pairs = _pairs(args)
    _refuse_sections(written)
    _refuse_mismatches(written, pairs)
    # Without ``train_batch_size``, which follows from the others.
    fill = {path: value for path, (value, _) in pairs.items() if path != "train_batch_size"}
    clipped = {"gradient_clipping": args.max_grad_norm, **written}
    settings = read_settings(clipped, args.world_size, fill=fill)
    _refuse_unsupported(settings, args.world_size)
    logger.info("the DeepSpeed configuration:\n%s", summary_of(written))
    if settings.fp16 is not None:
        logger.warning("fp16: the loss scale is accelerate's, and not the configuration's")
    return _placement(settings)


def _placement(settings: Settings) -> dict[str, Any]:
    offload = settings.zero.offload_optimizer
    keywords: dict[str, Any] = {"states": "host"}
    if offload.device == "nvme":
        keywords = {"states": "disk", "policy": PipelinePolicy(depth=settings.aio.queue_depth)}
        if offload.nvme_path is not None:
            # Scratch files, as DeepSpeed's; dir= of the caller makes the run durable.
            keywords |= {"dir": offload.nvme_path, "durability": "none"}
    if offload.ratio != 1.0:
        keywords["update_on"] = 1.0 - offload.ratio if offload.ratio else "device"
    return keywords


def _pairs(args: transformers.TrainingArguments) -> dict[str, tuple[Any, str]]:
    """Return the value and the name of the Trainer's argument for each path of a configuration."""
    micro, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    return {
        "train_micro_batch_size_per_gpu": (micro, "per_device_train_batch_size"),
        "gradient_accumulation_steps": (steps, "gradient_accumulation_steps"),
        "train_batch_size": (args.world_size * micro * steps, "train_batch_size (of the others)"),
        "gradient_clipping": (args.max_grad_norm, "max_grad_norm"),
        f"{_OPTIMIZER}lr": (args.learning_rate, "learning_rate"),
        f"{_OPTIMIZER}betas": ([args.adam_beta1, args.adam_beta2], "adam_beta1 and adam_beta2"),
        f"{_OPTIMIZER}eps": (args.adam_epsilon, "adam_epsilon"),
        f"{_OPTIMIZER}weight_decay": (args.weight_decay, "weight_decay"),
        "fp16.enabled": (bool(args.fp16), "fp16"),
        "bf16.enabled": (bool(args.bf16), "bf16"),
    }


def _refuse_mismatches(written: Mapping[str, Any], pairs: Mapping[str, tuple[Any, str]]) -> None:
    lines = []
    for path, (theirs, name) in pairs.items():
        value: Any = written
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        value = list(value) if isinstance(value, tuple) else value  # JSON has lists
        if value not in (None, "auto", theirs):
            lines.append(f"{path}={value!r}, and {name}={theirs!r}")
    if lines:
        message = (
            f"The DeepSpeed configuration contradicts the Trainer's arguments: {'; '.join(lines)}."
            ' Write "auto" in the file, or make them equal.'
        )
        raise OptionError(message)


def _refuse_sections(written: Mapping[str, Any]) -> None:
    if written.get("scheduler") is not None:
        message = (
            "The DeepSpeed configuration has a scheduler, and the Trainer makes its own, by"
            " lr_scheduler_type and warmup_steps. Remove the section; WarmupDecayLR is nearest to"
            ' "linear", WarmupLR to "constant_with_warmup", but their warm-up is logarithmic.'
        )
        raise OptionError(message)
    optimizer = written.get("optimizer")
    if not isinstance(optimizer, Mapping):
        return
    params = dict(optimizer.get("params") or {})
    accepted = {"lr", "betas", "eps", "weight_decay", *_OF_IMPLEMENTATIONS}
    other = [
        f"{name}={value!r}"
        for name, value in params.items()
        if name not in accepted and (name not in _DEFAULT_FLAGS or value != _DEFAULT_FLAGS[name])
    ]
    if str(optimizer.get("type")).lower() not in {"adam", "adamw"}:
        other.insert(0, f"type={optimizer.get('type')!r}")
    if other:
        message = (
            f"The DeepSpeed configuration has an optimizer with {', '.join(other)}: in a Trainer it"
            " is AdamW. Keep deepspeed= in the Trainer, after tensorstow.deepspeed.take_name()"
            " (docs/guides/trainers.md)."
        )
        raise OptionError(message)


def _refuse_unsupported(settings: Settings, world: int) -> None:
    zero, setting = settings.zero, ""
    if zero.offload_param.device != "none":
        setting = f'zero_optimization.offload_param.device="{zero.offload_param.device}"'
    elif zero.stage and world > 1:
        setting = f"zero_optimization.stage={zero.stage} on {world} processes"
    elif settings.activation_checkpointing.cpu_checkpointing:
        setting = "activation_checkpointing.cpu_checkpointing"
    if setting:
        message = (
            f"The DeepSpeed configuration has {setting}: in a Trainer the optimizer's states are"
            " placed, and nothing else. Keep deepspeed= in the Trainer, after"
            " tensorstow.deepspeed.take_name() (docs/guides/trainers.md)."
        )
        raise OptionError(message)
    for name in ("tensorboard", "csv_monitor", "wandb"):
        if getattr(settings, name).enabled:
            message = f"The DeepSpeed configuration enables {name}: use report_to= of the Trainer."
            raise OptionError(message)
