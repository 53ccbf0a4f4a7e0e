"""How the three batch sizes hang together: what is missing is derived, and all are checked."""

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.config.settings import Batch

_TRAIN = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"


def batch_of(train: int | None, micro: int | None, steps: int | None, world: int) -> Batch:
    """Return all three sizes for ``world`` ranks; ``steps`` is 1 where nothing says otherwise."""
    if train is None:
        if micro is None:
            message = f"Neither {_TRAIN} nor {_MICRO} is given. Write at least one of them."
            raise OptionError(message)
        return Batch(micro * (steps or 1) * world, micro, steps or 1)
    if micro is None:
        micro = _quotient(train, _STEPS, steps or 1, world, _MICRO)
    if steps is None:
        steps = _quotient(train, _MICRO, micro, world, _STEPS)
    product = micro * steps * world
    if train != product:
        message = (
            f"{_TRAIN}={train} was given, and {_MICRO} x {_STEPS} x ranks is {micro} x {steps} x"
            f" {world} = {product}. Leave one of the three out, or make them agree."
        )
        raise OptionError(message)
    return Batch(train, micro, steps)


def _quotient(train: int, name: str, factor: int, world: int, wanted: str) -> int:
    quotient, rest = divmod(train, factor * world)
    if rest or quotient == 0:
        message = (
            f"{_TRAIN}={train} gives no whole {wanted}: {train} / ({factor} x {world}) is"
            f" {train / (factor * world):.4g}, where {factor} is {name} and {world} the ranks."
            f" Make {_TRAIN} a multiple of {factor * world}."
        )
        raise OptionError(message)
    return quotient
