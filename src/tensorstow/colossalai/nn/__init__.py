"""``colossalai.nn``: the optimizers."""
