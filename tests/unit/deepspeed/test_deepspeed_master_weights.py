"""Master weights start as the values that the model had before it was cast."""

from functools import partial

import pytest
import torch
from torch import nn

import tensorstow
from ranks.pool import Ranks
from ranks.stowed import model_of
from tensorstow import Plan
from tensorstow.deepspeed.states import MasterWeights


def begun(states: str) -> dict[str, torch.Tensor]:
    """Return what a rank's masters are after a step that changes nothing."""
    given = model_of(torch.float32)
    master_weights = MasterWeights(given, torch.bfloat16)
    make = partial(tensorstow.AdamW, lr=0.0, weight_decay=0.0, state_format="split")
    model, optimizer = tensorstow.stow(given, make, plan=Plan(states=states))
    master_weights.assign(model, optimizer)
    model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()["state"]
    found = {
        name: getattr(master, "_local_tensor", master)
        for (name, _), master in zip(
            model.named_parameters(), (saved[i]["master"] for i in sorted(saved)), strict=True
        )
    }
    optimizer.close()
    return found


@pytest.mark.parametrize("states", ["host", "disk"])
@pytest.mark.parametrize("world", [1, 2])
def test_masters_are_the_given_values(ranks: "Ranks", world: int, states: str) -> None:
    want = dict(model_of(torch.float32).named_parameters())
    each = ranks(world).run(begun, states)
    for name, values in want.items():
        parts = [part[name] for part in each]
        assert torch.equal(torch.cat(parts), values.detach()), name
        assert not torch.equal(values.bfloat16().float(), values)


def test_what_has_no_values_has_no_masters() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    MasterWeights(model, torch.bfloat16)
    assert model.weight.dtype == torch.bfloat16


def test_buffers_keep_their_dtype_but_for_running_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[1].register_buffer("inv_freq", torch.ones(2), persistent=False)
    MasterWeights(model, torch.bfloat16)
    assert model[1].weight.dtype == torch.bfloat16
    assert {name: b.dtype for name, b in model.named_buffers()} == {
        "0.running_mean": torch.bfloat16,
        "0.running_var": torch.bfloat16,
        "0.num_batches_tracked": torch.int64,
        "1.inv_freq": torch.float32,
    }
    assert model(torch.ones(2, 3).bfloat16()).dtype == torch.bfloat16
