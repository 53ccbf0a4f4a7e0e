"""Snapshot references: state dicts that name a snapshot of the run instead of copying states.

[Note: Snapshot references] Trainers save ``optimizer.state_dict()`` at each checkpoint and load it
whole: twelve bytes per parameter in host memory, under DDP on every device. With
``checkpoints="reference"`` a state dict has the parameter groups, no states, and the name of a
snapshot. The snapshot is made before the state dict is returned, so a reference that was saved
names what is durable. It consists of numbers, strings and lists, which
``torch.load(weights_only=True)`` takes. The name is unique: a directory that has it is the
reference's. Before the first step there is nothing to name. Loading a reference to the current
state reads nothing: wrappers load at once what they have just asked for.

``torch.load`` checks no sum of its file, so a reference has a digest of its own fields and of the
groups, with the numbers of their parameters. References of earlier versions have none, and no field
but those that are listed here: a damaged name of the digest does not make a reference an earlier
one. A list and a tuple have the same digest.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import torch

from tensorstow.base.errors import DamageError, OptionError, abbreviated
from tensorstow.checkpoint.commits import Commits
from tensorstow.checkpoint.content import options_of
from tensorstow.store.store import Store

logger = logging.getLogger("tensorstow")

KEY = "tensorstow"
FORMAT = 1
PREFIX = "reference-"
"""The prefix of snapshots that were made for a reference."""
_PREFIXES = (PREFIX, "ticket-")
"""That of earlier versions too."""
_DIGEST = "digest"
_FIELDS = frozenset({"format", "step", "snapshot", "note"})
"""The fields that every reference has; the digest is the only other one."""
_NOTE = (
    "The optimizer states are in the run's directory (dir=), in the snapshot of this name: they are"
    " not lost, and not in this file."
)
_warned_without_digest = set[str]()


@dataclass(frozen=True, slots=True)
class SnapshotReference:
    """The fields of a snapshot reference, checked as far as possible without its directory."""

    snapshot: str | None
    """None: its run had taken no step."""
    groups: Sequence[Mapping[str, Any]]
    """The options of the parameter groups."""
    has_digest: bool


def reference_of(step: int, snapshot: str | None, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a reference next to ``groups``; ``snapshot`` None: of a run that has taken no step."""
    fields = {"format": FORMAT, "step": step, "snapshot": snapshot, "note": _NOTE}
    return {**fields, _DIGEST: _digest(fields, groups)}


def new_name(step: int) -> str:
    """Return a name for a snapshot that no other run has."""
    return f"{PREFIX}{step}-{uuid4().hex[:12]}"


def is_reference(state_dict: object) -> bool:
    """Return whether a state dict names a snapshot instead of holding states.

    Another key counts too: a damaged reference must not be loaded as a state dict without states.
    """
    return isinstance(state_dict, Mapping) and any(
        key == KEY or (isinstance(value, Mapping) and {"snapshot", "note"} & value.keys())
        for key, value in state_dict.items()
    )


def read_reference(state_dict: Mapping[str, Any]) -> SnapshotReference:
    """Return the fields of a snapshot reference; raise DamageError if it is not what was saved.

    Raises OptionError if it is none, or one of a newer version.
    """
    fields, groups = state_dict.get(KEY), state_dict.get("param_groups")
    version = fields.get("format") if isinstance(fields, Mapping) else None
    if not isinstance(fields, Mapping) or type(version) is not int or version != FORMAT:
        message = (
            f"A state dict with {KEY}={abbreviated(fields)} was given: a snapshot reference of"
            f" format {FORMAT} was expected. Load it with the version that saved it."
        )
        raise OptionError(message)
    name, step = fields.get("snapshot"), fields.get("step")
    has_fields = fields.keys() - {_DIGEST} == _FIELDS
    has_groups = isinstance(groups, Sequence) and all(isinstance(g, dict) for g in groups)
    has_texts = has_groups and all(isinstance(key, str) for g in groups or () for key in g)
    is_named = name is None or isinstance(name, str)
    states = state_dict.get("state", {})
    has_states = not isinstance(states, Mapping) or len(states) > 0
    is_whole = has_fields and has_texts and is_named and type(step) is int
    if not is_whole or has_states:
        message = (
            f"A snapshot reference with snapshot={abbreviated(name)}, step={abbreviated(step)} and"
            f" the keys {sorted(map(str, (*state_dict, *fields)))} was given: it has param_groups,"
            " no states, the number of a step, the name of a snapshot, and no other fields than"
            f" {sorted({*_FIELDS, _DIGEST})}. The file is damaged: take another checkpoint, or"
            " resume() for the newest commit."
        )
        raise DamageError(message)
    try:
        _text_of([fields, groups])  # values that cannot be compared are no options
        _check_digest(fields, groups or [])
        return SnapshotReference(name, options_of(groups or []), _DIGEST in fields)
    except (RuntimeError, TypeError) as error:  # nesting without end, a sparse tensor, none at all
        message = (
            f"A snapshot reference of step {step} was given, and a value in it is no option of an"
            f" optimizer ({type(error).__name__}). The file is damaged: take another checkpoint, or"
            " resume() for the newest commit."
        )
        raise DamageError(message) from error


def _check_digest(fields: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise DamageError unless the digest of a reference is right; log once that one has none."""
    if _DIGEST not in fields:
        if not _warned_without_digest:
            _warned_without_digest.add(str(fields["snapshot"]))
            logger.warning(
                "The reference to snapshot %s has no checksum: its parameter groups are taken as"
                " they are. Those that this version saves have one",
                fields["snapshot"],
            )
        return
    rest = {key: value for key, value in fields.items() if key != _DIGEST}
    if _digest(rest, groups) != fields[_DIGEST]:
        message = (
            f"A snapshot reference of step {fields['step']} was given, and its checksum is of other"
            " contents: its file is damaged, or its parameter groups were edited. Take another"
            " checkpoint, or resume() for the newest commit. For other options, load the reference"
            " as it was saved, and set them in optimizer.param_groups afterwards."
        )
        raise DamageError(message)


def _digest(fields: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> str:
    """Return a digest of a snapshot reference's fields and of its groups."""
    return hashlib.sha256(_text_of([fields, groups]).encode()).hexdigest()


def _text_of(value: object) -> str:
    """Return a text that equal values have, and no others; a tuple and a list are equal."""
    if isinstance(value, torch.Tensor):
        elements = value.detach().cpu().reshape(-1).view(torch.uint8).tolist()
        return f"{value.dtype}{tuple(value.shape)}{elements}"
    if isinstance(value, Mapping):
        items = sorted(f"{_text_of(key)}: {_text_of(entry)}" for key, entry in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_text_of, value)))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text_of, value))}]"
    return repr(value)


def differing_keys(
    saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return the keys of ``saved`` that have another value, or none, in ``groups``."""
    keys = {
        key
        for theirs, ours in zip(saved, groups, strict=True)
        for key, value in theirs.items()
        if key not in ours or _text_of(value) != _text_of(ours[key])
    }
    return sorted(keys)


def names_of_now(store: Store, commits: Commits) -> tuple[str, ...]:
    """Return the snapshots that hold the current step; empty if it is not committed, or unnamed."""
    if commits.committed != commits.step:
        return ()
    newest = (s.names for s in store.generations() if s.number == commits.generation)
    return next(newest, ())


def is_own(name: str) -> bool:
    """Return whether a snapshot was made for a reference, so that it may go with the reference."""
    return name.startswith(_PREFIXES)


def refuse_unknown(store: Store, name: str) -> None:
    """Raise OptionError, which lists the snapshots of ``store``, if ``name`` is none of them."""
    snapshots = [name for summary in store.generations() for name in summary.names]
    if name not in snapshots:
        message = (
            f"A reference to snapshot {name!r} was given, and {store.directories[0]} does not have"
            f" it: it has {', '.join(snapshots) or 'no snapshot at all'}. The checkpoint is of"
            " another dir=, or its snapshot was dropped: take another checkpoint, or resume() for"
            " the newest commit."
        )
        raise OptionError(message)
