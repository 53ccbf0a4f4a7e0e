"""Moves a run to another directory: copies what a resume needs, then commits there."""

from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tensorstow.base.errors import OptionError
from tensorstow.checkpoint.commits import Commits
from tensorstow.checkpoint.resume import resume
from tensorstow.checkpoint.run import Extra
from tensorstow.states.stored import StoreStorage
from tensorstow.step.param_table import ParamTable
from tensorstow.step.step_plan import Groups
from tensorstow.store.rank_dirs import refuse_other_worlds


def commit_to(
    directories: Sequence[Path],
    params: ParamTable,
    commits: Commits,
    groups: Groups,
    states: MutableMapping[torch.Tensor, dict[str, Any]],
    extra: Extra | None,
) -> None:
    """Commit the run to new ``directories`` and continue there.

    The old store is read through its open files, even if they were moved, and closed. Raises
    OptionError if ``directories`` hold a run. Nothing is changed before the commit is durable.
    """
    refuse_other_worlds(directories[0], commits.ranks.world)
    placement = replace(params.offload_policy.placement, directories=tuple(directories))
    offload_policy = commits.ranks.in_rank_directory(
        replace(params.offload_policy, placement=placement)
    )
    storage = StoreStorage(offload_policy.placement.directories, offload_policy.policy)
    try:
        _refuse_run(storage)
        generation = commits.commit_in(storage, params, groups, states, extra)
    except BaseException:
        storage.close()
        raise
    params.move_to(storage, offload_policy)
    # Not released: `move_to` has closed the store that they are in.
    commits.extents.forget()
    resume(generation, params, groups, states, commits.module)
    commits.resumed(generation, params)
    commits.was_given_extra |= extra is not None


def _refuse_run(storage: StoreStorage) -> None:
    if storage.store.generation() is not None:
        message = (
            f"A run was asked to go on in {storage.directories[0]}, and a run is committed there."
            " Name another directory (`tensorstow run clean` removes a dead run)."
        )
        raise OptionError(message)
