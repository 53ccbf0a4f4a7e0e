"""Train models that do not fit: optimizer states over RAM and disk, exact to the bit."""

from importlib.metadata import version

from tensorstow.base.errors import StowError
from tensorstow.optim.adam import Adam, AdamW
from tensorstow.optim.piecewise.stowed_optimizer import StowedOptimizer
from tensorstow.optim.states.policy import PipelinePolicy

__all__ = ["Adam", "AdamW", "PipelinePolicy", "StowError", "StowedOptimizer", "__version__"]

__version__ = version("tensorstow")
