"""Reduces gradients of whole parameters beside backward: a bucket per unit, in one order.

[Note: Buckets] A bucket has the trained parameters of a unit, of one dtype. When the last of their
gradients is there, they are copied to one run of memory and reduced, without waiting. All buckets
are reduced in every backward, in an order that no rank's backward decides: a bucket waits for those
before it, and what still lacks gradients when backward ends is reduced then. So ranks that use
other parameters, or use them in another order, still meet. A number beside each gradient tells
whether any rank had one: where none had, ``.grad`` stays None and the parameter is not updated; a
rank that alone has none adds zeros.

Reentrant checkpointing runs backward inside of backward, so that a parameter may get one more
gradient when its bucket is under way. The last bucket is reduced at the end, with a number that
says whether any rank has such gradients: then all buckets are reduced once more.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tensorstow.base.errors import OptionError
from tensorstow.tensors.dtensor import rows_of_rank, rows_per_rank, set_gradient
from tensorstow.tensors.shares import RankShare, is_unreduced, mark_unreduced, share_of

_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""By its name of torch 2.13, or the one before."""
_REDUCED_BEFORE = (
    "A backward whose gradients are not reduced came behind one of the same step whose gradients"
    " were: let all but the last backward of a step be in no_sync(), or none."
)
_engine: Any = torch.autograd.Variable._execution_engine  # noqa: SLF001


def share_in(parameter: torch.Tensor) -> RankShare:
    """Return this rank's share of a parameter that has one."""
    share = share_of(parameter)
    if share is None:
        message = f"A parameter of shape {tuple(parameter.shape)} has no share of this rank's."
        raise TypeError(message)
    return share


class RowLayout:
    """Where parameters' rows are in one run of memory: for each rank the padded rows of each."""

    def __init__(self, parameters: Sequence[torch.Tensor], mesh: DeviceMesh) -> None:
        """Lay out ``parameters``, which are cut over the last dimension of ``mesh``."""
        self.parameters = parameters
        self.ranks, self.rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
        self.starts: list[int] = []
        self.length = 0
        """Elements of one rank."""
        for parameter in parameters:
            self.starts.append(self.length)
            self.length += self._padded(parameter)

    def _padded(self, parameter: torch.Tensor) -> int:
        if parameter.ndim == 0:
            return 1
        return rows_per_rank(parameter.shape[0], self.ranks) * parameter[:1].numel()

    def rows(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a rank's rows of ``whole``, which is like a parameter: a view."""
        if whole.ndim == 0:
            return whole  # every rank updates it
        start, stop = rows_of_rank(whole.shape[0], rank, self.ranks)
        return whole[start:stop]

    def place(self, index: int, run: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return the part of one rank's ``run`` that is for rows of the parameter ``index``.

        Args:
            index: The parameter's.
            run: ``length`` elements.
            like: The rank's rows.
        """
        at = self.starts[index]
        return run[at : at + like.numel()].view(like.shape)


class Bucket:
    """The gradients of one unit's parameters, until they are reduced."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], mesh: DeviceMesh, dtype: torch.dtype
    ) -> None:
        """Reduce over all of ``mesh`` in ``dtype``."""
        self.layout = RowLayout(parameters, mesh)
        self.parameters = parameters
        self._index = {id(p): i for i, p in enumerate(parameters)}
        self._mesh, self._dtype = mesh, dtype
        self._given: dict[int, torch.Tensor] = {}
        self._own: torch.Tensor | None = None
        self._work: Any = None
        self._source: torch.Tensor | None = None
        self.more_follows = False
        """Whether any rank that launched the last reduction said so."""

    @property
    def has_some(self) -> bool:
        """Whether a parameter has a gradient that is not under way."""
        return bool(self._given)

    @property
    def is_complete(self) -> bool:
        """Whether every parameter has its gradient."""
        return len(self._given) == len(self.parameters)

    def take(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Take a parameter's gradient of this rank, unreduced."""
        index = self._index[id(parameter)]
        before = self._given.get(index)  # of a graph within this one
        self._given[index] = gradient if before is None else before.float() + gradient

    def launch(self, *, more_follows: bool = False) -> None:
        """Begin the reduction of what there is, with zeros for the rest.

        Args:
            more_follows: What to tell other ranks.
        """
        layout, count = self.layout, len(self.parameters)
        device = self.parameters[0].device
        shape = (layout.ranks, layout.length + count + 1)
        source = torch.zeros(shape, dtype=self._dtype, device=device)
        for index, gradient in self._given.items():
            for rank in range(layout.ranks):
                rows = layout.rows(gradient, rank)
                layout.place(index, source[rank], rows).copy_(rows)
            source[:, layout.length + index] = 1.0
        source[:, -1] = float(more_follows)
        self._given.clear()
        before, _ = self._divisors()
        if before != 1:
            source.div_(before)
        mesh, op = self._mesh, self._operation()
        self._source = source
        if layout.ranks > 1:
            self._own = torch.empty(shape[1], dtype=self._dtype, device=device)
            self._work = _reduce_scatter(
                self._own, source.view(-1), op, mesh.get_group(mesh.ndim - 1), async_op=True
            )
        else:
            self._own = source[0]
            self._work = dist.all_reduce(self._own, op, mesh.get_group(0), async_op=True)

    def finish(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Wait for the reduction; return this rank's rows of each gradient that any rank had."""
        own, self._own = self._own, None
        work, self._work = self._work, None
        if own is None or work is None:
            return []
        work.wait()
        self._source = None
        mesh = self._mesh
        if mesh.ndim > 1 and self.layout.ranks > 1:
            dist.all_reduce(own, self._operation(), mesh.get_group(0))
        _, behind = self._divisors()
        if behind != 1:
            own.div_(behind)
        *there, more = own[self.layout.length :].float().tolist()
        self.more_follows = more != 0.0
        found = []
        for index, parameter in enumerate(self.parameters):
            if there[index] == 0.0:
                continue
            mine = share_in(parameter).rows(parameter)
            rows = self.layout.place(index, own, mine)
            found.append((parameter, rows))
        return found

    def drop(self) -> None:
        """Forget the gradients, also those that are being reduced."""
        self._given.clear()
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        self._own = self._source = None

    def _divisors(self) -> tuple[int, int]:
        """Return what gradients are divided by before they are summed, and behind it.

        As FSDP2 does: fp16, which might overflow, by about the root of the number of ranks each
        time; other dtypes are averaged by the collective itself.
        """
        if self._dtype != torch.float16:
            return 1, 1
        ranks, before = self._mesh.size(), 1
        while ranks % before == 0 and ranks // before > before:
            before *= 2
        return before, ranks // before

    def _operation(self) -> Any:  # noqa: ANN401  # torch's
        return dist.ReduceOp.SUM if self._dtype == torch.float16 else dist.ReduceOp.AVG


class GradientReduction:
    """Hooks that reduce the gradients of whole parameters, each rank getting its share."""

    def __init__(
        self,
        units: Iterable[Sequence[nn.Parameter]],
        mesh: DeviceMesh,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        """Take the parameters of each unit in the order in which backward comes to them.

        Args:
            units: Parameters that have shares; the frozen ones are reduced once they are trained.
            mesh: (shard,) or (replicate, shard).
            reduce_dtype: What gradients are summed over ranks in; None: their own dtype.
        """
        self._units = [list(unit) for unit in units]
        self._mesh, self._reduce_dtype = mesh, reduce_dtype
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._accumulators: list[Any] = []
        """Autograd's nodes, which have the hooks: they would go with the last graph."""
        self._next = 0
        self._is_in_backward = False
        self._graph_task = -1
        self._sums: dict[int, torch.Tensor] = {}
        """Gradients of micro-batches before, set aside while autograd makes the next one's."""
        self.reduces = True
        """Whether the next backward's gradients are reduced, with those that wait unreduced."""
        for parameter in (p for unit in self._units for p in unit):
            if parameter.is_floating_point():
                self._hook(parameter)
        self.include_unfrozen()

    def include_unfrozen(self) -> None:
        """Make buckets that have the parameters that are trained by now."""
        trained = {id(p) for unit in self._units for p in unit if p.requires_grad}
        if trained <= self._bucket_of.keys():
            return
        known = set(self._bucket_of)
        self.buckets, self._bucket_of = [], {}
        for unit in self._units:
            by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
            for parameter in unit:
                if id(parameter) in known | trained:
                    by_dtype.setdefault(parameter.dtype, []).append(parameter)
            for dtype, parameters in by_dtype.items():
                bucket = Bucket(parameters, self._mesh, self._reduce_dtype or dtype)
                self.buckets.append(bucket)
                self._bucket_of |= {id(p): bucket for p in parameters}

    def _hook(self, parameter: Any) -> None:  # noqa: ANN401  # torch's hooks are not typed
        whom, itself = weakref.ref(parameter), weakref.ref(self)

        def before(_: object) -> None:
            tensor, alive = whom(), itself()
            if tensor is not None and alive is not None and tensor.grad is not None:
                alive._sums[id(tensor)] = tensor.grad  # noqa: SLF001  # its own
                tensor.grad = None

        def behind(tensor: torch.Tensor) -> None:
            alive = itself()
            if alive is not None:
                alive._take(tensor)  # noqa: SLF001

        is_trained = parameter.requires_grad
        parameter.requires_grad_(requires_grad=True)
        with torch.enable_grad():
            accumulator: Any = parameter.view_as(parameter).grad_fn.next_functions[0][0]
        # Of the node, not of the parameter: autograd.grad() calls those too, and accumulates not.
        accumulator.register_prehook(before)
        self._accumulators.append(accumulator)
        parameter.register_post_accumulate_grad_hook(behind)
        parameter.requires_grad_(requires_grad=is_trained)

    # --- in backward ---

    def begin(self) -> None:
        """Reduce at the end of the backward that runs, whether or not it has gradients here."""
        if not self._is_in_backward:
            self.include_unfrozen()
            self._is_in_backward, self._next = True, 0
            self._graph_task = torch._C._current_graph_task_id()  # noqa: SLF001
            _engine.queue_callback(self._end)

    @torch.no_grad()
    def _take(self, parameter: torch.Tensor) -> None:
        self.begin()
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        before = self._sums.get(id(parameter))
        if before is not None and not isinstance(before, DTensor):  # unreduced, or the user's
            gradient = before.float().add_(gradient)
            del self._sums[id(parameter)]
        if not self.reduces:
            if isinstance(before, DTensor):
                if before.to_local().any():
                    raise OptionError(_REDUCED_BEFORE)
                del self._sums[id(parameter)]  # zero_grad(set_to_none=False)
            wide = gradient.float() if self._reduce_dtype is not None else gradient
            set_gradient(parameter, wide)
            mark_unreduced(wide)
            return
        self._bucket_of[id(parameter)].take(parameter, gradient)
        # A backward inside of this one may come to a parameter again.
        if torch._C._current_graph_task_id() == self._graph_task:  # noqa: SLF001
            self._launch(lambda bucket: bucket.is_complete)

    def _launch(self, may_begin: Callable[[Bucket], bool]) -> None:
        """Begin those that may, in order, but for the last."""
        while self._next < len(self.buckets) - 1 and may_begin(self.buckets[self._next]):
            self.buckets[self._next].launch()
            self._next += 1

    def _reduce_rest(self) -> bool:
        """Reduce what is left; return whether there are gradients that came too late for it."""
        self._launch(lambda _: True)
        *rest, last = self.buckets
        last.launch(more_follows=any(bucket.has_some for bucket in rest))
        for bucket in self.buckets:
            for parameter, rows in bucket.finish():
                self._set(parameter, rows)
        self._next = 0
        return last.more_follows

    @torch.no_grad()
    def _end(self) -> None:
        """Reduce what is left: backward is over."""
        if self.reduces:
            self._take_waiting()
            while self._reduce_rest():
                pass
        self._put_back()
        self._is_in_backward = False

    def _take_waiting(self) -> None:
        """Let gradients wait no longer that had no part in the last micro-batch."""
        for bucket in self.buckets[self._next :]:
            for parameter in bucket.parameters:
                if parameter.grad is not None and is_unreduced(parameter.grad):
                    bucket.take(parameter, parameter.grad)
                    parameter.grad = None

    def _set(self, parameter: nn.Parameter, rows: torch.Tensor) -> None:
        before = self._sums.pop(id(parameter), None)
        if before is None:
            before = parameter.grad  # another rank's alone
        if before is not None:  # of micro-batches before, or set by the user
            share = share_in(parameter)
            own = before.to_local() if isinstance(before, DTensor) else share.rows(before)
            rows = own.float() + rows
        set_gradient(parameter, share_in(parameter).sharded(rows))

    def _put_back(self) -> None:
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                before = self._sums.pop(id(parameter), None)
                if before is not None and parameter.grad is None:
                    set_gradient(parameter, before)

    # --- between steps ---

    @property
    def has_unreduced(self) -> bool:
        """Whether a gradient waits to be reduced with the last micro-batch's."""
        given = [p.grad for bucket in self.buckets for p in bucket.parameters]
        return any(gradient is not None and is_unreduced(gradient) for gradient in given)

    def recover(self) -> bool:
        """Forget a backward that did not end; return whether there was one."""
        if not self._is_in_backward or torch._C._current_graph_task_id() != -1:  # noqa: SLF001
            return False
        for bucket in self.buckets:
            bucket.drop()
        self._sums.clear()
        self._is_in_backward = False
        return True
