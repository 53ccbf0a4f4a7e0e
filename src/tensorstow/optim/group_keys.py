"""Checks the keys of parameter groups: a misspelled one would have no effect.

Users keep keys of their own in groups, so a name that is unlike all of ours is accepted.
"""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from tensorstow.base.errors import OptionError

_LIKE = 0.85
"""Similarity above which an unknown key is a typo: "weight_decya" is one, "lr_scale" is not."""
_OTHERS = ("params", "param_names", "initial_lr", "bias_correction", "ema")
_OF_ALL = frozenset(
    {
        "accumulation_steps",
        "checkpoints",
        "commit_every",
        "durability",
        "grad_dtype",
        "overlap",
        "ram_budget",
        "state_format",
        "states",
        "stop_signals",
        "update_on",
    }
)
"""Options of a whole optimizer, not of a group."""


def check_keys(group: Mapping[str, Any], keys: Collection[str]) -> None:
    """Raise OptionError for a misspelled one of ``keys``, or an option of whole optimizers."""
    taken = {*keys, *_OTHERS}
    for key in group:
        if key in taken:
            continue
        if key in _OF_ALL:
            message = (
                f"{key}={group[key]!r} was given in a parameter group: it is an option of the"
                f" whole optimizer, AdamW(groups, {key}=...). Remove it from the group."
            )
            raise OptionError(message)
        near = get_close_matches(key, taken, 1, _LIKE)
        if near:
            message = (
                f"A parameter group has {key}={group[key]!r}, which nothing reads: did you mean"
                f" {near[0]!r}? A key of your own needs a name that is less similar."
            )
            raise OptionError(message)
