"""What an engine says of its configuration, and the batch sizes, which may be changed."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.config.settings import Batch, Settings
from tensorstow.deepspeed.plans import dtype_of, world_of


class ConfiguredModule(nn.Module):
    """A module with a configuration, by upstream's names; ``config`` is as it was written."""

    def __init__(self, settings: Settings, config: dict[str, Any]) -> None:
        super().__init__()
        self.settings = settings
        self.config = config
        self.world_size = world_of(settings)
        self._begun_with = settings.batch.accumulation

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return the configuration's ``stage3_gather_16bit_weights_on_model_save``."""
        return bool(self.settings.zero.stage3_gather_16bit_weights_on_model_save)

    def zero_optimization_partition_gradients(self) -> bool:
        """Return whether gradients are sharded: in stages 2 and 3."""
        return self.zero_optimization_stage() > 1

    def zero_optimization_partition_weights(self) -> bool:
        """Return whether parameters are sharded: in stage 3."""
        return self.zero_optimization_stage() == 3

    def train_batch_size(self) -> int:
        """Return the samples that all ranks use in one step."""
        return self.settings.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of one forward."""
        return self.settings.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches of a step."""
        return self.settings.batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return the samples of a step, those of a forward, and the micro-batches of a step."""
        batch = self.settings.batch
        return batch.train, batch.micro, batch.accumulation

    def steps_per_print(self) -> int:
        """Return after how many steps one is logged."""
        return self.settings.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Return whether the parts of a step are timed."""
        return self.settings.wall_clock_breakdown

    def gradient_clipping(self) -> float:
        """Return the largest norm of the gradients; 0: nothing is clipped."""
        return self.settings.gradient_clipping

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage, 0 to 3."""
        return self.settings.zero.stage

    def zero_optimization(self) -> bool:
        """Return whether anything is sharded: above stage 0."""
        return self.zero_optimization_stage() > 0

    def bfloat16_enabled(self) -> bool:
        """Return whether the model is in bf16."""
        return self.settings.bf16

    def fp16_enabled(self) -> bool:
        """Return whether the model is in fp16."""
        return self.settings.fp16 is not None

    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale is dynamic; False without fp16."""
        return self.settings.fp16 is not None and self.settings.fp16.loss_scale == 0.0

    def managed_gradient_accumulation(self) -> bool:
        """Return whether ``step()`` is called after each micro-batch, not the last alone."""
        return self.settings.managed_accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set how many samples a step uses, by the number of its micro-batches.

        Args:
            train_batch_size: Samples of all ranks.

        Raises:
            OptionError: It is not a multiple of what all ranks use in one forward; or steps of one
                micro-batch get several, with a 16-bit model, whose sums are to be in fp32.
        """
        of_forward = self.train_micro_batch_size_per_gpu() * self.world_size
        steps, rest = divmod(train_batch_size, of_forward)
        if rest or steps < 1:
            message = (
                f"set_train_batch_size({train_batch_size}) was called: all ranks use {of_forward}"
                " samples in one forward. Use a multiple of that."
            )
            raise OptionError(message)
        if steps > 1 and self._begun_with == 1 and dtype_of(self.settings) != torch.float32:
            message = (
                f"set_train_batch_size({train_batch_size}) was called, which is {steps} micro-"
                "batches a step: initialize() was told one, and has not prepared sums of 16-bit"
                ' gradients in fp32. Begin with "gradient_accumulation_steps": 2 or more.'
            )
            raise OptionError(message)
        self._set_batch(self.train_micro_batch_size_per_gpu(), steps)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set how many samples one forward uses; a step keeps the number of its micro-batches.

        Args:
            micro_batch_size: Samples of one rank.

        Raises:
            OptionError: It is less than 1.
        """
        if micro_batch_size < 1:
            message = f"set_train_micro_batch_size({micro_batch_size}) was called; give 1 or more."
            raise OptionError(message)
        self._set_batch(micro_batch_size, self.gradient_accumulation_steps())

    def _set_batch(self, micro: int, steps: int) -> None:
        batch = Batch(micro * steps * self.world_size, micro, steps)
        self.settings = replace(self.settings, batch=batch)
