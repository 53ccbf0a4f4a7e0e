"""The hooks by which gradients leave the device, on parameters that may be frozen at first."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tensorstow.engine.gradients import take_down


class Landing:
    """Sees to it that the gradient of every stowed parameter that is trained leaves the device."""

    def __init__(self, parameters: Iterable[DTensor]) -> None:
        """Watch the trained of ``parameters`` now, before their optimizer does; others later."""
        self._unhooked: list[Any] = list(parameters)
        self.hook()

    def hook(self, *_: Any) -> None:  # noqa: ANN401  # also a module's forward pre-hook
        """Watch those that were unfrozen since."""
        still = []
        for parameter in self._unhooked:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(take_down)
            else:
                still.append(parameter)
        self._unhooked = still


def move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Move every buffer that has values to ``device``."""
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):  # noqa: SLF001
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)  # noqa: SLF001
