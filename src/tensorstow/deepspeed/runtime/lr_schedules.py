"""``deepspeed.runtime.lr_schedules``: DeepSpeed's learning rate schedules as torch schedulers.

A schedule is a function of the optimizer steps taken. The warm-ups look at ``n - 1`` as DeepSpeed
does: the first two steps have the rate they start from.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from tensorstow.base.errors import OptionError, abbreviated
from tensorstow.base.fields import number_of, read_value
from tensorstow.deepspeed.config.settings import Named
from tensorstow.deepspeed.config.values import arguments_of
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

PerGroup = float | Sequence[float]
Share = Callable[[int], float]
Betas = list[tuple[float, float]]
_PARAMS = "scheduler.params"
_SECOND_BETA = 0.99  # next to a cycled momentum, as in DeepSpeed


class LRSchedule(LRScheduler):
    """A schedule that sets each group's learning rate, and its betas if they are cycled.

    Args:
        optimizer: The optimizer whose parameter groups are set.
        share: The part of the way from the lowest to the highest rate after ``n`` optimizer steps.
        lrs: The lowest rates and the highest ones, one per group.
        last_batch_iteration: The number of the last step taken, from 0; -1: none.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        share: Share,
        lrs: tuple[list[float], list[float]],
        last_batch_iteration: int,
    ) -> None:
        """Set the rates of the first step, or of the one after ``last_batch_iteration``."""
        self._share = share
        self.min_lrs, self.max_lrs = lrs
        # torch's constructor calls ``get_lr`` already.
        super().__init__(optimizer)
        if last_batch_iteration != -1:
            self.load_state_dict({"last_batch_iteration": last_batch_iteration})

    def get_lr(self) -> list[float | Any]:
        """Return the learning rate of each group in the step that ``last_epoch`` counts."""
        return list(self._lrs_after(self.last_epoch))

    def _lrs_after(self, n: int) -> list[float]:
        """Return the learning rate of each group after ``n`` steps."""
        lrs, share = zip(self.min_lrs, self.max_lrs, strict=True), self._share(n)
        return [low + (high - low) * share for low, high in lrs]

    def _betas_after(self, n: int) -> Betas | None:
        """Return the betas of each group after ``n`` steps; None: the schedule sets none."""
        del n
        return None

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
        betas = self._betas_after(self.last_epoch)
        for group, pair in zip(self.optimizer.param_groups, betas or (), strict=betas is not None):
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

        def share(n: int) -> float:
            return rise(n) if n <= warm else 1.0

        top = _lrs_of(optimizer) if warmup_max_lr is None else warmup_max_lr
        self.warmup_num_steps, self.warmup_type = warm, warmup_type
        lrs = _ends(optimizer, warmup_min_lr=warmup_min_lr, warmup_max_lr=top)
        super().__init__(optimizer, share, lrs, last_batch_iteration)


@checks_keywords(_OF_WARMUPS)
class WarmupDecayLR(LRSchedule):
    """Raise the rate as WarmupLR does, then lower it linearly to ``warmup_min_lr``.

    Args:
        total_num_steps: The step at which the rate is back at ``warmup_min_lr``.
        warmup_min_lr: The rate at the start and at the end; one number, or one per group.
        warmup_max_lr: The rate after the warm-up; one number, or one per group.
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

        self.warmup_num_steps, self.warmup_type = warm, warmup_type
        self.total_num_steps = total
        lrs = _ends(optimizer, warmup_min_lr=warmup_min_lr, warmup_max_lr=warmup_max_lr)
        super().__init__(optimizer, share, lrs, last_batch_iteration)


@checks_keywords(_OF_WARMUPS)
class WarmupCosineLR(LRSchedule):
    """Raise each group's rate to its own value, its highest, then lower it along a cosine.

    Args:
        total_num_steps: The step at which the cosine ends.
        warmup_min_ratio: The share of the group's rate at the start, 0 to 1.
        cos_min_ratio: The share of the group's rate at the end, 0 to 1.
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

        def share(n: int) -> float:
            if n == 0:
                return 0.0
            if n <= warm:
                return max(0.0, warmup_min_ratio + (1.0 - warmup_min_ratio) * rise(n))
            done = min(1.0, (n - warm) / max(1, total - warm))
            height = (1.0 + math.cos(math.pi * done)) / 2.0
            return max(0.0, cos_min_ratio + (1.0 - cos_min_ratio) * height)

        self.warmup_num_steps, self.warmup_type = warm, warmup_type
        self.total_num_steps = total
        highest = _lrs_of(optimizer)
        super().__init__(optimizer, share, ([0.0] * len(highest), highest), last_batch_iteration)

    def get_lr_ratio(self) -> float:
        """Return the share of each group's own rate in this step; 0 before the first."""
        return self._share(self.last_epoch)


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

        super().__init__(optimizer, factor, ([0.0] * len(lowest), lowest), last_batch_iteration)


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
        first = second = _steps(cycle_first_step_size, "cycle_first_step_size")
        if cycle_second_step_size is not None:
            second = _steps(cycle_second_step_size, "cycle_second_step_size", least=0)
        stairs = cycle_first_stair_count
        self._halves = (
            (first, stairs),
            (second, stairs if cycle_second_stair_count is None else cycle_second_stair_count),
        )
        self.total_size, self.step_ratio = first + second, first / (first + second)
        self._decay_step_size = decay_step_size
        self._decay_lr_rate, self._decay_mom_rate = decay_lr_rate, decay_mom_rate
        self._moms: tuple[list[float], list[float]] | None = None
        if cycle_momentum and "betas" in optimizer.defaults:
            self._moms = _ends(optimizer, cycle_min_mom=cycle_min_mom, cycle_max_mom=cycle_max_mom)
        lrs = _ends(optimizer, cycle_min_lr=cycle_min_lr, cycle_max_lr=cycle_max_lr)
        super().__init__(optimizer, self._height, lrs, last_batch_iteration)

    def _lrs_after(self, n: int) -> list[float]:
        if n <= self.total_size:
            return super()._lrs_after(n)
        return [low / self._decay(n, self._decay_lr_rate) for low in self.min_lrs]

    def _betas_after(self, n: int) -> Betas | None:
        if n == 0 and self._moms is not None:
            return [(low, _SECOND_BETA) for low in self._moms[0]]
        return self._cycled_betas(n)

    def get_mom(self) -> Betas | None:
        """Return the betas of the cycle at the step that ``last_epoch`` counts.

        Returns:
            One pair per parameter group; None if momenta are not cycled. Before the first step
            they are the highest ones, as in DeepSpeed, whose optimizer has the lowest ones then.
        """
        return self._cycled_betas(self.last_epoch)

    def _cycled_betas(self, n: int) -> Betas | None:
        """Return betas whose first one is highest when the learning rate is lowest."""
        if self._moms is None:
            return None
        lowest, highest = self._moms
        if n > self.total_size:
            moms = [high * self._decay(n, self._decay_mom_rate) for high in highest]
        else:
            height = self._height(n)
            moms = [h - (h - low) * height for low, h in zip(lowest, highest, strict=True)]
        return [(momentum, _SECOND_BETA) for momentum in moms]

    def _height(self, n: int) -> float:
        """Return the height of the cycle after ``n`` steps: 0 at its ends, 1 in its middle."""
        at = n % self.total_size
        is_rising = at <= self._halves[0][0]
        size, stairs = self._halves[0 if is_rising else 1]
        done = at if is_rising else self.total_size - at
        return math.floor(done * stairs / size) / stairs if stairs > 0 else done / size

    def _decay(self, n: int, rate: float) -> float:
        """Return ``1 + rate`` per ``decay_step_size`` steps after the cycle; 1 without decay."""
        if not self._decay_step_size:
            return 1.0
        return 1.0 + rate * (n - self.total_size) / self._decay_step_size


SCHEDULES: Final[Mapping[str, type[LRSchedule]]] = MappingProxyType(
    {c.__name__: c for c in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}
)
VALID_LR_SCHEDULES: Final = list(SCHEDULES)
"""What ``scheduler.type`` may be."""
LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = VALID_LR_SCHEDULES


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


def _rise(steps: float, kind: str) -> tuple[Share, int]:
    """Return the height of a warm-up after ``n`` steps, 0 to 1, and its length, at least 2."""
    warm = max(2, _steps(steps, "warmup_num_steps"))
    if kind == "log":
        return lambda n: math.log(n) / math.log(warm) if n else 0.0, warm
    if kind == "linear":
        return lambda n: max(0, n - 1) / warm, warm
    message = f'{_PARAMS}.warmup_type={abbreviated(kind)} was given: it is "log" or "linear".'
    raise OptionError(message)


def _ends(optimizer: Optimizer, **ends: PerGroup) -> tuple[list[float], list[float]]:
    """Return the lowest and the highest values of each group, by their keywords."""
    lowest, highest = (_per_group(optimizer, value, name) for name, value in ends.items())
    return lowest, highest


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
