"""``deepspeed.runtime.lr_schedules``: DeepSpeed's learning rate schedules as torch schedulers.

A schedule is a function of the optimizer steps taken. The warm-ups look at ``n - 1`` as DeepSpeed
does: the first two steps have the rate they start from.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any, Final, Self

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from tensorstow.base.errors import OptionError, abbreviated
from tensorstow.base.fields import number_of, read_value
from tensorstow.deepspeed.config.arguments import arguments_of
from tensorstow.deepspeed.config.settings import Named
from tensorstow.doorkit.keyword_table import Table, checks_keywords, honoured

__all__ = [
    "LR_RANGE_TEST",
    "ONE_CYCLE",
    "VALID_LR_SCHEDULES",
    "WARMUP_COSINE_LR",
    "WARMUP_DECAY_LR",
    "WARMUP_LR",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
]

LR_RANGE_TEST: Final = "LRRangeTest"
ONE_CYCLE: Final = "OneCycle"
WARMUP_LR: Final = "WarmupLR"
WARMUP_DECAY_LR: Final = "WarmupDecayLR"
WARMUP_COSINE_LR: Final = "WarmupCosineLR"
VALID_LR_SCHEDULES: Final = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]
"""What ``scheduler.type`` may be."""

PerGroup = float | Sequence[float]
LRs = Callable[[int], list[float]]
Betas = Callable[[int], list[tuple[float, float]]]
_PARAMS = "scheduler.params"
_SECOND_BETA = 0.99  # beside a cycled momentum, as in DeepSpeed


class LRSchedule(LRScheduler):
    """A schedule that sets each group's learning rate, and its betas where they are cycled.

    Args:
        optimizer: The optimizer whose parameter groups are set.
        lrs_after: The learning rates, one per group, after ``n`` optimizer steps.
        betas_after: The betas, one pair per group, after ``n`` steps. Default: None, which leaves
            them alone.
        last_batch_iteration: The number of the last step taken, from 0. Default: -1, none.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lrs_after: LRs,
        betas_after: Betas | None = None,
        last_batch_iteration: int = -1,
    ) -> None:
        """Set the rates of the first step, or of the one after ``last_batch_iteration``."""
        self.lrs_after = lrs_after
        self.betas_after = betas_after
        super().__init__(optimizer)
        if last_batch_iteration != -1:
            self.load_state_dict({"last_batch_iteration": last_batch_iteration})

    def get_lr(self) -> list[float | Any]:
        """Return the learning rate of each group in the step that ``last_epoch`` counts."""
        return list(self.lrs_after(self.last_epoch))

    @property
    def last_batch_iteration(self) -> int:
        """The number of the last step, from 0; -1: none was taken."""
        return self.last_epoch - 1

    @last_batch_iteration.setter
    def last_batch_iteration(self, number: int) -> None:
        self.last_epoch = number + 1

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rates of the next step.

        Args:
            last_batch_iteration: The number of the step that was taken, from 0. Default: None, one
                more than at the last call.
        """
        if last_batch_iteration is None:
            super().step()
            self._set_betas()
        else:
            self.load_state_dict({"last_batch_iteration": last_batch_iteration})

    def state_dict(self) -> dict[str, Any]:
        """Return the state that DeepSpeed's checkpoints hold.

        Returns:
            ``{"last_batch_iteration": n}``: the number of the last step, -1 before any.
        """
        return {"last_batch_iteration": self.last_epoch - 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the step that ``state_dict`` names, and set the rates."""
        self.last_epoch = int(state_dict["last_batch_iteration"]) + 1
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):  # other references to it stay current
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = self.get_lr()
        self._set_betas()

    def _set_betas(self) -> None:
        if self.betas_after is not None:
            betas = self.betas_after(self.last_epoch)
            for group, pair in zip(self.optimizer.param_groups, betas, strict=True):
                group["betas"] = pair


_OF_ALL: Table = {
    "optimizer": honoured("The optimizer whose groups are set."),
    "last_batch_iteration": honoured("The number of the last step taken; -1: none."),
}
_OF_WARMUPS: Table = {
    **_OF_ALL,
    "warmup_num_steps": honoured("The length of the warm-up in steps, at least 1."),
    "warmup_type": honoured('"log" or "linear".'),
}


@checks_keywords(_OF_WARMUPS)
class WarmupLR(LRSchedule):
    """Raise the rate from ``warmup_min_lr`` to ``warmup_max_lr``, then hold it.

    Args:
        warmup_min_lr: The rate at the start; one number, or one per group.
        warmup_max_lr: The rate at the end. Default: None, each group's own.

    Raises:
        OptionError: A value that no schedule can have.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: float = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        rise, warm = _rise(warmup_num_steps, warmup_type)
        top = _lrs_of(optimizer) if warmup_max_lr is None else warmup_max_lr
        self.min_lrs = _per_group(optimizer, warmup_min_lr, "warmup_min_lr")
        self.max_lrs = _per_group(optimizer, top, "warmup_max_lr")
        self.warmup_num_steps, self.warmup_type = warm, warmup_type
        lrs_after = _between(self.min_lrs, self.max_lrs, lambda n: rise(n) if n <= warm else 1.0)
        super().__init__(optimizer, lrs_after, last_batch_iteration=last_batch_iteration)


@checks_keywords(_OF_WARMUPS)
class WarmupDecayLR(LRSchedule):
    """Raise the rate as WarmupLR does, then lower it linearly to ``warmup_min_lr``.

    Args:
        total_num_steps: The step at which the rate is back at ``warmup_min_lr``.
        warmup_min_lr: The rate at the start and at the end; one number, or one per group.
        warmup_max_lr: The rate after the warm-up; one number, or one per group.

    Raises:
        OptionError: A value that no schedule can have.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: float,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup = 0.001,
        warmup_num_steps: float = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        rise, warm = _rise(warmup_num_steps, warmup_type)
        total = _steps(total_num_steps, "total_num_steps")

        def share(n: int) -> float:
            return rise(n) if n <= warm else max(0.0, (total - n + 1) / max(1, total - warm))

        self.min_lrs = _per_group(optimizer, warmup_min_lr, "warmup_min_lr")
        self.max_lrs = _per_group(optimizer, warmup_max_lr, "warmup_max_lr")
        self.warmup_num_steps, self.warmup_type = warm, warmup_type
        self.total_num_steps = total
        lrs_after = _between(self.min_lrs, self.max_lrs, share)
        super().__init__(optimizer, lrs_after, last_batch_iteration=last_batch_iteration)


@checks_keywords(_OF_WARMUPS)
class WarmupCosineLR(LRSchedule):
    """Raise each group's rate to its own value, its highest, then lower it along a cosine.

    Args:
        total_num_steps: The step at which the cosine ends.
        warmup_min_ratio: The share of the group's rate at the start, 0 to 1.
        cos_min_ratio: The share of the group's rate at the end, 0 to 1.

    Raises:
        OptionError: A value that no schedule can have.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: float,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: float = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        rise, warm = _rise(warmup_num_steps, warmup_type)
        total = _steps(total_num_steps, "total_num_steps")
        highest = _lrs_of(optimizer)

        def share(n: int) -> float:
            if n == 0:
                return 0.0
            if n <= warm:
                return warmup_min_ratio + (1.0 - warmup_min_ratio) * rise(n)
            done = min(1.0, (n - warm) / max(1, total - warm))
            return cos_min_ratio + (1.0 - cos_min_ratio) * (1.0 + math.cos(math.pi * done)) / 2.0

        self.warmup_num_steps, self.warmup_type = warm, warmup_type
        self.total_num_steps = total
        self._share = share
        super().__init__(
            optimizer,
            lambda n: [lr * max(0.0, share(n)) for lr in highest],
            last_batch_iteration=last_batch_iteration,
        )

    def get_lr_ratio(self) -> float:
        """Return the share of each group's own rate in this step; 0 before the first."""
        return max(0.0, self._share(self.last_epoch))


@checks_keywords(_OF_ALL)
class LRRangeTest(LRSchedule):
    """Raise the rate without end, to find where training diverges.

    The rate after ``n`` steps is ``min_lr * (1 + step_rate * n / step_size)``. Source: L. N. Smith,
    "Cyclical Learning Rates for Training Neural Networks", 2017, section 3.3.

    Args:
        lr_range_test_min_lr: The rate at the start; one number, or one per group.
        lr_range_test_step_size: The steps over which the rate grows by ``step_rate`` times the
            first one.
        lr_range_test_step_rate: How much it grows in that time.
        lr_range_test_staircase: Whether it grows once every ``step_size`` steps instead of at each.

    Raises:
        OptionError: A value that no schedule can have.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: float = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        size = _steps(lr_range_test_step_size, "lr_range_test_step_size")
        lowest = _per_group(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")

        def factor(n: int) -> float:
            steps = n // size if lr_range_test_staircase else n / size
            return 1.0 + lr_range_test_step_rate * steps

        super().__init__(
            optimizer,
            lambda n: [lr * factor(n) for lr in lowest],
            last_batch_iteration=last_batch_iteration,
        )


@checks_keywords(_OF_ALL)
class OneCycle(LRSchedule):
    """Raise the rate from min to max and lower it again, once, then decay it.

    Momentum (the first beta) goes the other way if it is cycled; before the first step it is the
    lowest, as in DeepSpeed. Source: L. N. Smith, "A disciplined approach to neural network
    hyper-parameters: Part 1", 2018.

    Args:
        cycle_min_lr: The rate at both ends of the cycle; one number, or one per group.
        cycle_max_lr: The rate in the middle of the cycle; one number, or one per group.
        decay_lr_rate: The rate is divided by ``1 + decay_lr_rate`` per ``decay_step_size`` steps
            after the cycle, linearly.
        cycle_first_step_size: The steps of the rising half.
        cycle_second_step_size: The steps of the falling half. Default: None, as many.
        cycle_first_stair_count: The stairs of the rising half; 0: a straight line.
        cycle_second_stair_count: The stairs of the falling half. Default: None, as many.
        decay_step_size: See ``decay_lr_rate``; 0: nothing decays.
        cycle_momentum: Whether betas are cycled, where the optimizer has any.
        cycle_min_mom: The lowest momentum; one number, or one per group.
        cycle_max_mom: The highest momentum; one number, or one per group.
        decay_mom_rate: Momentum is multiplied by ``1 + decay_mom_rate`` per ``decay_step_size``
            steps after the cycle, linearly.

    Raises:
        OptionError: A value that no schedule can have.
    """

    def __init__(
        self,
        optimizer: Optimizer,
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
        last_batch_iteration: int = -1,
    ) -> None:
        cycle = _Cycle.of(
            (cycle_first_step_size, cycle_second_step_size),
            (cycle_first_stair_count, cycle_second_stair_count),
            decay_step_size,
        )
        self.min_lrs = lowest = _per_group(optimizer, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = highest = _per_group(optimizer, cycle_max_lr, "cycle_max_lr")
        self.total_size = sum(cycle.steps)
        self.step_ratio = cycle.steps[0] / self.total_size

        def lrs_after(n: int) -> list[float]:
            if cycle.is_over(n):
                return [low / cycle.decay(n, decay_lr_rate) for low in lowest]
            height = cycle.height(n)
            return [low + (high - low) * height for low, high in zip(lowest, highest, strict=True)]

        betas_after = self._cycled = None
        if cycle_momentum and "betas" in optimizer.defaults:
            slow = _per_group(optimizer, cycle_min_mom, "cycle_min_mom")
            fast = _per_group(optimizer, cycle_max_mom, "cycle_max_mom")
            self._cycled = cycled = _cycled_betas(cycle, slow, fast, decay_mom_rate)
            first = [(momentum, _SECOND_BETA) for momentum in slow]

            def betas_after(n: int) -> list[tuple[float, float]]:
                return cycled(n) if n else first

        super().__init__(optimizer, lrs_after, betas_after, last_batch_iteration)

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of the cycle at the step that ``last_epoch`` counts.

        Returns:
            One pair per parameter group; None where momenta are not cycled. Before the first step
            they are the highest ones, as in DeepSpeed, whose optimizer has the lowest ones then.
        """
        return None if self._cycled is None else self._cycled(self.last_epoch)


SCHEDULES: Final[Mapping[str, type[LRSchedule]]] = MappingProxyType(
    {c.__name__: c for c in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}
)


def make_scheduler(named: Named, optimizer: Optimizer) -> LRScheduler:
    """Return the scheduler that a configuration names; raises OptionError.

    It is one of DeepSpeed's, or a class of ``torch.optim.lr_scheduler`` by its name.
    """
    kind = SCHEDULES.get(named.type)
    if kind is None:
        return _of_torch(named, optimizer)
    params = {name: value for name, value in named.params.items() if value is not None}
    # -1 in the JSON is the start of a run; checkpoints restore the iteration.
    if params.pop("last_batch_iteration", -1) != -1:
        message = (
            "scheduler.params.last_batch_iteration was given: load_checkpoint sets where a schedule"
            " continues. Leave it out."
        )
        raise OptionError(message)
    accepted = dict(list(signature(kind).parameters.items())[1:-1])
    _check_names(named.type, params, accepted)
    return kind(optimizer, **arguments_of(kind, params, _PARAMS))


def _of_torch(named: Named, optimizer: Optimizer) -> LRScheduler:
    cls = getattr(lr_scheduler, named.type, None)
    is_scheduler = isinstance(cls, type) and issubclass(cls, LRScheduler) and cls is not LRScheduler
    if cls is None or not is_scheduler:
        text = abbreviated(named.type)
        message = (
            f"scheduler.type={text} was given: it must be one of {', '.join(SCHEDULES)}, or a"
            " class of torch.optim.lr_scheduler. Pass any other scheduler as lr_scheduler."
        )
        raise OptionError(message)
    params = arguments_of(cls, named.params, _PARAMS)
    taken = list(signature(cls).parameters.items())[1:]
    _check_names(named.type, params, {n: p for n, p in taken if p.kind != p.VAR_KEYWORD})
    try:
        _rehearse(cls, optimizer, params)
        schedule: LRScheduler = cls(optimizer, **params)
    except (TypeError, ValueError, ArithmeticError) as error:
        text = abbreviated(params)
        message = f"scheduler.params={text} was given, and torch's {named.type} refuses: {error}."
        raise OptionError(message) from error
    return schedule


def _rehearse(cls: type, optimizer: Optimizer, params: Mapping[str, Any]) -> None:
    """Take one step of a schedule over other parameters, and raise what torch raises."""
    groups = [{**group, "params": [torch.zeros(1)]} for group in optimizer.param_groups]
    other = torch.optim.SGD([{k: v for k, v in g.items() if k != "param_names"} for g in groups])
    other.defaults.update(optimizer.defaults)
    schedule = cls(other, **params)
    if not issubclass(cls, lr_scheduler.ReduceLROnPlateau):  # its step() takes a loss
        other.step()
        schedule.step()


def _check_names(kind: str, params: dict[str, Any], parameters: dict[str, Parameter]) -> None:
    missing = [n for n, p in parameters.items() if p.default is Parameter.empty and n not in params]
    foreign = [name for name in params if name not in parameters]
    if missing or foreign:
        problems = [f"lacks {name}" for name in missing] + [f"has {name}" for name in foreign]
        message = (
            f"scheduler.params of {kind} {', '.join(problems)}. It takes {', '.join(parameters)};"
            f" write {', '.join(missing) or 'no others'}."
        )
        raise OptionError(message)


@dataclass(frozen=True, slots=True)
class _Cycle:
    """The shape of one cycle: the steps and stairs of its halves, and the decay after it."""

    steps: tuple[int, int]
    stairs: tuple[int, int]
    decay_step_size: float

    @classmethod
    def of(
        cls,
        steps: tuple[float, float | None],
        stairs: tuple[int, int | None],
        decay_step_size: float,
    ) -> Self:
        """Check the sizes; the second half defaults to the first."""
        first = second = _steps(steps[0], "cycle_first_step_size")
        if steps[1] is not None:
            second = _steps(steps[1], "cycle_second_step_size", least=0)
        falling = stairs[0] if stairs[1] is None else stairs[1]
        return cls((first, second), (stairs[0], falling), decay_step_size)

    def is_over(self, n: int) -> bool:
        """Return whether the decay has begun after ``n`` steps."""
        return n > sum(self.steps)

    def height(self, n: int) -> float:
        """Return the height of the cycle after ``n`` steps: 0 at its ends, 1 in its middle."""
        at = n % sum(self.steps)
        rising = at <= self.steps[0]
        done, size = (at, self.steps[0]) if rising else (sum(self.steps) - at, self.steps[1])
        count = self.stairs[0] if rising else self.stairs[1]
        return math.floor(done * count / size) / count if count > 0 else done / size

    def decay(self, n: int, rate: float) -> float:
        """Return ``1 + rate`` per ``decay_step_size`` steps after the cycle; 1 without decay."""
        if not self.decay_step_size:
            return 1.0
        return 1.0 + rate * (n - sum(self.steps)) / self.decay_step_size


def _cycled_betas(cycle: _Cycle, slow: list[float], fast: list[float], rate: float) -> Betas:
    """Return betas whose first one is highest when the learning rate is lowest."""

    def momenta(n: int) -> list[float]:
        if cycle.is_over(n):
            return [high * cycle.decay(n, rate) for high in fast]
        height = cycle.height(n)
        return [high - (high - low) * height for low, high in zip(slow, fast, strict=True)]

    return lambda n: [(momentum, _SECOND_BETA) for momentum in momenta(n)]


def _rise(steps: float, kind: str) -> tuple[Callable[[int], float], int]:
    """Return the height of a warm-up after ``n`` steps, 0 to 1, and its length, at least 2."""
    warm = max(2, _steps(steps, "warmup_num_steps"))
    if kind == "log":
        return lambda n: math.log(n) / math.log(warm) if n else 0.0, warm
    if kind == "linear":
        return lambda n: max(0, n - 1) / warm, warm
    message = f'{_PARAMS}.warmup_type={abbreviated(kind)} was given: it is "log" or "linear".'
    raise OptionError(message)


def _between(least: list[float], most: list[float], share: Callable[[int], float]) -> LRs:
    pairs = list(zip(least, most, strict=True))
    return lambda n: [low + (high - low) * share(n) for low, high in pairs]


def _lrs_of(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _per_group(optimizer: Optimizer, value: PerGroup, name: str) -> list[float]:
    groups = len(optimizer.param_groups)
    value = read_value(PerGroup, value, f"{_PARAMS}.{name}")
    if isinstance(value, Sequence):
        if len(value) != groups:
            message = (
                f"{_PARAMS}.{name} has {len(value)} values, and the optimizer {groups}"
                " parameter groups. Use one number, or one per group."
            )
            raise OptionError(message)
        return list(value)
    return [value] * groups


def _steps(value: float, name: str, *, least: int = 1) -> int:
    number = number_of(value)
    if number is None or number < least or not number.is_integer():
        message = (
            f"{_PARAMS}.{name}={abbreviated(value)} was given: it is a number of steps, at least"
            f" {least}."
        )
        raise OptionError(message)
    return int(value)
