"""The loss scale of fp16: grows, and shrinks on overflow."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from tensorstow.base.errors import OptionError, abbreviated
from tensorstow.base.fields import PositiveFloat, check_fields, from_fields, whole_number
from tensorstow.deepspeed.config.settings import Fp16

_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class ScaleState:
    """The state of a loss scale in a checkpoint."""

    scale: PositiveFloat
    patience: int
    good_steps: Annotated[int, whole_number(0)]
    cur_iter: int | None = None
    """None: an older checkpoint lacks it."""

    def __post_init__(self) -> None:
        check_fields(self)


def read_scale(state: object) -> ScaleState:
    """Return the state of a loss scale; raise OptionError if it cannot be one."""
    meant = "scale is a loss scale's state"
    if not isinstance(state, Mapping):
        message = f"{meant}: this is {abbreviated(state)}."
        raise OptionError(message)
    return from_fields(ScaleState, state, meant)


class LossScale:
    """The loss scale of a run, updated after each step by whether gradients overflowed.

    A static scale (``Fp16.loss_scale`` above 0) never changes. A dynamic one starts at ``2 **
    initial_scale_power``. It is doubled after ``loss_scale_window`` good steps in a row, the first
    time after one more. An overflow halves it, down to ``min_loss_scale``, once ``hysteresis`` is
    used up: of n overflows the first n - 1 only use it up. A doubling restores the hysteresis, and
    with ``consecutive_hysteresis`` so does every good step.
    """

    def __init__(self, settings: Fp16) -> None:
        """Start with ``settings``; raises OptionError if the scale starts below its minimum."""
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
        self.cur_iter = 0
        """Steps that a dynamic scale has seen, by upstream's name."""

    @property
    def cur_scale(self) -> float:
        """The scale, by upstream's name."""
        return self.scale

    loss_scale = cur_scale

    @property
    def scale_window(self) -> int:
        """``loss_scale_window``, by upstream's name."""
        return self._settings.loss_scale_window

    def update(self, *, overflowed: bool) -> None:
        """Record a step; one that overflowed is skipped by the caller.

        Raises OptionError for an overflow at the minimum.
        """
        if not self.dynamic:
            return
        self.cur_iter += 1
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
        """Return the state for a checkpoint."""
        return {
            "scale": self.scale,
            "patience": self._patience,
            "good_steps": self._good_steps,
            "cur_iter": self.cur_iter,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; a static scale stays as configured."""
        if self.dynamic:
            read = read_scale(state)
            self.scale, self._patience = read.scale, read.patience
            self._good_steps = read.good_steps
            self.cur_iter = read.good_steps if read.cur_iter is None else read.cur_iter

    def _back_off(self) -> None:
        if self._patience > 1:
            self._patience -= 1
            return
        least = self._settings.min_loss_scale
        if self.scale <= least:
            message = (
                f"Gradients overflowed at the smallest loss scale, min_loss_scale={least}. Use"
                " bf16, lower the learning rate, or look for infinite values in the model."
            )
            raise OptionError(message)
        self.scale = max(self.scale / _FACTOR, least)
