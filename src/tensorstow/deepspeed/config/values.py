"""Each value of a configuration checked, and answered by what its key says."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.config.key import Answer
from tensorstow.deepspeed.config.keys import KEYS
from tensorstow.deepspeed.config.kinds import is_off
from tensorstow.deepspeed.config.paths import Given, is_known

logger = logging.getLogger("tensorstow")

AUTO = "auto"
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_PRECISIONS = ("fp16.enabled", "bf16.enabled")


def values_of(given: Iterable[Given], fill: Mapping[str, Any]) -> dict[str, Any]:
    """Return a value for every key, by path; raises OptionError for what is refused.

    ``fill`` says what stands for "auto", by path; what follows from other values needs no saying. A
    null is as good as no key.
    """
    _refuse_unknown(fill)
    values = {path: key.off for path, key in KEYS.items()}
    written: dict[str, Given] = {}
    idle: list[Given] = []
    undecided: list[Given] = []
    for one in (_filled(each, fill) for each in given if each.value is not None):
        needed = one.key.answer is Answer.HONOURED
        if one.key.answer is Answer.NO_MEANING:
            idle.append(one)
        if one.value == AUTO:
            if needed:  # else nobody asks for what it stands for
                undecided.append(one)
            continue
        checked = _checked(_decided(one) if needed else one)
        if one.key.answer is Answer.REFUSED:
            _refuse(checked)
        if not one.key.path.endswith("*"):  # what stands in a free section is many keys
            _refuse_disagreement(written.setdefault(one.key.path, checked), checked)
        values[one.key.path] = checked.value
    for one in undecided:
        if not _follows(one.key.path, values):
            _decided(one)
    _say_idle(idle)
    return values


def _refuse_unknown(fill: Mapping[str, Any]) -> None:
    for path in fill:
        if not is_known(path):
            message = f"fill={{{path!r}: ...}} was given: no key of a configuration has that path."
            raise OptionError(message)


def _follows(path: str, values: Mapping[str, Any]) -> bool:
    """Return whether nobody needs to say a value: the others do, or nothing asks for it."""
    section, _, name = path.rpartition(".")
    if path in _BATCH:
        return any(values[size] is not None for size in _BATCH[:2])
    if path in _PRECISIONS:
        return any(values[other] for other in _PRECISIONS)
    if section == "fp16":
        return not values["fp16.enabled"]
    return name == "nvme_path" and values[f"{section}.device"] != "nvme"


def _filled(one: Given, fill: Mapping[str, Any]) -> Given:
    """Put ``fill``'s values where "auto" stands, at any depth."""

    def filled(value: object, path: str) -> object:
        if value == AUTO:
            return fill.get(path, fill.get(one.key.path, AUTO) if path == one.path else AUTO)
        if isinstance(value, Mapping):
            return {name: filled(inner, f"{path}.{name}") for name, inner in value.items()}
        return value

    return one._replace(value=filled(one.value, one.path))


def _decided(one: Given) -> Given:
    """Refuse "auto" that nothing filled."""
    for path in _autos(one.value, one.path):
        message = (
            f'{path}="auto" was given, and a value is needed. Write one; the Trainer of'
            " transformers does that for you, and initialize(..., fill={path: value}) does."
        )
        raise OptionError(message)
    return one


def _autos(value: object, path: str) -> Iterator[str]:
    if value == AUTO:
        yield path
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _autos(inner, f"{path}.{name}")


def _checked(one: Given) -> Given:
    try:
        return one._replace(value=one.key.kind.take(one.value))
    except ValueError:
        message = f"{one.path}={one.value!r} was given: it is {one.key.kind.allowed}."
        raise OptionError(message) from None


def _refuse(one: Given) -> None:
    whole = one.key.path.endswith(".*")
    if not (is_off(one.value) if whole else one.value == one.key.off):
        given = f"{one.path} was switched on" if whole else f"{one.path}={one.value!r} was given"
        message = f"{given}, which is not here: {one.key.note}."
        raise OptionError(message)


def _refuse_disagreement(first: Given, second: Given) -> None:
    if first.value != second.value:
        message = (
            f"{first.path} and {second.path} are one key, and say {first.value!r} and"
            f" {second.value!r}. Keep {second.key.path}."
        )
        raise OptionError(message)


def _say_idle(given: Iterable[Given]) -> None:
    reasons: dict[str, list[str]] = {}
    for one in given:
        if not (is_off(one.value) or one.value == one.key.off):
            reasons.setdefault(one.key.note, []).append(one.path)
    if reasons:
        said = "; ".join(f"{', '.join(paths)} ({why})" for why, paths in reasons.items())
        say_once(f"keys of the DeepSpeed configuration without a meaning here: {said}")


@cache
def say_once(text: str) -> None:
    """Log ``text`` as a warning, the first time."""
    logger.warning(text)
