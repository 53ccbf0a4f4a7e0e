"""The tensor in ``optimizer.state`` of a state on disk: read when asked for."""

from typing import NoReturn, Self

import torch

from tensorstow.base.errors import OptionError
from tensorstow.tensors.placeholder import Placeholder


def _refuse(operation: str) -> NoReturn:
    message = (
        f"{operation} was asked of a state that is on disk. optimizer.state_dict() returns the"
        " values; put a tensor in its place, or use load_state_dict(), to set them."
    )
    raise OptionError(message)


class StateOnDisk(Placeholder):
    """A tensor without memory, of the state's shape.

    Whoever asks which states a parameter has (``torch.distributed.checkpoint`` does) finds them;
    whoever looks at their values is told to ask ``state_dict()``.
    """

    @staticmethod
    def __new__(cls: type[Self], parameter: torch.Tensor) -> Self:
        """Stand in for the states of ``parameter``: fp32, in host memory."""
        return Placeholder.__new__(cls, parameter, torch.float32, torch.device("cpu"))

    refuse = staticmethod(_refuse)
