"""Train models that do not fit in memory: parameters, gradients and states over RAM and disk."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

from tensorstow.activations.offload import offload_activations
from tensorstow.base.budget import Budget
from tensorstow.base.errors import StowError
from tensorstow.base.first_calls import make_first_calls
from tensorstow.base.plan import Plan
from tensorstow.base.tiers import Tier
from tensorstow.checkpoint.optimizer_export import state_dict_of
from tensorstow.optim.adam import Adam, AdamW
from tensorstow.optim.generic.stowed_optimizer import StowedOptimizer
from tensorstow.states.policy import PipelinePolicy

if TYPE_CHECKING:
    from tensorstow.fsdp.export import save_safetensors
    from tensorstow.fsdp.report import parameter_bytes
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
    "offload_activations",
    "parameter_bytes",
    "plan_of",
    "save_safetensors",
    "state_dict_of",
    "stow",
]

__version__ = version("tensorstow")

make_first_calls()

_OF_FSDP = {
    "parameter_bytes": "tensorstow.fsdp.report",
    "plan_of": "tensorstow.fsdp.stow",
    "save_safetensors": "tensorstow.fsdp.export",
    "stow": "tensorstow.fsdp.stow",
}
"""Names that are imported on first use, and their modules."""


def __getattr__(name: str) -> object:
    """Import FSDP2's names on first use: that takes a second, and optimizers do not need it."""
    if name in _OF_FSDP:
        return getattr(import_module(_OF_FSDP[name]), name)
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)
