"""Makes tickets of an optimizer, and goes on from them ([Note: Tickets] in checkpoint.ticket)."""

from collections.abc import Callable, Mapping
from typing import Any

from tensorstow.base.errors import OptionError
from tensorstow.checkpoint import ticket
from tensorstow.checkpoint.commits import storage_of
from tensorstow.checkpoint.content import refuse_other_groups
from tensorstow.optim import options
from tensorstow.optim.runtime import OptimizerRuntime


def make_ticket(runtime: OptimizerRuntime, snapshot: Callable[[str], None]) -> dict[str, Any]:
    """Return a ticket of the current state; ``snapshot`` makes the one that it names.

    Raises OptionError within a call of the optimizer, and to one of several ranks that have none.
    """
    commits, store = runtime.commits, storage_of(runtime.params).store
    if runtime.call_lock.allows_reads:
        message = (
            "state_dict() was called by a function that the optimizer called, and a ticket"
            ' needs a commit of its own. Leave it out of extra=, or use checkpoints="full".'
        )
        raise OptionError(message)
    if _is_fresh(runtime):
        return ticket.ticket_of(0, None)
    alone, names = runtime.ranks.alone, ticket.names_of_now(store, commits)
    if alone:  # a snapshot of the user's may be dropped at any time
        names = tuple(filter(ticket.is_own, names))
    if not names:
        if not alone:
            message = (
                f"A ticket of step {commits.step} was requested, and no snapshot holds that"
                " step. Call snapshot(name) on every rank first."
            )
            raise OptionError(message)
        names = (ticket.new_name(commits.step),)
        snapshot(names[0])
    return ticket.ticket_of(commits.step, names[-1])


def load_ticket(
    runtime: OptimizerRuntime, state_dict: Mapping[str, Any], resume: Callable[[str], object]
) -> None:
    """Go on from the snapshot that a ticket names, by ``resume``, and with the ticket's options.

    Raises OptionError for a ticket of other groups, or of a snapshot that is not there.
    """
    name, commits = ticket.snapshot_named_by(state_dict), runtime.commits
    store = storage_of(runtime.params, "load_state_dict() of a ticket").store
    groups = runtime.steps.contents.groups
    refuse_other_groups("The ticket", len(state_dict["param_groups"]), len(groups))
    if name is None:
        if not _is_fresh(runtime):
            message = (
                "A ticket of a run that had taken no step was given, and this optimizer has"
                f" taken {commits.step}. Make a new optimizer in an empty directory."
            )
            raise OptionError(message)
    elif name not in ticket.names_of_now(store, commits):
        if runtime.ranks.alone:
            ticket.refuse_unknown(store, name)
        resume(name)
    # A schedule may have changed them behind the commit.
    saved = options.with_own_flags(state_dict["param_groups"], groups)
    for group, loaded in zip(groups, saved, strict=True):
        group.update({k: v for k, v in loaded.items() if k != "params"})


def _is_fresh(runtime: OptimizerRuntime) -> bool:
    """Return whether there is nothing to commit: no step, and no states that were loaded."""
    return runtime.commits.step == 0 and not runtime.steps.contents.states
