import torch
from torch import nn

from tensorstow.cli.digests import checksum, digests_of


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
