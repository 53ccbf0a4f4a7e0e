"""Makes snapshot references, and goes on from them.

See [Note: Snapshot references] in checkpoint.snapshot_reference.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from tensorstow.base.errors import OptionError
from tensorstow.checkpoint import snapshot_reference
from tensorstow.checkpoint.commits import storage_of
from tensorstow.checkpoint.content import refuse_other_groups
from tensorstow.checkpoint.resume import refuse_other_rule
from tensorstow.optim import options
from tensorstow.optim.group_keys import check_keys
from tensorstow.optim.runtime import OptimizerRuntime
from tensorstow.step import validation
from tensorstow.step.step_plan import Groups
from tensorstow.store.rank_dirs import worlds_in

logger = logging.getLogger("tensorstow")


def make_reference(
    runtime: OptimizerRuntime, snapshot: Callable[[str], None], groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return a reference of the current state with ``groups``; ``snapshot`` makes its snapshot.

    Raises OptionError within a call of the optimizer, and on several ranks without a snapshot.
    """
    commits, store = runtime.commits, storage_of(runtime.params).store
    if runtime.call_lock.allows_reads:
        message = (
            "state_dict() was called by a function that the optimizer called, and a snapshot"
            " reference needs a commit. Leave it out of extra=, or use"
            ' checkpoints="full".'
        )
        raise OptionError(message)
    if _is_fresh(runtime):
        return snapshot_reference.reference_of(0, None, groups)
    alone, names = runtime.ranks.alone, snapshot_reference.names_of_now(store, commits)
    if alone:  # a snapshot of the user's may be dropped at any time
        names = tuple(filter(snapshot_reference.is_own, names))
    if not names:
        if not alone:
            message = (
                f"A snapshot reference of step {commits.step} was requested, and no snapshot holds"
                " that step. Call snapshot(name) on every rank first."
            )
            raise OptionError(message)
        names = (snapshot_reference.new_name(commits.step),)
        snapshot(names[0])
    return snapshot_reference.reference_of(commits.step, names[-1], groups)


def load_reference(
    runtime: OptimizerRuntime, state_dict: Mapping[str, Any], resume: Callable[[str], object]
) -> None:
    """Go on from the snapshot that a reference names, by ``resume``, and with its options.

    Raises, before anything is changed, DamageError for a reference that differs from what was
    saved, and OptionError for other groups, impossible options, or a snapshot that does not exist.
    """
    store = storage_of(runtime.params, "load_state_dict() of a snapshot reference").store
    saved, commits = snapshot_reference.read_reference(state_dict), runtime.commits
    name, groups = saved.snapshot, runtime.steps.contents.groups
    _check_groups(saved, groups)
    if name is None:
        if not _is_fresh(runtime):
            message = (
                "A snapshot reference of a run that had taken no step was given, and this optimizer"
                f" has taken {commits.step}. Make a new optimizer in an empty directory."
            )
            raise OptionError(message)
    elif name not in snapshot_reference.names_of_now(store, commits):
        if runtime.ranks.alone and len(worlds_in(store.directories[0])) == 1:
            snapshot_reference.refuse_unknown(store, name)
        resume(name)
    _log_difference(saved, groups)
    loaded = options.with_own_flags(saved.groups, groups)
    for group, new in zip(groups, loaded, strict=True):
        group.update(new)


def _check_groups(saved: snapshot_reference.SnapshotReference, groups: Groups) -> None:
    refuse_other_groups("The snapshot reference", len(saved.groups), len(groups))
    for loaded, group in zip(saved.groups, groups, strict=True):
        validation.check_hyper({**group, **loaded})
        if not saved.has_digest:
            check_keys(loaded, group.keys())
    merged = [{**group, **loaded} for loaded, group in zip(saved.groups, groups, strict=True)]
    refuse_other_rule("The snapshot reference", merged, groups)


def _log_difference(saved: snapshot_reference.SnapshotReference, groups: Groups) -> None:
    """Log that the options of a reference are not those of ``groups``, those of its snapshot."""
    if keys := snapshot_reference.differing_keys(
        options.with_own_flags(saved.groups, groups), groups
    ):
        logger.log(
            # With a digest it is sure that these are of the reference's moment.
            logging.INFO if saved.has_digest else logging.WARNING,
            "The reference to snapshot %s has other options than the optimizer at that step (%s),"
            " as after the step of a schedule: the reference's are used",
            saved.snapshot,
            ", ".join(keys),
        )


def _is_fresh(runtime: OptimizerRuntime) -> bool:
    """Return whether there is nothing to commit: no step, and no states that were loaded."""
    return runtime.commits.step == 0 and not runtime.steps.contents.states
