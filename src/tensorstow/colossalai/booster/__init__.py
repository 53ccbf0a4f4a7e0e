"""``colossalai.booster``: the booster and its plugins."""

from tensorstow.colossalai.booster.booster import Booster

__all__ = ["Booster"]
