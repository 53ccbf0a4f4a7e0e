"""Layers in tiles, whose parameters move in parts."""

from tensorstow.nn.tiled_linear import TiledLinear

__all__ = ["TiledLinear"]
