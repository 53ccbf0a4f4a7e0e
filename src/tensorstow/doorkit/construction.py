"""A context in which modules are created on a device and in a dtype."""

from contextlib import ExitStack
from typing import Self

import torch


class ConstructionContext:
    """A context in which tensors are created on a device, and floating point ones in a dtype.

    Args:
        device: The device. Default: None, torch's default.
        dtype: The dtype. Default: None, torch's default.
    """

    def __init__(
        self, device: torch.device | str | int | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self._device = None if device is None else torch.device(device)
        self._dtype = dtype
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        if self._dtype is not None:
            self._entered.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
        if self._device is not None:
            self._entered.enter_context(self._device)
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.close()
