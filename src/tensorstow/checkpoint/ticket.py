"""Tickets: state dicts that name a snapshot of the run's directory instead of copying states.

[Note: Tickets] Trainers save ``optimizer.state_dict()`` at each checkpoint and load it whole:
twelve bytes per parameter in host memory, under DDP on every device. With ``checkpoints="ticket"``
a state dict has the parameter groups, no states, and the name of a snapshot, which is made before
the state dict is returned: a ticket that was saved names what is durable. It consists of numbers,
strings and lists, so ``torch.load(weights_only=True)`` takes it. The name is unique, so that a
directory that has it is the ticket's. Before the first step there is nothing to name. Loading a
ticket of what the optimizer has reads nothing: wrappers load at once what they have just asked for.
"""

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from tensorstow.base.errors import OptionError
from tensorstow.checkpoint.commits import Commits
from tensorstow.store.store import Store

KEY = "tensorstow"
FORMAT = 1
PREFIX = "ticket-"
"""Of the names of snapshots that were made for a ticket."""
_NOTE = (
    "The optimizer states are in the run's directory (dir=), in the snapshot of this name: they are"
    " not lost, and not in this file."
)


def ticket_of(step: int, snapshot: str | None) -> dict[str, Any]:
    """Return a ticket; ``snapshot`` None: of a run that has taken no step."""
    return {"format": FORMAT, "step": step, "snapshot": snapshot, "note": _NOTE}


def new_name(step: int) -> str:
    """Return a name for a snapshot that no other run has."""
    return f"{PREFIX}{step}-{uuid4().hex[:12]}"


def is_ticket(state_dict: Mapping[str, Any]) -> bool:
    """Return whether a state dict names a snapshot instead of holding states."""
    return KEY in state_dict


def snapshot_named_by(state_dict: Mapping[str, Any]) -> str | None:
    """Return the snapshot that a ticket names; None if its run had taken no step.

    Args:
        state_dict: What ``state_dict()`` of an optimizer with ``checkpoints="ticket"`` returned.

    Returns:
        The name.

    Raises:
        OptionError: No ticket, or one of a newer version.
    """
    ticket = state_dict.get(KEY)
    if not isinstance(ticket, dict) or ticket.get("format") != FORMAT:
        message = (
            f"A state dict with {KEY}={ticket!r} was given: a ticket of format {FORMAT} was"
            " expected. Load it with the version that saved it."
        )
        raise OptionError(message)
    name = ticket["snapshot"]
    return None if name is None else str(name)


def names_of_now(store: Store, commits: Commits) -> tuple[str, ...]:
    """Return the snapshots that hold the current step; empty if it is not committed, or unnamed."""
    if commits.committed != commits.step:
        return ()
    newest = (s.names for s in store.generations() if s.number == commits.generation)
    return next(newest, ())


def is_own(name: str) -> bool:
    """Return whether a snapshot was made for a ticket, so that it may go with the ticket."""
    return name.startswith(PREFIX)


def refuse_unknown(store: Store, name: str) -> None:
    """Raise OptionError, naming the snapshots that are there, if ``name`` is none of them."""
    there = [name for summary in store.generations() for name in summary.names]
    if name not in there:
        message = (
            f"A ticket of snapshot {name!r} was given, and {store.directories[0]} does not have it:"
            f" it has {', '.join(there) or 'no snapshot at all'}. The checkpoint is of another"
            " dir=, or its snapshot was dropped: take another checkpoint, or resume() for the"
            " newest commit."
        )
        raise OptionError(message)
