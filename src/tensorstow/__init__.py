"""Train models that do not fit: optimizer states over RAM and disk, exact to the bit."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from tensorstow.base.budget import Budget
from tensorstow.base.errors import StowError
from tensorstow.base.plan import Plan
from tensorstow.base.tiers import Tier
from tensorstow.optim.adam import Adam, AdamW
from tensorstow.optim.piecewise.stowed_optimizer import StowedOptimizer
from tensorstow.optim.states.policy import PipelinePolicy

if TYPE_CHECKING:
    from tensorstow.engine.stow import stow

__all__ = [
    "Adam",
    "AdamW",
    "Budget",
    "PipelinePolicy",
    "Plan",
    "StowError",
    "StowedOptimizer",
    "Tier",
    "__version__",
    "stow",
]

__version__ = version("tensorstow")


def __getattr__(name: str) -> object:
    """Import ``stow`` when it is asked for: FSDP2 takes a second, and optimizers need it not."""
    if name != "stow":
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    from tensorstow.engine.stow import stow  # noqa: PLC0415

    return stow
