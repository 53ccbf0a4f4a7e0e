import torch

from tensorstow.doorkit.construction import ConstructionContext


def test_what_is_created_outside_is_as_before() -> None:
    context = ConstructionContext("meta", torch.bfloat16)
    for _ in range(2):
        with context:
            inside = torch.empty(1)
        outside = torch.empty(1)
        assert (inside.device.type, inside.dtype) == ("meta", torch.bfloat16)
        assert (outside.device.type, outside.dtype) == ("cpu", torch.float32)


def test_none_is_what_torch_does_by_default() -> None:
    with torch.device("meta"), ConstructionContext():
        assert torch.empty(1).is_meta
