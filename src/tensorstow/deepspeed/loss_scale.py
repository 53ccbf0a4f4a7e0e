"""The factor that keeps small fp16 gradients from vanishing: arithmetic, no tensors."""

from collections.abc import Mapping
from typing import Any

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.config.settings import Fp16

_FACTOR = 2.0


class LossScale:
    """The scale of a run, told after each step whether gradients overflowed.

    A static one (``Fp16.loss_scale`` above 0) never moves. A dynamic one begins at
    ``2 ** initial_scale_power``. After one good step, each ``loss_scale_window`` good ones in a row
    double it. An overflow halves it, down to ``min_loss_scale``, once ``hysteresis`` is used up: of
    n, the first n - 1 overflows only use it up. A doubling restores it, and with
    ``consecutive_hysteresis`` every good step does.
    """

    def __init__(self, settings: Fp16) -> None:
        """Begin as ``settings`` say; raises OptionError for a start below the minimum."""
        self._settings = settings
        self.dynamic = settings.loss_scale == 0.0
        self.scale = 2.0**settings.initial_scale_power if self.dynamic else settings.loss_scale
        if self.dynamic and self.scale < settings.min_loss_scale:
            message = (
                f"fp16.initial_scale_power={settings.initial_scale_power} starts at {self.scale},"
                f" below min_loss_scale={settings.min_loss_scale}. Raise the power, or lower the"
                " minimum."
            )
            raise OptionError(message)
        self._patience = settings.hysteresis
        self._good_steps = 0

    def update(self, *, overflowed: bool) -> None:
        """Take note of a step; one that overflowed is the caller's to skip.

        Raises OptionError for an overflow at the minimum, where nothing is left to try.
        """
        if not self.dynamic:
            return
        if overflowed:
            self._good_steps = 0
            self._back_off()
            return
        self._good_steps += 1
        # One good step opens a window, as in DeepSpeed: the first doubling takes one more.
        windows, rest = divmod(self._good_steps - 1, self._settings.loss_scale_window)
        grown = windows > 0 and rest == 0
        if grown:
            self.scale *= _FACTOR
        if grown or self._settings.consecutive_hysteresis:
            self._patience = self._settings.hysteresis

    def state_dict(self) -> dict[str, float | int]:
        """Return what a checkpoint keeps."""
        return {
            "scale": self.scale,
            "patience": self._patience,
            "good_steps": self._good_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as a checkpoint was; a static scale stays the configuration's."""
        if self.dynamic:
            self.scale = float(state["scale"])
            self._patience = int(state["patience"])
            self._good_steps = int(state["good_steps"])

    def _back_off(self) -> None:
        if self._patience > 1:
            self._patience -= 1
            return
        least = self._settings.min_loss_scale
        if self.scale <= least:
            message = (
                f"Gradients overflowed at the least loss scale, min_loss_scale={least}. Use bf16,"
                " lower the learning rate, or look for what is infinite in the model."
            )
            raise OptionError(message)
        self.scale = max(self.scale / _FACTOR, least)
