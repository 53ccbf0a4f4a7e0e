"""Train models that do not fit in memory: parameters, gradients and states over RAM and disk.

Names are imported on first use: torch takes a second, FSDP2 another, and a command that prints its
help needs neither.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

from tensorstow import errors

if TYPE_CHECKING:
    from tensorstow.activations.offload import offload_activations
    from tensorstow.base.budget import Budget
    from tensorstow.base.errors import StowError
    from tensorstow.base.plan import Plan
    from tensorstow.base.tiers import Tier
    from tensorstow.base.update_on import DelayedUpdate
    from tensorstow.checkpoint.optimizer_export import state_dict_of
    from tensorstow.checkpoint.quantized_weights import quantize_to_int8
    from tensorstow.fsdp.export import save_safetensors
    from tensorstow.fsdp.named_weights import named_weights
    from tensorstow.fsdp.stow import plan_of, stow
    from tensorstow.fsdp.usage import usage
    from tensorstow.io.allocator import set_memory_limit
    from tensorstow.optim.adam import Adam, AdamW
    from tensorstow.optim.generic.stowed_optimizer import StowedOptimizer
    from tensorstow.states.policy import PipelinePolicy

__all__ = [
    "Adam",
    "AdamW",
    "Budget",
    "DelayedUpdate",
    "PipelinePolicy",
    "Plan",
    "StowError",
    "StowedOptimizer",
    "Tier",
    "__version__",
    "errors",
    "named_weights",
    "offload_activations",
    "plan_of",
    "quantize_to_int8",
    "save_safetensors",
    "set_memory_limit",
    "state_dict_of",
    "stow",
    "usage",
]

__version__ = version("tensorstow")

_MODULES = {
    "Adam": "tensorstow.optim.adam",
    "AdamW": "tensorstow.optim.adam",
    "Budget": "tensorstow.base.budget",
    "DelayedUpdate": "tensorstow.base.update_on",
    "PipelinePolicy": "tensorstow.states.policy",
    "Plan": "tensorstow.base.plan",
    "StowError": "tensorstow.base.errors",
    "StowedOptimizer": "tensorstow.optim.generic.stowed_optimizer",
    "Tier": "tensorstow.base.tiers",
    "named_weights": "tensorstow.fsdp.named_weights",
    "offload_activations": "tensorstow.activations.offload",
    "parameter_bytes": "tensorstow.fsdp.usage",  # until the next minor release
    "plan_of": "tensorstow.fsdp.stow",
    "quantize_to_int8": "tensorstow.checkpoint.quantized_weights",
    "save_safetensors": "tensorstow.fsdp.export",
    "set_memory_limit": "tensorstow.io.allocator",
    "state_dict_of": "tensorstow.checkpoint.optimizer_export",
    "stow": "tensorstow.fsdp.stow",
    "usage": "tensorstow.fsdp.usage",
}
"""Where each public name is."""


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in _MODULES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the names of the module, those not imported yet among them."""
    return sorted({*globals(), *__all__})
