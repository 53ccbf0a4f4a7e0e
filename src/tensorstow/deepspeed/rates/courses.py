"""DeepSpeed's learning rate formulas, as functions of the optimizer steps taken.

The warm-ups look at ``n - 1`` as DeepSpeed does: the first two steps have the rate they start from.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch.optim import Optimizer

from tensorstow.base.errors import OptionError

PerGroup = float | Sequence[float]
Values = Callable[[int], list[float]]
_SECOND_BETA = 0.99  # beside a cycled momentum, as in DeepSpeed


class Course(NamedTuple):
    """A value per parameter group after ``n`` steps; ``betas`` where momentum is cycled too."""

    rates: Values
    betas: Callable[[int], list[tuple[float, float]]] | None = None


def warmup_lr(
    optimizer: Optimizer,
    warmup_min_lr: PerGroup = 0.0,
    warmup_max_lr: PerGroup | None = None,
    warmup_num_steps: float = 1000,
    warmup_type: str = "log",
) -> Course:
    """From min to max over the warm-up, by log or linearly, and max from then on."""
    rise, warm = _rise(warmup_num_steps, warmup_type)
    top = _rates_of(optimizer) if warmup_max_lr is None else warmup_max_lr
    return _between(
        _per_group(optimizer, warmup_min_lr, "warmup_min_lr"),
        _per_group(optimizer, top, "warmup_max_lr"),
        lambda n: rise(n) if n <= warm else 1.0,
    )


def warmup_decay_lr(
    optimizer: Optimizer,
    *,
    total_num_steps: float,
    warmup_min_lr: PerGroup = 0.0,
    warmup_max_lr: PerGroup = 0.001,
    warmup_num_steps: float = 1000,
    warmup_type: str = "log",
) -> Course:
    """As WarmupLR, and then linearly down to min at ``total_num_steps``."""
    rise, warm = _rise(warmup_num_steps, warmup_type)
    total = _steps(total_num_steps, "total_num_steps")

    def share(n: int) -> float:
        return rise(n) if n <= warm else max(0.0, (total - n + 1) / max(1, total - warm))

    return _between(
        _per_group(optimizer, warmup_min_lr, "warmup_min_lr"),
        _per_group(optimizer, warmup_max_lr, "warmup_max_lr"),
        share,
    )


def warmup_cosine_lr(
    optimizer: Optimizer,
    *,
    total_num_steps: float,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: float = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
) -> Course:
    """Shares of the optimizer's rate: up to 1 over the warm-up, by a cosine down to the least."""
    rise, warm = _rise(warmup_num_steps, warmup_type)
    total = _steps(total_num_steps, "total_num_steps")
    whole = _rates_of(optimizer)

    def share(n: int) -> float:
        if n == 0:
            return 0.0
        if n <= warm:
            return warmup_min_ratio + (1.0 - warmup_min_ratio) * rise(n)
        progress = min(1.0, (n - warm) / max(1, total - warm))
        return cos_min_ratio + (1.0 - cos_min_ratio) * (1.0 + math.cos(math.pi * progress)) / 2.0

    return Course(lambda n: [rate * max(0.0, share(n)) for rate in whole])


def lr_range_test(
    optimizer: Optimizer,
    *,
    lr_range_test_min_lr: PerGroup = 1e-3,
    lr_range_test_step_size: float = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> Course:
    """``min * (1 + rate * n / size)``, in stairs of ``size`` steps where asked for."""
    size = _steps(lr_range_test_step_size, "lr_range_test_step_size")
    least = _per_group(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")

    def factor(n: int) -> float:
        return 1.0 + lr_range_test_step_rate * (n // size if lr_range_test_staircase else n / size)

    return Course(lambda n: [rate * factor(n) for rate in least])


def one_cycle(  # noqa: PLR0913  # the JSON's names
    optimizer: Optimizer,
    *,
    cycle_min_lr: PerGroup,
    cycle_max_lr: PerGroup,
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: float = 2000,
    cycle_second_step_size: float | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: float = 0,
    cycle_momentum: bool = True,
    cycle_min_mom: PerGroup = 0.8,
    cycle_max_mom: PerGroup = 0.9,
    decay_mom_rate: float = 0.0,
) -> Course:
    """One cycle from min to max and back, then decay; momentum goes the other way.

    Before the first step momentum is the least, as in DeepSpeed.
    """
    first = _steps(cycle_first_step_size, "cycle_first_step_size")
    second = first
    if cycle_second_step_size is not None:
        second = _steps(cycle_second_step_size, "cycle_second_step_size", least=0)
    stairs = (
        cycle_first_stair_count,
        cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count,
    )
    least = _per_group(optimizer, cycle_min_lr, "cycle_min_lr")
    most = _per_group(optimizer, cycle_max_lr, "cycle_max_lr")

    def height(n: int) -> float:
        return _cycle_height(n, (first, second), stairs)

    def decay(n: int, rate: float) -> float:
        return 1.0 + rate * (n - first - second) / decay_step_size if decay_step_size else 1.0

    def rates(n: int) -> list[float]:
        if n > first + second:
            return [low / decay(n, decay_lr_rate) for low in least]
        return [low + (high - low) * height(n) for low, high in zip(least, most, strict=True)]

    if not cycle_momentum or "betas" not in optimizer.defaults:
        return Course(rates)
    slow = _per_group(optimizer, cycle_min_mom, "cycle_min_mom")
    fast = _per_group(optimizer, cycle_max_mom, "cycle_max_mom")

    def momenta(n: int) -> list[float]:
        if n == 0:
            return slow
        if n > first + second:
            return [high * decay(n, decay_mom_rate) for high in fast]
        return [high - (high - low) * height(n) for low, high in zip(slow, fast, strict=True)]

    return Course(rates, lambda n: [(momentum, _SECOND_BETA) for momentum in momenta(n)])


def _cycle_height(n: int, sizes: tuple[int, int], stairs: tuple[int, int]) -> float:
    """Return how far up the cycle is, 0 to 1, after ``n`` steps of it."""
    at = n % sum(sizes)
    rising = at <= sizes[0]
    done, size = (at, sizes[0]) if rising else (sum(sizes) - at, sizes[1])
    count = stairs[0] if rising else stairs[1]
    return math.floor(done * count / size) / count if count > 0 else done / size


def _rise(steps: float, kind: str) -> tuple[Callable[[int], float], int]:
    """Return how far a warm-up is after ``n`` steps, and its length; log(2) is the shortest."""
    warm = max(2, _steps(steps, "warmup_num_steps"))
    if kind == "log":
        return lambda n: math.log(n) / math.log(warm) if n else 0.0, warm
    if kind == "linear":
        return lambda n: max(0, n - 1) / warm, warm
    message = f'scheduler.params.warmup_type={kind!r} was given: it is "log" or "linear".'
    raise OptionError(message)


def _between(least: list[float], most: list[float], share: Callable[[int], float]) -> Course:
    pairs = list(zip(least, most, strict=True))
    return Course(lambda n: [low + (high - low) * share(n) for low, high in pairs])


def _rates_of(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _per_group(optimizer: Optimizer, value: PerGroup, name: str) -> list[float]:
    groups = len(optimizer.param_groups)
    if isinstance(value, Sequence):
        if len(value) != groups:
            message = (
                f"scheduler.params.{name} has {len(value)} values, and the optimizer {groups}"
                " parameter groups. Give one number, or one per group."
            )
            raise OptionError(message)
        return [float(v) for v in value]
    return [float(value)] * groups


def _steps(value: float, name: str, *, least: int = 1) -> int:
    if value < least or value != int(value):
        message = (
            f"scheduler.params.{name}={value!r} was given: it is a number of steps, at least"
            f" {least}."
        )
        raise OptionError(message)
    return int(value)
