"""``deepspeed.checkpoint.utils``: copies of tensors, to be saved by torch."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def clone_tensors_for_torch_save(
    item: Any,
    device: torch.device | str = torch.device("cpu"),  # noqa: B008
) -> Any:
    """Return a copy of tensors in lists, tuples and dicts; sharded ones become whole.

    Objects other than tensors are the same.
    """
    if isinstance(item, torch.Tensor):
        with torch.no_grad():
            whole = item.full_tensor() if isinstance(item, DTensor) else item
            return whole.detach().to(device, copy=True)
    if isinstance(item, dict):
        return type(item)((k, clone_tensors_for_torch_save(v, device)) for k, v in item.items())
    if isinstance(item, list | tuple):
        copies = [clone_tensors_for_torch_save(v, device) for v in item]
        return copies if isinstance(item, list) else tuple(copies)
    return item
