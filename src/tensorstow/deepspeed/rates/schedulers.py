"""DeepSpeed's learning rate schedules, under its names and parameters, as torch schedulers."""

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any, Final

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.config.settings import Named
from tensorstow.deepspeed.rates.courses import (
    Course,
    PerGroup,
    lr_range_test,
    one_cycle,
    warmup_cosine_lr,
    warmup_decay_lr,
    warmup_lr,
)


class Schedule(LRScheduler):
    """Sets each group's rate, and betas where they are cycled, by the steps taken."""

    def __init__(
        self, optimizer: Optimizer, course: Course, last_batch_iteration: int = -1
    ) -> None:
        """Set what holds before the first step, or behind ``last_batch_iteration``."""
        self._course = course
        super().__init__(optimizer)
        if last_batch_iteration != -1:
            self.load_state_dict({"last_batch_iteration": last_batch_iteration})

    def get_lr(self) -> list[float | Any]:
        """Return the rates of the step that ``last_epoch`` counts."""
        return list(self._course.rates(self.last_epoch))

    def step(self, epoch: int | None = None) -> None:
        """Move on behind one optimizer step."""
        super().step(epoch)
        self._set_betas()

    def state_dict(self) -> dict[str, Any]:
        """Return what DeepSpeed's checkpoints hold: the last step's number, -1 before any."""
        return {"last_batch_iteration": self.last_epoch - 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on behind a step, of DeepSpeed's checkpoints too, and set the rates."""
        self.last_epoch = int(state_dict["last_batch_iteration"]) + 1
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate
        self._last_lr = self.get_lr()
        self._set_betas()

    def _set_betas(self) -> None:
        if self._course.betas is not None:
            betas = self._course.betas(self.last_epoch)
            for group, pair in zip(self.optimizer.param_groups, betas, strict=True):
                group["betas"] = pair


class WarmupLR(Schedule):
    """From ``warmup_min_lr`` to ``warmup_max_lr`` (None: each group's own), then constant."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: float = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        """Set the first rates."""
        course = warmup_lr(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)
        super().__init__(optimizer, course, last_batch_iteration)


class WarmupDecayLR(Schedule):
    """WarmupLR, then linearly down to ``warmup_min_lr`` at ``total_num_steps``."""

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
        """Set the first rates."""
        course = warmup_decay_lr(
            optimizer,
            total_num_steps=total_num_steps,
            warmup_min_lr=warmup_min_lr,
            warmup_max_lr=warmup_max_lr,
            warmup_num_steps=warmup_num_steps,
            warmup_type=warmup_type,
        )
        super().__init__(optimizer, course, last_batch_iteration)


class WarmupCosineLR(Schedule):
    """Each group's own rate: up over the warm-up, down along a cosine to ``cos_min_ratio``."""

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
        """Set the first rates."""
        course = warmup_cosine_lr(
            optimizer,
            total_num_steps=total_num_steps,
            warmup_min_ratio=warmup_min_ratio,
            warmup_num_steps=warmup_num_steps,
            cos_min_ratio=cos_min_ratio,
            warmup_type=warmup_type,
        )
        super().__init__(optimizer, course, last_batch_iteration)


class LRRangeTest(Schedule):
    """Ever larger rates, continuously or in stairs, to find where training diverges."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: float = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,  # noqa: FBT001, FBT002
        last_batch_iteration: int = -1,
    ) -> None:
        """Set the first rates."""
        course = lr_range_test(
            optimizer,
            lr_range_test_min_lr=lr_range_test_min_lr,
            lr_range_test_step_size=lr_range_test_step_size,
            lr_range_test_step_rate=lr_range_test_step_rate,
            lr_range_test_staircase=lr_range_test_staircase,
        )
        super().__init__(optimizer, course, last_batch_iteration)


class OneCycle(Schedule):
    """One cycle from min to max and back, momentum the other way, then a decay."""

    def __init__(  # noqa: PLR0913, PLR0917  # upstream's
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
        cycle_momentum: bool = True,  # noqa: FBT001, FBT002
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        """Set the first rates and momenta."""
        course = one_cycle(
            optimizer,
            cycle_min_lr=cycle_min_lr,
            cycle_max_lr=cycle_max_lr,
            decay_lr_rate=decay_lr_rate,
            cycle_first_step_size=cycle_first_step_size,
            cycle_second_step_size=cycle_second_step_size,
            cycle_first_stair_count=cycle_first_stair_count,
            cycle_second_stair_count=cycle_second_stair_count,
            decay_step_size=decay_step_size,
            cycle_momentum=cycle_momentum,
            cycle_min_mom=cycle_min_mom,
            cycle_max_mom=cycle_max_mom,
            decay_mom_rate=decay_mom_rate,
        )
        super().__init__(optimizer, course, last_batch_iteration)


SCHEDULES: Final[Mapping[str, Callable[..., Schedule]]] = MappingProxyType(
    {
        "LRRangeTest": LRRangeTest,
        "OneCycle": OneCycle,
        "WarmupLR": WarmupLR,
        "WarmupDecayLR": WarmupDecayLR,
        "WarmupCosineLR": WarmupCosineLR,
    }
)


def make_scheduler(named: Named, optimizer: Optimizer) -> LRScheduler:
    """Return the schedule that a configuration names; raises OptionError.

    It is one of DeepSpeed's, or any class of ``torch.optim.lr_scheduler`` by its name.
    """
    kind = SCHEDULES.get(named.type)
    if kind is None:
        return _of_torch(named, optimizer)
    params = {name: value for name, value in named.params.items() if value is not None}
    # Where the JSON says -1, it is what a run starts from; checkpoints say where to go on.
    if params.pop("last_batch_iteration", -1) != -1:
        message = (
            "scheduler.params.last_batch_iteration was given: a schedule goes on where"
            " load_checkpoint says. Leave it out."
        )
        raise OptionError(message)
    known = dict(list(signature(kind).parameters.items())[1:-1])
    _check_names(named.type, params, known)
    for name, value in params.items():
        _check_type(name, value, str(known[name].annotation))
    return kind(optimizer, **params)


def _of_torch(named: Named, optimizer: Optimizer) -> LRScheduler:
    cls = getattr(lr_scheduler, named.type, None)
    known = isinstance(cls, type) and issubclass(cls, LRScheduler) and cls is not LRScheduler
    if cls is None or not known:
        message = (
            f"scheduler.type={named.type!r} was given: it is one of {', '.join(SCHEDULES)}, or a"
            " class of torch.optim.lr_scheduler. Pass any other scheduler as lr_scheduler."
        )
        raise OptionError(message)
    params = dict(named.params)
    taken = list(signature(cls).parameters.items())[1:]
    _check_names(named.type, params, {n: p for n, p in taken if p.kind != p.VAR_KEYWORD})
    try:
        made: LRScheduler = cls(optimizer, **params)
    except (TypeError, ValueError) as error:
        message = f"scheduler.params={params} was given, and torch's {named.type} refuses: {error}."
        raise OptionError(message) from error
    return made


def _check_names(kind: str, params: dict[str, Any], known: dict[str, Parameter]) -> None:
    missing = [n for n, p in known.items() if p.default is Parameter.empty and n not in params]
    foreign = [name for name in params if name not in known]
    if missing or foreign:
        found = [f"lacks {name}" for name in missing] + [f"has {name}" for name in foreign]
        message = (
            f"scheduler.params of {kind} {', '.join(found)}. It takes {', '.join(known)}; write"
            f" {', '.join(missing) or 'no others'}."
        )
        raise OptionError(message)


def _check_type(name: str, value: object, annotation: str) -> None:
    """Raise OptionError for a value that its parameter's annotation does not have."""
    if "str" in annotation:
        fits, wanted = isinstance(value, str), "a text"
    elif "bool" in annotation:
        fits, wanted = isinstance(value, bool), "true or false"
    elif "Sequence" in annotation and isinstance(value, list | tuple):
        fits, wanted = all(_is_number(each) for each in value), "numbers alone"
    else:
        fits, wanted = _is_number(value), "a number"
    if not fits:
        message = f"scheduler.params.{name}={value!r} was given: it takes {wanted}."
        raise OptionError(message)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
