"""The loss scale of fp16, as ColossalAI's scaler changes it: arithmetic, no tensors."""

from collections.abc import Mapping

from tensorstow.base.errors import OptionError
from tensorstow.doorkit.keyword_table import checks_keywords, honoured

LOSS_SCALE = {
    "initial_scale": honoured("The first loss scale; this and the next six are of fp16."),
    "growth_factor": honoured(
        "The factor of the scale after ``growth_interval`` good steps, above 1."
    ),
    "backoff_factor": honoured("The factor of the scale at an overflow, below 1."),
    "growth_interval": honoured("Good steps in a row until the scale grows."),
    "min_scale": honoured("The least loss scale."),
    "max_scale": honoured("The largest loss scale."),
    "hysteresis": honoured("Overflows until the scale falls."),
}
"""The keywords by which every plugin with fp16 sets its loss scale."""


@checks_keywords(LOSS_SCALE)
class DynamicGradScaler:
    """The loss scale of a run, updated after each step by whether gradients overflowed.

    Of overflows with fewer than ``growth_interval`` good steps in a row between them, the first
    ``hysteresis - 1`` leave the scale as it is; each one after them makes it smaller.
    """

    def __init__(
        self,
        initial_scale: float = 2**16,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 2,
    ) -> None:
        self.scale = float(initial_scale)
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval, self._hysteresis = growth_interval, hysteresis
        self._min, self._max = min_scale or 0.0, max_scale or float("inf")
        self._good_steps = self._overflows = 0
        for name, value, legal, requirement in (
            ("growth_factor", growth_factor, growth_factor > 1, "above 1"),
            ("backoff_factor", backoff_factor, 0 < backoff_factor < 1, "between 0 and 1"),
            (
                "growth_interval",
                growth_interval,
                growth_interval >= 1 and growth_interval == int(growth_interval),
                "a whole number of steps, at least 1",
            ),
            ("hysteresis", hysteresis, hysteresis >= 0, "not negative"),
            (
                "initial_scale",
                initial_scale,
                initial_scale > 0 and self._min <= initial_scale <= self._max,
                f"above 0 and between min_scale={min_scale} and max_scale={max_scale}",
            ),
        ):
            if not legal:
                message = f"{name}={value} was given: it must be {requirement}."
                raise OptionError(message)

    def update(self, *, overflow: bool) -> None:
        """Record a step; the caller skips one that overflowed."""
        if overflow:
            self._overflows += 1
            self._good_steps = 0
            if self._overflows >= self._hysteresis:
                self.scale = max(self.scale * self._backoff_factor, self._min)
            return
        self._good_steps += 1
        if self._good_steps == self._growth_interval:
            self._good_steps = self._overflows = 0
            self.scale = min(self.scale * self._growth_factor, self._max)

    def state_dict(self) -> dict[str, float | int]:
        """Return the scale and the counted steps, for a checkpoint."""
        return {
            "scale": self.scale,
            "good_steps": self._good_steps,
            "overflows": self._overflows,
        }

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Go on from what ``state_dict`` returned."""
        self.scale = float(state["scale"])
        self._good_steps, self._overflows = int(state["good_steps"]), int(state["overflows"])
