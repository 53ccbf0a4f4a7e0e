"""``deepspeed.ops``: optimizers by upstream's names, and I/O."""

from collections import defaultdict

from tensorstow.base.absent_names import add_absent_modules, refuse_names
from tensorstow.deepspeed.ops import adagrad, adam, aio, lion, op_builder

__all__ = ["adagrad", "adam", "aio", "lion", "op_builder"]

_BUILDERS = (op_builder.AsyncIOBuilder, op_builder.CPUAdamBuilder, op_builder.FusedAdamBuilder)

__compatible_ops__ = defaultdict(bool, {builder.NAME: True for builder in _BUILDERS})
"""Upstream's table of what a machine can build: False for its other extensions."""

_ABSENT = {
    "lamb": "tensorstow.StowedOptimizer(Class, params, states=...) keeps the states of any"
    " optimizer class of torch, a Lamb of another package too",
    "sparse_attention": "use torch.nn.attention.flex_attention in the model",
    "transformer": "use torch's scaled_dot_product_attention and torch.compile in the model",
}
add_absent_modules(__name__, _ABSENT)
__getattr__ = refuse_names(__name__, _ABSENT)
