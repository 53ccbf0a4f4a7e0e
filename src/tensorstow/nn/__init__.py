"""Layers that are cut so that their parameters move in parts."""

from tensorstow.nn.tiled_linear import TiledLinear

__all__ = ["TiledLinear"]
