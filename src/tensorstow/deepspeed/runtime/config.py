"""``deepspeed.runtime.config``: a configuration as an object, for scripts that read one."""

from collections.abc import Mapping
from os import PathLike
from typing import Any

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.comm import refuse_model_parallel
from tensorstow.deepspeed.config.json_text import load
from tensorstow.deepspeed.config.reading import read_settings
from tensorstow.deepspeed.config.settings import Named
from tensorstow.fsdp.sharding import world_size

DeepSpeedConfigError = OptionError
"""The error of a configuration that is not supported."""


class DeepSpeedConfig:
    """A checked configuration with upstream's attributes; ``zero_config`` is the section.

    Args:
        config: A JSON file, one in base64, or a dict.
        mpu: An object of model parallelism; refused unless its size is 1.
        mesh_device: A mesh; refused unless all ranks are in its first dimension.

    Raises:
        OptionError: A value that is not supported.
    """

    def __init__(
        self,
        config: str | PathLike[str] | Mapping[str, Any],
        mpu: object = None,
        mesh_device: Any = None,
    ) -> None:
        meshed = mesh_device is not None and mesh_device.size(0) != mesh_device.size()
        refuse_model_parallel(mpu, meshed=meshed, mpu=mpu, mesh_device=mesh_device)
        self._param_dict = load(config)
        self.world_size = world_size()
        settings = read_settings(self._param_dict, self.world_size)
        batch = settings.batch
        self.train_batch_size = batch.train
        self.train_micro_batch_size_per_gpu = batch.micro
        self.gradient_accumulation_steps = batch.accumulation
        self.gradient_clipping = settings.gradient_clipping
        self.gradient_allreduce_op = settings.gradient_allreduce_op
        self.steps_per_print = settings.steps_per_print
        self.wall_clock_breakdown = settings.wall_clock_breakdown
        self.zero_config = settings.zero
        self.zero_optimization_stage = settings.zero.stage
        self.zero_enabled = settings.zero.stage > 0
        self.bfloat16_enabled, self.fp16_enabled = settings.bf16, settings.fp16 is not None
        self.optimizer_name, self.optimizer_params = _named(settings.optimizer)
        self.scheduler_name, self.scheduler_params = _named(settings.scheduler)


def _named(section: Named | None) -> tuple[str | None, dict[str, Any] | None]:
    return (None, None) if section is None else (section.type, dict(section.params))
