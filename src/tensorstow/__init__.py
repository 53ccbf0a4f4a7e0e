"""Train models that do not fit in memory: parameters, gradients and states over RAM and disk."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from tensorstow.base.budget import Budget
from tensorstow.base.errors import StowError
from tensorstow.base.first_calls import make_first_calls
from tensorstow.base.plan import Plan
from tensorstow.base.tiers import Tier
from tensorstow.optim.adam import Adam, AdamW
from tensorstow.optim.generic.stowed_optimizer import StowedOptimizer
from tensorstow.states.policy import PipelinePolicy

if TYPE_CHECKING:
    from tensorstow.fsdp.export import save_safetensors
    from tensorstow.fsdp.stow import plan_of, stow

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
    "plan_of",
    "save_safetensors",
    "stow",
]

__version__ = version("tensorstow")

make_first_calls()


def __getattr__(name: str) -> object:
    """Import the engine when it is asked for: FSDP2 takes a second, and optimizers need it not."""
    if name == "stow":
        from tensorstow.fsdp.stow import stow  # noqa: PLC0415

        return stow
    if name == "plan_of":
        from tensorstow.fsdp.stow import plan_of  # noqa: PLC0415

        return plan_of
    if name == "save_safetensors":
        from tensorstow.fsdp.export import save_safetensors  # noqa: PLC0415

        return save_safetensors
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)
