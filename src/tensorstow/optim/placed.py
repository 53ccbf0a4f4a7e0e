"""``PlacedOptimizer``: what may update a model that is placed."""

from typing import TypeVar

from tensorstow.optim.generic.stowed_optimizer import StowedOptimizer
from tensorstow.optim.stowed_adam import StowedAdam

PlacedOptimizer = StowedAdam | StowedOptimizer
"""Adam and AdamW, and any class of torch's."""
PlacedOptimizerT = TypeVar("PlacedOptimizerT", bound=PlacedOptimizer)
