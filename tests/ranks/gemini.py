"""What ranks do with Gemini without a booster."""

from typing import Any

import torch

from ranks.boosted import batch, model_of
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
    everywhere = {n: v.clone() for n, v in model.state_dict(only_rank_0=False).items()}
    states, found = (
        {i: {n: v.clone() for n, v in entry.items()} for i, entry in whole["state"].items()}
        for whole in (optimizer.state_dict(only_rank_0=False), optimizer.state_dict())
    )
    found = {**optimizer.state_dict(), "state": found}
    told: dict[str, Any] = {
        "weights": [tuple(v.shape) for v in model.state_dict().values()],
        "states": [sorted(entry) for entry in found["state"].values()],
        "everywhere": [
            *everywhere.values(),
            *(states[i][name] for i in states for name in ("exp_avg", "exp_avg_sq")),
        ],
    }
    optimizer.zero_grad()
    optimizer.backward(model(batch(1, 0)).square().mean())
    optimizer.step()  # the states are others now
    optimizer.load_state_dict(found)
    again = optimizer.state_dict(only_rank_0=False)["state"]
    told["is_loaded"] = all(
        torch.equal(values, again[i][name]) for i in states for name, values in states[i].items()
    )
    optimizer.close()
    return told
