"""``StowedOptimizer``: any torch optimizer, by running its own step on one piece at a time."""
