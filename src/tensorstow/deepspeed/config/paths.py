"""From a nested configuration to known keys with their values; what is not known is refused."""

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple, Never

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.config.key import Key
from tensorstow.deepspeed.config.keys import KEYS, SECTIONS, SPELLINGS, SWITCHES

_NEAREST = 3


class Given(NamedTuple):
    """A key, the path as it was written, and the value."""

    key: Key
    path: str
    value: Any


def given_keys(configuration: Mapping[str, Any]) -> list[Given]:
    """Return every key that a configuration has; raises OptionError for one that is not known."""
    return list(_walk(configuration, ""))


def older_names(given: Iterable[Given]) -> list[str]:
    """Return, of the names in use that DeepSpeed has given up, what each is called now."""
    return [
        f"{one.path} is {one.key.path}"
        for one in given
        if one.path not in {one.key.path, *one.key.also} and not one.key.path.endswith(".*")
    ]


def is_known(path: str) -> bool:
    """Return whether a value may stand at ``path``: a key's, or one within a free section's."""
    parts = path.split(".")
    parents = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return any(p in KEYS or p in SPELLINGS or f"{p}.*" in KEYS for p in parents)


def _walk(section: Mapping[str, Any], prefix: str) -> Iterator[Given]:
    for name, value in section.items():
        path = f"{prefix}{name}"
        canonical = _canonical(path)
        if canonical in KEYS:
            yield Given(KEYS[canonical], path, value)
        elif canonical in SWITCHES:
            yield from _switch(path, canonical, value)
        elif _is_section(canonical):
            yield from _walk(_contents(path, value), f"{path}.")
        elif f"{canonical}.*" in KEYS:
            yield Given(KEYS[f"{canonical}.*"], path, value)
        elif prefix and f"{prefix}*" in KEYS:
            yield Given(KEYS[f"{prefix}*"], path, value)
        else:
            _refuse_unknown(path)


def _canonical(path: str) -> str:
    for old, new in SECTIONS.items():
        if path == old or path.startswith(f"{old}."):
            path = new + path[len(old) :]
    return SPELLINGS.get(path, path)


def _switch(path: str, canonical: str, value: object) -> Iterator[Given]:
    if value is not None and not isinstance(value, bool):
        message = f"{path}={value!r} was given: it is true or false."
        raise OptionError(message)
    if value:
        target, meant = SWITCHES[canonical]
        yield Given(KEYS[target], path, meant)


def _is_section(path: str) -> bool:
    return any(key.startswith(f"{path}.") and key != f"{path}.*" for key in KEYS)


def _contents(path: str, value: object) -> Mapping[str, Any]:
    if value is None:
        return {}
    if path == "zero_optimization" and isinstance(
        value, bool
    ):  # as it was before there were stages
        return {"stage": int(value)}
    if not isinstance(value, Mapping):
        message = f"{path}={value!r} was given: it is an object, {{...}}."
        raise OptionError(message)
    return value


def _refuse_unknown(path: str) -> Never:
    name = path.rpartition(".")[2]
    written = [*KEYS, *SPELLINGS, *SWITCHES, *SECTIONS]
    paths = {*written, *(p.rpartition(".")[0] for p in KEYS if "." in p)}
    elsewhere = sorted(p for p in paths if p.rpartition(".")[2] == name)
    near = elsewhere or get_close_matches(path, sorted(paths), _NEAREST)
    advice = f" Did you mean {' or '.join(near[:_NEAREST])}?" if near else " Take it away."
    message = f"{path} is no key of a DeepSpeed configuration that is known here.{advice}"
    raise OptionError(message)
