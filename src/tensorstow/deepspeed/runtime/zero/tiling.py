"""``deepspeed.runtime.zero.tiling``: linear layers in tiles."""

from tensorstow.nn.tiled_linear import TiledLinear

__all__ = ["TiledLinear"]
