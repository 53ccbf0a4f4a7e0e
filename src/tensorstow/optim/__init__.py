"""``AdamW``, ``Adam`` and ``StowedOptimizer``: torch's interface, states on any tier."""
