import torch
from torch import nn

from tensorstow import AdamW
from tensorstow.cli.digests import checksum, digests_of, digests_of_states


def test_every_bit_and_every_name_counts() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    before, digests = checksum(model), digests_of(model)
    assert list(digests) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    with torch.no_grad():
        model[0].bias[0] = -0.0
        zero = digests_of(model)
        model[0].bias[0] = 0.0
    assert digests_of(model)["0.bias"] != zero["0.bias"]
    assert checksum(nn.Sequential(model)) != checksum(model)
    assert checksum(model) != before


def test_every_state_counts_by_its_parameters_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)  # noqa: FBT003
    optimizer = AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    trained = ["0.weight", "1.weight", "1.bias"]
    kinds = ["step", "exp_avg", "exp_avg_sq"]
    before = digests_of_states(optimizer, model)
    assert sorted(before) == sorted(f"{kind} of {name}" for name in trained for kind in kinds)
    saved = optimizer.state_dict()
    saved["state"][3]["exp_avg_sq"].view(torch.int32)[1] ^= 1
    optimizer.load_state_dict(saved)
    after = digests_of_states(optimizer, model)
    assert [name for name in before if before[name] != after[name]] == ["exp_avg_sq of 1.bias"]
    optimizer.close()
