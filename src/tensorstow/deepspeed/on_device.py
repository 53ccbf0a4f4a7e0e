"""``deepspeed.OnDevice``: modules that are created on a device and in a dtype."""

import torch

from tensorstow.doorkit.construction import ConstructionContext


class OnDevice(ConstructionContext):
    """A context in which modules and tensors are created on a device, in a dtype.

    Args:
        dtype: The dtype of floating-point tensors.
        device: The device; "meta" has no memory.
        enabled: Whether the context has an effect.
    """

    def __init__(
        self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True
    ) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        super().__init__(*((device, dtype) if enabled else ()))
