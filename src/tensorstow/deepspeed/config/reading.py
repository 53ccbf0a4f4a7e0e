"""``read_settings``: a DeepSpeed configuration, checked, as Settings."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.config import conflicts
from tensorstow.deepspeed.config.batches import batch_of
from tensorstow.deepspeed.config.json_text import Source, load
from tensorstow.deepspeed.config.paths import given_keys, older_names
from tensorstow.deepspeed.config.settings import (
    ActivationCheckpointing,
    Aio,
    Fp16,
    Named,
    OffloadOptimizer,
    OffloadParam,
    Settings,
    Zero,
)
from tensorstow.deepspeed.config.values import say_once, values_of

Values = Mapping[str, Any]


def read_settings(source: Source, world: int, *, fill: Mapping[str, Any] | None = None) -> Settings:
    """Read a file or a dict for ``world`` data-parallel ranks; raises OptionError.

    ``fill``: values for what says "auto", by path: ``{"optimizer.params.lr": 1e-4}``. Keys that
    mean nothing here are named once in the log of "tensorstow".
    """
    if world < 1:
        message = f"world={world} was given: a run has at least one rank."
        raise OptionError(message)
    given = given_keys(load(source))
    values = values_of(given, fill or {})
    older = older_names(given)
    if older:
        say_once(
            f"names in the DeepSpeed configuration are read as those of today: {', '.join(older)}"
        )
    if not any(one.key.path == "gradient_clipping" for one in given):
        say_once(
            "gradient_clipping is absent and nothing is clipped, as in DeepSpeed before 0.19:"
            ' write "gradient_clipping": 1.0 for what it does since'
        )
    conflicts.refuse_two_precisions(values)
    settings = _settings(values, world)
    conflicts.check(settings, world)
    return settings


def _settings(values: Values, world: int) -> Settings:
    return Settings(
        batch=batch_of(
            values["train_batch_size"],
            values["train_micro_batch_size_per_gpu"],
            values["gradient_accumulation_steps"],
            world,
        ),
        optimizer=_named(values, "optimizer"),
        scheduler=_named(values, "scheduler"),
        fp16=Fp16(**_fields(Fp16, "fp16", values)) if values["fp16.enabled"] else None,
        bf16=values["bf16.enabled"],
        gradient_clipping=values["gradient_clipping"],
        zero=_zero(values),
        aio=Aio(
            values["aio.block_size"], values["aio.queue_depth"], values["aio.intra_op_parallelism"]
        ),
        activation_checkpointing=ActivationCheckpointing(
            **_fields(ActivationCheckpointing, "activation_checkpointing", values)
        ),
        steps_per_print=values["steps_per_print"],
        wall_clock_breakdown=values["wall_clock_breakdown"],
        dataloader_drop_last=values["dataloader_drop_last"],
    )


def _zero(values: Values) -> Zero:
    name = "zero_optimization"
    optimizer, param = f"{name}.offload_optimizer", f"{name}.offload_param"
    return Zero(
        stage=values[f"{name}.stage"],
        offload_optimizer=OffloadOptimizer(**_fields(OffloadOptimizer, optimizer, values)),
        offload_param=OffloadParam(**_fields(OffloadParam, param, values)),
        hpz_partition_size=values[f"{name}.zero_hpz_partition_size"],
        mics_shard_size=values[f"{name}.mics_shard_size"],
    )


def _named(values: Values, section: str) -> Named | None:
    kind, params = values[f"{section}.type"], values[f"{section}.params"]
    if kind is None:
        if params:
            message = f"{section}.params was given without {section}.type. Name the type."
            raise OptionError(message)
        return None
    return Named(kind, dict(params or {}))


def _fields(cls: type, section: str, values: Values) -> dict[str, Any]:
    return {f.name: values[f"{section}.{f.name}"] for f in fields(cls)}
