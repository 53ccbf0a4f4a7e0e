"""``deepspeed.OnDevice``: modules that are created on a device and in a dtype."""

from contextlib import ExitStack
from types import TracebackType
from typing import Self

import torch


class OnDevice:
    """A context in which modules and tensors are created on a device, in a dtype.

    Args:
        dtype: The dtype of floating-point tensors.
        device: The device; "meta" has no memory.
        enabled: Whether the context has an effect.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: str | torch.device = "meta",
        enabled: bool = True,  # noqa: FBT001, FBT002  # upstream's
    ) -> None:
        """Note the arguments; the class documents them."""
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        """Create tensors so from here on."""
        if self.enabled:
            self._entered.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype)
            self._entered.enter_context(torch.device(self.device))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Create tensors as before."""
        self._entered.close()
