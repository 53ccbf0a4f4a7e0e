"""State dicts of Adam: loads states past torch, which would cast them; makes and loads references.

See [Note: Snapshot references] in checkpoint.snapshot_reference.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from tensorstow.base.errors import OptionError
from tensorstow.checkpoint import snapshot_reference
from tensorstow.checkpoint.commits import storage_of
from tensorstow.checkpoint.content import refuse_other_groups
from tensorstow.checkpoint.resume import refuse_other_rule
from tensorstow.optim import options
from tensorstow.optim.runtime import OptimizerRuntime
from tensorstow.optim.step_runner import ParamFilter
from tensorstow.states.layout import OptionalStates
from tensorstow.step import validation
from tensorstow.step.managed_param import in_order_of
from tensorstow.step.step_plan import Groups, as_step, step_of
from tensorstow.store.rank_dirs import worlds_in
from tensorstow.tensors.dtensor import part_of

logger = logging.getLogger("tensorstow")


class StateLoad:
    """One ``load_state_dict`` under way, and the states that are kept back from torch."""

    def __init__(self, runtime: OptimizerRuntime, param_filter: ParamFilter) -> None:
        """Begin with no states kept back; ``param_filter`` decides which parameters have some."""
        self._runtime = runtime
        self._filter = param_filter
        self._kept: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def keep_tensors_back(self, optimizer: Optimizer, full: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict with step counts only; the last hook before torch's own loading.

        Raises OptionError for states that do not fit their parameters, or impossible options.
        """
        options.check_state_dict(full)
        contents = self._runtime.steps.contents
        for group, loaded in zip(contents.groups, full["param_groups"], strict=False):
            validation.check_hyper({**group, **loaded})
        saved = [(key, g) for g in full["param_groups"] for key in g["params"]]
        owner = dict(zip((key for key, _ in saved), contents.parameters(), strict=False))
        # Groups that lack an option get the default of this optimizer.
        optional = {key: OptionalStates.of({**optimizer.defaults, **g}) for key, g in saved}
        light = dict(full["state"])
        for key, entry in full["state"].items():
            if entry and key in owner and self._filter.manages(owner[key]):
                name = f"Parameter {key}"
                validation.check_saved(entry, owner[key], name, optional[key])
                # Raises an error where the format has no place for the states of the saved group.
                self._runtime.params.offload_policy.family(owner[key].dtype, optional[key]).check()
                self._kept[owner[key]] = entry
                light[key] = {"step": as_step(entry["step"])}
        groups = options.with_own_flags(full["param_groups"], contents.groups)
        return {**full, "state": light, "param_groups": groups}

    def put_tensors_in_place(self, optimizer: Optimizer) -> None:
        """Load the states that were kept back; the first hook after torch's own loading."""
        self._put(optimizer.state)
        self._runtime.commits.saved = None
        self._runtime.is_half_loaded = False
        self._runtime.call_lock.allows_reads = True  # for users' hooks

    def _put(self, entries: dict[torch.Tensor, Any]) -> None:
        params, contents = self._runtime.params, self._runtime.steps.contents
        optional = {id(p): OptionalStates.of(g) for g in contents.groups for p in g["params"]}
        if params.differ(optional):
            params.renew()  # the saved groups have another amsgrad or ema: other states exist
        self._runtime.steps.attach(
            p for p in contents.parameters() if validation.is_to_be_trained(p) or p in self._kept
        )
        managed = [(params.get(parameter), entry) for parameter, entry in self._kept.items()]
        # Parameters without a saved state begin anew: ``put`` makes states that are not named zero.
        states: dict[int, dict[str, torch.Tensor]] = {m.number: {} for m in params.all()}
        for param, entry in managed:
            states[param.number] = {
                k: in_order_of(param, part_of(v, param.owner, f"The saved {k!r}"))
                for k, v in entry.items()
                if k != "step"
            }
        params.store.put(states)
        for param in params.all():
            param.written = None  # compared with its master at the next update
        for param, entry in managed:
            param.begun = False
            entries[param.owner] = {"step": as_step(entry["step"]), **param.views}
            step_of(param, entries[param.owner], params.store)


# --- snapshot references ---


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
            options.check_keys(loaded, group.keys())
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
