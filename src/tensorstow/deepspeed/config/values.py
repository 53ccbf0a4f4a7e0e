"""Checks each key that is given, and its value; reads what it gives to a class.

Unknown keys and unsupported values raise an error.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple, Never, get_args

from tensorstow.base.errors import OptionError, abbreviated
from tensorstow.base.fields import hints_of, read_value
from tensorstow.deepspeed.config.key import BOOL, Key, is_off, take_flag
from tensorstow.deepspeed.config.settings import KEYS, SECTIONS, SPELLINGS, SWITCHES
from tensorstow.doorkit.keyword_table import Support

_NEAREST = 3
logger = logging.getLogger("tensorstow")

AUTO = "auto"
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_PRECISIONS = ("fp16.enabled", "bf16.enabled")


class GivenKey(NamedTuple):
    """A key, the path as it was written, and the value."""

    key: Key
    path: str
    value: Any


def given_keys(configuration: Mapping[str, Any]) -> list[GivenKey]:
    """Return every key of a configuration; raises OptionError for an unknown key.

    Keys that begin with "_" are comments, as upstream ignores them.
    """
    return list(_walk(configuration, ""))


def older_names(keys: Iterable[GivenKey]) -> list[str]:
    """Return the deprecated names that are used, each with its current name."""
    return [
        f"{one.path} is {one.key.path}"
        for one in keys
        if one.path not in {one.key.path, *one.key.also} and not one.key.path.endswith(".*")
    ]


def is_known(path: str) -> bool:
    """Return whether ``path`` is a key, or inside a section of free keys."""
    parts = path.split(".")
    parents = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return any(p in KEYS or p in SPELLINGS or f"{p}.*" in KEYS for p in parents)


def _walk(section: Mapping[str, Any], prefix: str) -> Iterator[GivenKey]:
    for name, value in section.items():
        if name.startswith("_"):
            continue
        path = f"{prefix}{name}"
        canonical = _canonical(path)
        if canonical in KEYS:
            yield GivenKey(KEYS[canonical], path, value)
        elif canonical in SWITCHES:
            yield from _switch(path, canonical, value)
        elif _is_section(canonical):
            yield from _walk(_contents(path, value), f"{path}.")
        elif f"{canonical}.*" in KEYS:
            yield GivenKey(KEYS[f"{canonical}.*"], path, value)
        elif prefix and f"{prefix}*" in KEYS:
            yield GivenKey(KEYS[f"{prefix}*"], path, value)
        else:
            _refuse_unknown_key(path)


def _canonical(path: str) -> str:
    for old, new in SECTIONS.items():
        if path == old or path.startswith(f"{old}."):
            path = new + path[len(old) :]
    return SPELLINGS.get(path, path)


def _switch(path: str, canonical: str, value: object) -> Iterator[GivenKey]:
    try:
        is_on = value is not None and take_flag(value)
    except ValueError:
        message = f"{path}={abbreviated(value)} was given: it is true or false."
        raise OptionError(message) from None
    if is_on:
        target, meant = SWITCHES[canonical]
        yield GivenKey(KEYS[target], path, meant)


def _is_section(path: str) -> bool:
    return any(key.startswith(f"{path}.") and key != f"{path}.*" for key in KEYS)


def _contents(path: str, value: object) -> Mapping[str, Any]:
    if value is None:
        return {}
    # As it was before there were stages.
    if path == "zero_optimization" and isinstance(value, bool):
        return {"stage": int(value)}
    if not isinstance(value, Mapping):
        message = f"{path}={abbreviated(value)} was given: it is an object, {{...}}."
        raise OptionError(message)
    return value


def _refuse_unknown_key(path: str) -> Never:
    name = path.rpartition(".")[2]
    written = [*KEYS, *SPELLINGS, *SWITCHES, *SECTIONS]
    paths = {*written, *(p.rpartition(".")[0] for p in KEYS if "." in p)}
    elsewhere = sorted(p for p in paths if p.rpartition(".")[2] == name)
    near = elsewhere or get_close_matches(path, sorted(paths), _NEAREST)
    advice = f" Did you mean {' or '.join(near[:_NEAREST])}?" if near else " Remove it."
    message = f"{path} is not a known key of a DeepSpeed configuration.{advice}"
    raise OptionError(message)


def values_of(keys: Iterable[GivenKey], fill: Mapping[str, Any]) -> dict[str, Any]:
    """Return a value for every key, by path; raises OptionError for refused values.

    ``fill`` has values for "auto", by path; keys that follow from others need none. A null is the
    same as no key.
    """
    _check_fill(fill)
    values = {path: key.off for path, key in KEYS.items()}
    written: dict[str, GivenKey] = {}
    idle: list[GivenKey] = []
    undecided: list[GivenKey] = []
    for one in (_filled(given_key, fill) for given_key in keys if given_key.value is not None):
        needed = one.key.support is Support.HONOURED
        if one.key.support is Support.NO_MEANING:
            idle.append(one)
        if one.value == AUTO:
            if needed:  # else nothing uses the value
                undecided.append(one)
            continue
        checked = _checked(_decided(one) if needed else one)
        if one.key.support is Support.REFUSED:
            _refuse(checked)
        if not one.key.path.endswith("*"):  # a free section has many keys
            _refuse_disagreement(written.setdefault(one.key.path, checked), checked)
        values[one.key.path] = checked.value
    for one in undecided:
        if not _follows(one.key.path, values):
            _decided(one)
    _say_idle(idle)
    return values


def _check_fill(fill: Mapping[str, Any]) -> None:
    for path in fill:
        if not is_known(path):
            message = f"fill={{{path!r}: ...}} was given: no key of a configuration has that path."
            raise OptionError(message)


def _follows(path: str, values: Mapping[str, Any]) -> bool:
    """Return whether an "auto" needs no value: it follows from others, or nothing uses it."""
    section, _, name = path.rpartition(".")
    if path in _BATCH:
        return any(values[size] is not None for size in _BATCH[:2])
    if path in _PRECISIONS:
        return any(values[other] for other in _PRECISIONS)
    if section == "fp16":
        return not values["fp16.enabled"]
    return name == "nvme_path" and values[f"{section}.device"] != "nvme"


def _filled(one: GivenKey, fill: Mapping[str, Any]) -> GivenKey:
    """Replace "auto" by the values of ``fill``, at any depth."""

    def filled(value: object, path: str) -> object:
        if value == AUTO:
            return fill.get(path, fill.get(one.key.path, AUTO) if path == one.path else AUTO)
        if isinstance(value, Mapping):
            return {name: filled(inner, f"{path}.{name}") for name, inner in value.items()}
        return value

    return one._replace(value=filled(one.value, one.path))


def _decided(one: GivenKey) -> GivenKey:
    """Raise OptionError for an "auto" that has no value."""
    for path in _autos(one.value, one.path):
        message = (
            f'{path}="auto" was given, and a value is needed. Write one, or pass it as'
            " initialize(..., fill={path: value}). The Trainer of transformers fills it in itself."
        )
        raise OptionError(message)
    return one


def _autos(value: object, path: str) -> Iterator[str]:
    if value == AUTO:
        yield path
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _autos(inner, f"{path}.{name}")


def _checked(one: GivenKey) -> GivenKey:
    try:
        return one._replace(value=one.key.kind.take(one.value))
    except ValueError:
        message = f"{one.path}={abbreviated(one.value)} was given: it is {one.key.kind.allowed}."
        raise OptionError(message) from None


def _refuse(one: GivenKey) -> None:
    whole = one.key.path.endswith(".*")
    if not (is_off(one.value) if whole else one.value == one.key.off):
        reason = (
            f"{one.path} was switched on"
            if whole
            else f"{one.path}={abbreviated(one.value)} was given"
        )
        message = f"{reason}, which is not supported: {one.key.note}."
        raise OptionError(message)


def _refuse_disagreement(first: GivenKey, second: GivenKey) -> None:
    if first.value != second.value:
        values = f"{abbreviated(first.value)} and {abbreviated(second.value)}"
        message = (
            f"{first.path} and {second.path} are the same key, with the values {values}. Keep"
            f" {second.key.path}."
        )
        raise OptionError(message)


def _say_idle(keys: Iterable[GivenKey]) -> None:
    reasons: dict[str, list[str]] = {}
    for one in keys:
        if not (is_off(one.value) or one.value == one.key.off):
            reasons.setdefault(one.key.note, []).append(one.path)
    if reasons:
        said = "; ".join(f"{', '.join(paths)} ({why})" for why, paths in reasons.items())
        say_once(f"keys of the DeepSpeed configuration that have no effect here: {said}")


def arguments_of(
    cls: type, values: Mapping[str, Any], path: str, flags: Iterable[str] = ()
) -> dict[str, Any]:
    """Return keyword arguments for a class; raises OptionError for a value of another type.

    JSON writes a whole number as 1e3 too, and upstream takes 0 and 1 for false and true. ``flags``
    are true, false or null; another name that the constructor lacks is returned as it is.
    """
    hints = {**hints_of(cls), **dict.fromkeys(flags, bool | None)}
    return {
        name: read_value(hints.get(name, Any), _meant(hints.get(name), value), f"{path}.{name}")
        for name, value in values.items()
    }


def _meant(annotation: Any, value: object) -> object:
    kinds = get_args(annotation) or (annotation,)
    if bool in kinds and type(value) is int and value in {0, 1}:
        return BOOL.take(value)
    if int in kinds and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


@cache
def say_once(text: str) -> None:
    """Log ``text`` as a warning, once per process."""
    logger.warning(text)
