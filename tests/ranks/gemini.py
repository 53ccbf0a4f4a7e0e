"""What ranks do with Gemini without a booster."""

from typing import Any

import torch

from ranks.boosted import batch, model_of
from tensorstow.base.errors import OptionError
from tensorstow.colossalai.adam import HybridAdam
from tensorstow.colossalai.zero import GeminiDDP, GeminiOptimizer


def whole_on_one() -> dict[str, Any]:
    """Train by Gemini without a booster; return what its state dicts have here.

    "everywhere" is what they have where every rank asks for it.
    """
    model = GeminiDDP(model_of(), mixed_precision=torch.float32)
    given = HybridAdam(model.parameters(), lr=1e-2)
    optimizer = GeminiOptimizer(given, model)
    optimizer.backward(model(batch(0, 0)).square().mean())
    optimizer.step()
    everywhere = model.state_dict(only_rank_0=False)
    states = optimizer.state_dict(only_rank_0=False)["state"]
    found = optimizer.state_dict()
    told: dict[str, Any] = {
        "weights": [tuple(v.shape) for v in model.state_dict().values()],
        "states": [sorted(entry) for entry in found["state"].values()],
        "everywhere": [
            *everywhere.values(),
            *(states[i][name] for i in states for name in ("exp_avg", "exp_avg_sq")),
        ],
        "said": "",
    }
    try:
        optimizer.load_state_dict(found)
    except OptionError as error:
        told["said"] = str(error)
    optimizer.close()
    return told
