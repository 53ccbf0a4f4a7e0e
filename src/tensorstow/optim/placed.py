"""``PlacedOptimizer``: what may update a model that is placed."""

from typing import TypeVar

from tensorstow.optim.generic.stowed_optimizer import StowedOptimizer
from tensorstow.optim.stowed_adam import StowedAdam

PlacedOptimizer = StowedAdam | StowedOptimizer
"""Adam and AdamW, and any class of torch's."""
PlacedOptimizerT = TypeVar("PlacedOptimizerT", bound=PlacedOptimizer)


def name_of_class(optimizer: PlacedOptimizer) -> str:
    """Return the class whose states an optimizer has; Adam's and AdamW's are the same."""
    if isinstance(optimizer, StowedAdam):
        return "Adam"
    return optimizer._stepper.optimizer_class.__name__  # noqa: SLF001  # one package
