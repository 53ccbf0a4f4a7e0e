"""Steps each sharded matrix whole on one rank, its owner, which alone keeps its states.

[Note: Owners] A class that is not elementwise needs whole matrices, and a rank has a shard of each.
Owners are chosen by bytes: the largest matrix first, to the rank that owns least. A step takes the
matrices in rounds. In a round the ranks send their parts of gradients and weights to the owners
(one all-to-all), every owner steps its matrices, and the owners send the new parts back (another).
Each owner's matrices of a round have at most the bytes of the largest matrix, which bounds the
memory. Owners and rounds follow from shapes alone, so all ranks have the same ones.

Ranks exchange bytes, not numbers: nothing is rounded or summed, and the bits are those of one rank
with the same gradients. An owner whose step fails sends that in place of its parts, and every rank
raises an error.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tensorstow.base.errors import OptionError, RankError
from tensorstow.optim.generic.exchange import OwnedMatrix, gather, scatter
from tensorstow.optim.generic.leaves import leaf_of, leaf_with_gradient
from tensorstow.optim.generic.piece_step import Job
from tensorstow.optim.generic.shared_values import SplitStep
from tensorstow.optim.generic.stepper import Stepper
from tensorstow.tensors.dtensor import groups_of, is_sharded, layout_of, numbers_of_ranks

_Value = TypeVar("_Value")
_FAILED = -1.0


@dataclass(frozen=True, eq=False, slots=True)
class Round:
    """Matrices that are stepped at the same time, each by its owner."""

    matrices: Sequence[OwnedMatrix]
    jobs: Sequence[Job]
    """This rank's matrices, in the same order; the parameter is in place of the leaf."""

    @contextmanager
    def gathered(self) -> Iterator[list[Job]]:
        """Gather the matrices at their owners; yield the jobs, and send the new weights after it.

        Collective. Raises RankError if another rank's block raised an error.
        """
        leaves = gather(self.matrices)
        jobs = [replace(job, leaf=leaf) for job, leaf in zip(self.jobs, leaves, strict=True)]
        try:
            yield jobs
        except Exception:  # an interrupt reaches the other ranks too, which may not come here
            # The other ranks wait in this exchange, and learn from it that the step failed.
            scatter(self.matrices, None)
            raise
        scatter(self.matrices, leaves)


@dataclass(eq=False, slots=True)
class MatrixOwners:
    """The owners of all parameters of an optimizer that are sharded and stepped whole."""

    _matrices: dict[int, OwnedMatrix] = field(default_factory=dict)
    _loads: dict[dist.ProcessGroup, list[int]] = field(default_factory=dict)
    """Bytes that each rank owns."""

    def assign(self, parameters: Iterable[torch.Tensor]) -> None:
        """Choose owners of sharded parameters that have none; every rank gives the same.

        Parameters that cannot be gathered get none: ``refuse_cut`` refuses them by name.
        """
        new = [p for p in parameters if id(p) not in self._matrices and groups_of(p)]
        new = [p for p in new if _can_be_gathered(p)]
        for parameter in sorted(new, key=lambda p: -p.numel() * p.element_size()):
            (group,) = groups_of(parameter)
            loads = self._loads.setdefault(group, [0] * dist.get_world_size(group))
            owner = loads.index(min(loads))
            matrix = OwnedMatrix(
                parameter, parameter.shape, parameter.dtype, group, _cut(parameter), owner
            )
            loads[owner] += matrix.nbytes
            self._matrices[id(parameter)] = matrix

    def find(self, parameter: torch.Tensor) -> OwnedMatrix | None:
        """Return the matrix of ``parameter``; None: this rank steps its own elements of it."""
        return self._matrices.get(id(parameter))

    def is_elsewhere(self, parameter: torch.Tensor) -> bool:
        """Return whether another rank steps ``parameter``."""
        matrix = self.find(parameter)
        return matrix is not None and not matrix.is_here

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Return the groups of ranks that have matrices, in the same order on every rank."""
        return list(self._loads)

    def agreed(self, act: Callable[[], _Value]) -> _Value:
        """Return what ``act`` returns if all ranks are to step the same matrices; collective.

        Raises RankError if ``act`` raises an error on another rank, or ranks have gradients of
        different matrices; nothing was changed.
        """
        if not self._matrices:
            return act()
        failure: Exception | None = None
        try:
            result = act()
        except Exception as error:  # noqa: BLE001  # it is raised below
            failure = error
        # A rank that failed takes part too: the others wait for its numbers.
        for group in self.groups:
            matrices = [m for m in self._matrices.values() if m.group is group]
            codes = [_FAILED if failure else _gradient_code(m) for m in matrices]
            by_rank = numbers_of_ranks(group, codes)
            if failure is None:
                _refuse_different(matrices, by_rank)
        if failure is not None:
            raise failure
        return result

    def rounds(self, matrices: Sequence[OwnedMatrix], jobs: Mapping[int, Job]) -> list[Round]:
        """Return the rounds of a step; ``jobs``: those of this rank, by ``id(parameter)``."""
        rounds: list[Round] = []
        for group in self.groups:
            queues: dict[int, list[OwnedMatrix]] = {}
            for matrix in sorted(matrices, key=lambda m: -m.nbytes):
                if matrix.group is group:
                    queues.setdefault(matrix.owner, []).append(matrix)
            limit = max((queue[0].nbytes for queue in queues.values()), default=0)
            while any(queues.values()):
                taken = [m for owner in sorted(queues) for m in _take(queues[owner], limit)]
                local = [jobs[id(m.parameter)] for m in taken if m.is_here]
                rounds.append(Round(taken, local))
        return rounds


def _can_be_gathered(parameter: torch.Tensor) -> bool:
    placements: tuple[Any, ...] = tuple(getattr(layout_of(parameter), "placements", ()))
    is_summed = any(p.is_partial() or hasattr(p, "split_factor") for p in placements)
    return len(groups_of(parameter)) == 1 and not is_summed


def refuse_cut(stepper: Stepper, parameter: torch.Tensor, name: str) -> None:
    """Raise OptionError for a sharded parameter that cannot be gathered, or begin elsewhere."""
    groups, class_name = groups_of(parameter), stepper.optimizer_class.__name__
    if not groups:
        return
    if stepper.begins_with_states:
        message = (
            f"{class_name} creates its states in its constructor, and {name} of shape"
            f" {tuple(parameter.shape)} is sharded: its elements are gathered in step() alone. Use"
            " a class that creates them in its first step, one rank, or stage 0."
        )
        raise OptionError(message)
    if not _can_be_gathered(parameter):
        placements = getattr(layout_of(parameter), "placements", ())
        message = (
            f"{class_name} is not known to be elementwise, and {name} of shape"
            f" {tuple(parameter.shape)} is sharded as {placements}: a matrix is gathered from the"
            " ranks of one mesh dimension. Use an elementwise class (SGD, Adagrad, RMSprop, ...),"
            " or shard it over one dimension of the mesh."
        )
        raise OptionError(message)
    if not leaf_of(parameter).is_contiguous():
        message = (
            f"{name} (shape {tuple(parameter.shape)}) is sharded and not contiguous, and"
            f" {class_name} steps it gathered, in the order of its dimensions:"
            " model.to(memory_format=torch.contiguous_format)."
        )
        raise OptionError(message)


def exchange_values(step: SplitStep, rounds: Sequence[Round]) -> None:
    """Give every rank the values over all parameters that any rank's runs changed; collective."""
    for group in dict.fromkeys(r.matrices[0].group for r in rounds):
        changed: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(changed, step.changed(), group=group)
        for values in changed:
            step.adopt(values)


def whole_states(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved entry with whole tensors; collective over the ranks of its DTensors."""
    return {
        key: value.full_tensor() if isinstance(value, torch.Tensor) and is_sharded(value) else value
        for key, value in entry.items()
    }


def _cut(parameter: torch.Tensor) -> int:
    """Return the dimension along which the ranks' parts follow one another."""
    layout = layout_of(parameter)
    placements: tuple[Any, ...] = tuple(getattr(layout, "placements", ()))
    mesh: Any = getattr(layout, "device_mesh", None)
    cuts = [p.dim for i, p in enumerate(placements) if not p.is_replicate() and mesh.size(i) > 1]
    dim: int = cuts[0]
    return dim


def _take(queue: list[OwnedMatrix], limit: int) -> Iterator[OwnedMatrix]:
    room = limit
    while queue and queue[0].nbytes <= room:
        room -= queue[0].nbytes
        yield queue.pop(0)


# --- what ranks must have in common ---

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _gradient_code(matrix: OwnedMatrix) -> float:
    """Return 0 for a parameter without a gradient, and else a number for the gradient's dtype."""
    leaf = leaf_with_gradient(matrix.parameter)
    if leaf is None or leaf.grad is None:
        return 0.0
    dtype = leaf.grad.dtype
    return 1.0 + (_DTYPES.index(dtype) if dtype in _DTYPES else len(_DTYPES))


def _refuse_different(matrices: Sequence[OwnedMatrix], by_rank: Sequence[list[float]]) -> None:
    for rank, codes in enumerate(by_rank):
        if _FAILED in codes:
            message = (
                f"step() raised an error on rank {rank} of the ranks that share parameters, before"
                " anything changed: that rank has the traceback."
            )
            raise RankError(message)
        for matrix, code, first in zip(matrices, codes, by_rank[0], strict=False):
            if code != first:
                message = (
                    f"step() was called with gradients that differ between ranks: rank {rank} and"
                    f" rank 0 do not both have one, of one dtype, of a parameter of shape"
                    f" {tuple(matrix.shape)}. A matrix is stepped whole, by the parts of all ranks:"
                    " give each rank's part a gradient, or none."
                )
                raise RankError(message)
