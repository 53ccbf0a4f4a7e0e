"""DeepSpeed's learning rate schedules, under its names and parameters, as torch schedulers."""

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any, Final

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.courses import (
    Course,
    lr_range_test,
    one_cycle,
    warmup_cosine_lr,
    warmup_decay_lr,
    warmup_lr,
)
from tensorstow.deepspeed.settings import Named

SCHEDULES: Final[Mapping[str, Callable[..., Course]]] = MappingProxyType(
    {
        "LRRangeTest": lr_range_test,
        "OneCycle": one_cycle,
        "WarmupLR": warmup_lr,
        "WarmupDecayLR": warmup_decay_lr,
        "WarmupCosineLR": warmup_cosine_lr,
    }
)


class Schedule(LRScheduler):
    """Sets each group's rate, and betas where they are cycled, by the steps taken."""

    def __init__(self, optimizer: Optimizer, course: Course) -> None:
        """Set what holds before the first step."""
        self._course = course
        super().__init__(optimizer)

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


def make_scheduler(named: Named, optimizer: Optimizer) -> LRScheduler:
    """Return the schedule that a configuration names; raises OptionError.

    It is one of DeepSpeed's, or any class of ``torch.optim.lr_scheduler`` by its name.
    """
    course = SCHEDULES.get(named.type)
    if course is None:
        return _of_torch(named, optimizer)
    params = {name: value for name, value in named.params.items() if value is not None}
    # Where the JSON says -1, it is what a run starts from; checkpoints say where to go on.
    if params.pop("last_batch_iteration", -1) != -1:
        message = (
            "scheduler.params.last_batch_iteration was given: a schedule goes on where"
            " load_checkpoint says. Leave it out."
        )
        raise OptionError(message)
    known = dict(list(signature(course).parameters.items())[1:])
    _check_names(named.type, params, known)
    for name, value in params.items():
        _check_type(name, value, str(known[name].annotation))
    return Schedule(optimizer, course(optimizer, **params))


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
