"""``colossalai.utils.model``: contexts that models are made in."""
