"""The tensor in ``.grad`` of a gradient that the update has taken: no values, only errors."""

from typing import NoReturn

from tensorstow.base.errors import OptionError
from tensorstow.tensors.placeholder import Placeholder

WAYS_OUT = (
    "Behind a backward that has ended step() is next, and zero_grad() behind that. Where it did not"
    " end, resume() goes back to the last commit of a run that has dir=; without one, close() this"
    " optimizer and load a checkpoint into the model and a new one."
)
"""What to do about gradients that were used, for who does not know the optimizer's phase."""


def refuse(operation: str) -> NoReturn:
    """Raise OptionError: ``operation`` was asked of a gradient that is used up already."""
    message = (
        f"{operation} was asked of a gradient that its update has used already: with"
        ' overlap="backward" a gradient is gone as soon as it is final. A second backward before'
        " step() needs accumulation_steps= or `with optimizer.accumulate():`; clipping, unscaling"
        f' and whatever else looks at gradients needs overlap="forward" or "none". {WAYS_OUT}'
    )
    raise OptionError(message)


def refuse_used(name: str) -> NoReturn:
    """Raise OptionError: another optimizer has used the gradient of ``name`` already."""
    message = (
        f"{name} is in two optimizers, and the gradient is used up: the other one has"
        ' overlap="backward" and has begun its update. Give each parameter to one optimizer; or'
        ' make both with overlap="none", and close() the one that is not wanted.'
    )
    raise OptionError(message)


class ConsumedGradient(Placeholder):
    """A tensor without memory, of the gradient's shape: its update has begun.

    Nobody may take it for a gradient: clipping, unscaling and accumulation, which would do nothing
    to a ``None`` and say nothing, raise OptionError here.
    """

    refuse = staticmethod(refuse)
