"""Reduces gradients of whole parameters during backward: a bucket per unit, in one order.

[Note: Buckets] A bucket has the trained parameters of a unit, of one dtype. When the last of their
gradients is ready, they are copied to one run of memory and reduced, without waiting. All buckets
are reduced in every backward, in a fixed order: a bucket waits for those before it, and a bucket
that still lacks gradients when backward ends is reduced then. So ranks that use other parameters,
or use them in another order, still take part in the same collectives. A number next to each
gradient shows whether any rank had one. If none had, ``.grad`` stays None and the parameter is not
updated. If some had, the other ranks add zeros.

Reentrant checkpointing runs backward within backward, so that a parameter may get one more gradient
when its bucket is being reduced. The last bucket is reduced at the end, with a number that shows
whether any rank has such gradients: then all buckets are reduced once more.

With ``ordered_reduce`` ranks exchange the rows of a bucket unsummed, and each rank adds them to
``.grad``, rank 0's first ([Note: Order of micro-batches] in ordered_reduce).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tensorstow.base.errors import OptionError
from tensorstow.fsdp.ordered_reduce import TWICE, UNREDUCED
from tensorstow.tensors.dtensor import rows_of_rank, rows_per_rank, set_gradient
from tensorstow.tensors.shares import RankShare, is_unreduced, mark_unreduced, share_of

_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""The collective by its name in torch 2.13, or by the older one."""
_REDUCED_BEFORE = (
    "A backward whose gradients are not reduced came after one of the same step whose gradients"
    " were: call all but the last backward of a step in no_sync(), or none."
)
_engine: Any = torch.autograd.Variable._execution_engine  # noqa: SLF001


def share_in(parameter: torch.Tensor) -> RankShare:
    """Return this rank's share of a parameter; raise TypeError if it has none."""
    share = share_of(parameter)
    if share is None:
        message = f"A parameter of shape {tuple(parameter.shape)} has no share of this rank's."
        raise TypeError(message)
    return share


class RowLayout:
    """The layout of parameters' rows in one run of memory: by rank, the padded rows of each."""

    def __init__(self, parameters: Sequence[torch.Tensor], mesh: DeviceMesh) -> None:
        """Lay out ``parameters``, which are sharded over the last dimension of ``mesh``."""
        self.parameters = parameters
        self.ranks, self.rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
        self.starts: list[int] = []
        self.length = 0
        """The number of elements of one rank."""
        for parameter in parameters:
            self.starts.append(self.length)
            self.length += self._padded(parameter)

    def _padded(self, parameter: torch.Tensor) -> int:
        if parameter.ndim == 0:
            return 1
        return rows_per_rank(parameter.shape[0], self.ranks) * parameter[:1].numel()

    def rows(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a view of a rank's rows of ``whole``, which has the shape of a parameter."""
        if whole.ndim == 0:
            return whole  # every rank updates it
        start, stop = rows_of_rank(whole.shape[0], rank, self.ranks)
        return whole[start:stop]

    def place(self, index: int, run: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return the part of one rank's ``run`` that is for its rows of the parameter ``index``."""
        at = self.starts[index]
        return run[at : at + like.numel()].view(like.shape)


@dataclass(frozen=True, slots=True)
class Reduction:
    """How gradients of several ranks become one."""

    dtype: torch.dtype | None = None
    """The dtype of sums over ranks; None: the dtype of the gradients."""
    is_ordered: bool = False
    """Whether ranks' gradients are added one by one, in the order of ranks."""
    averages: bool = True
    """Whether the sum is divided by the number of ranks."""


class Bucket:
    """The gradients of one unit's parameters, until they are reduced."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        mesh: DeviceMesh,
        reduction: "Reduction",
    ) -> None:
        """Reduce over all of ``mesh``, in the gradients' dtype if ``reduction`` names none."""
        self.layout = RowLayout(parameters, mesh)
        self.parameters = parameters
        self._index = {id(p): i for i, p in enumerate(parameters)}
        self._mesh, self._reduction = mesh, reduction
        self._dtype = reduction.dtype or parameters[0].dtype
        self._gradients: dict[int, torch.Tensor] = {}
        self._reduced: torch.Tensor | None = None
        self._work: Any = None
        self._source: torch.Tensor | None = None
        self.more_follows = False
        """Whether any rank passed ``more_follows`` to the last reduction."""

    @property
    def has_some(self) -> bool:
        """Whether a parameter has a gradient that is not being reduced."""
        return bool(self._gradients)

    @property
    def is_complete(self) -> bool:
        """Whether every parameter has its gradient."""
        return len(self._gradients) == len(self.parameters)

    def take(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Take a parameter's gradient of this rank, unreduced."""
        index = self._index[id(parameter)]
        before = self._gradients.get(index)  # the gradient of a graph within this one
        self._gradients[index] = gradient if before is None else before.float() + gradient

    def launch(self, *, more_follows: bool = False) -> None:
        """Begin reducing the gradients, with zeros for parameters without one.

        ``more_follows``: this rank has gradients for another reduction; it is sent to all ranks.
        """
        layout, count = self.layout, len(self.parameters)
        device = self.parameters[0].device
        # Flags follow each rank's rows: one for each gradient, and one for ``more_follows``.
        shape = (layout.ranks, layout.length + count + 1)
        source = torch.zeros(shape, dtype=self._dtype, device=device)
        for index, gradient in self._gradients.items():
            for rank in range(layout.ranks):
                rows = layout.rows(gradient, rank)
                layout.place(index, source[rank], rows).copy_(rows)
            source[:, layout.length + index] = 1.0
        source[:, -1] = float(more_follows)
        self._gradients.clear()
        before, _ = self._divisors()
        if before != 1:
            source.div_(before)
        mesh, op = self._mesh, self._operation()
        # The collective reads this memory until finish() or drop() has waited for it.
        self._source = source
        if self._reduction.is_ordered:
            self._reduced = torch.empty_like(source)
            group = mesh.get_group(mesh.ndim - 1)
            self._work = dist.all_to_all_single(self._reduced, source, group=group, async_op=True)
        elif layout.ranks > 1:
            self._reduced = torch.empty(shape[1], dtype=self._dtype, device=device)
            self._work = _reduce_scatter(
                self._reduced, source.view(-1), op, mesh.get_group(mesh.ndim - 1), async_op=True
            )
        else:
            # All ranks are replicas: each has the whole, and there is nothing to scatter.
            self._reduced = source[0]
            self._work = dist.all_reduce(self._reduced, op, mesh.get_group(0), async_op=True)

    def finish(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Wait for the reduction; yield what is to be added to gradients, in order.

        That is this rank's rows of the mean over ranks, or, in order, of each rank's part of it.
        Gradients that no rank had, and parts of ranks without one, are left out.
        """
        reduced, self._reduced = self._reduced, None
        work, self._work = self._work, None
        if reduced is None or work is None:
            return
        work.wait()
        self._source = None
        mesh = self._mesh
        if mesh.ndim > 1 and self.layout.ranks > 1:
            dist.all_reduce(reduced, self._operation(), mesh.get_group(0))
        _, after = self._divisors()
        if after != 1:
            reduced.div_(after)
        by_rank = reduced.view(-1, self.layout.length + len(self.parameters) + 1)
        *had_gradient, more = by_rank[:, self.layout.length :].float().T.tolist()
        self.more_follows = any(more)
        for index, parameter in enumerate(self.parameters):
            mine = share_in(parameter).rows(parameter)
            for part, had in zip(by_rank, had_gradient[index], strict=True):
                # Flags are reduced like gradients: any rank's flag leaves a number above 0.
                if had != 0.0:
                    yield parameter, self.layout.place(index, part, mine)

    def drop(self) -> None:
        """Drop the gradients, including those that are being reduced."""
        self._gradients.clear()
        work, self._work = self._work, None
        if work is not None:
            # The collective may still use the memory that is freed next.
            work.wait()
        self._reduced = self._source = None

    def _divisors(self) -> tuple[int, int]:
        """Return the divisors of gradients before and after they are summed.

        Without an order they are those of FSDP2: about the root of the number of ranks each time
        for fp16, which might overflow, and 1 for other dtypes, which the collective averages.
        """
        if self._reduction.is_ordered:
            return (self.layout.ranks if self._reduction.averages else 1), 1
        if self._dtype != torch.float16:
            return 1, 1
        ranks, before = self._mesh.size(), 1
        while ranks % before == 0 and ranks // before > before:
            before *= 2
        return before, ranks // before

    def _operation(self) -> Any:  # noqa: ANN401  # torch's
        return dist.ReduceOp.SUM if self._dtype == torch.float16 else dist.ReduceOp.AVG


class GradientReduction:
    """Hooks that reduce the gradients of whole parameters; each rank gets its share."""

    def __init__(
        self,
        units: Iterable[Sequence[nn.Parameter]],
        mesh: DeviceMesh,
        reduction: Reduction,
    ) -> None:
        """Register hooks on the parameters of units, which are in the order of backward.

        Args:
            units: Parameters that have shares; frozen ones are reduced once they are trained.
            mesh: (shard,) or (replicate, shard).
            reduction: How they are reduced.
        """
        self._units = [list(unit) for unit in units]
        self._mesh, self._reduction = mesh, reduction
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._accumulators: list[Any] = []
        """Autograd's nodes, which have the hooks: the last graph would free them."""
        self._next = 0
        self._is_in_backward = False
        self._graph_task = -1
        self._sums: dict[int, torch.Tensor] = {}
        """Gradients of earlier micro-batches, set aside while autograd computes the next ones."""
        self.reduces = True
        """Whether the next backward reduces its gradients and those that are unreduced."""
        for parameter in (p for unit in self._units for p in unit):
            if parameter.is_floating_point():
                self._hook(parameter)
        self.include_unfrozen()

    def include_unfrozen(self) -> None:
        """Make buckets with the parameters that are trained now."""
        trained = {id(p) for unit in self._units for p in unit if p.requires_grad}
        if trained <= self._bucket_of.keys():
            return
        included = set(self._bucket_of)
        self.buckets, self._bucket_of = [], {}
        for unit in self._units:
            by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
            for parameter in unit:
                if id(parameter) in included | trained:
                    by_dtype.setdefault(parameter.dtype, []).append(parameter)
            for parameters in by_dtype.values():
                bucket = Bucket(parameters, self._mesh, self._reduction)
                self.buckets.append(bucket)
                self._bucket_of |= {id(p): bucket for p in parameters}

    def _hook(self, parameter: Any) -> None:  # noqa: ANN401  # torch's hooks are not typed
        # Weak: this object has autograd's nodes, and these have the hooks.
        parameter_ref, self_ref = weakref.ref(parameter), weakref.ref(self)

        def before(_: object) -> None:
            tensor, alive = parameter_ref(), self_ref()
            if tensor is not None and alive is not None and tensor.grad is not None:
                alive._sums[id(tensor)] = tensor.grad  # noqa: SLF001  # its own
                tensor.grad = None

        def after(tensor: torch.Tensor) -> None:
            alive = self_ref()
            if alive is not None:
                alive._take(tensor)  # noqa: SLF001

        # Only a parameter that requires a gradient has an accumulation node and takes hooks.
        is_trained = parameter.requires_grad
        parameter.requires_grad_(requires_grad=True)
        with torch.enable_grad():
            accumulator: Any = parameter.view_as(parameter).grad_fn.next_functions[0][0]
        # On the node: autograd.grad() also calls a parameter's own hooks, and accumulates nothing.
        accumulator.register_prehook(before)
        self._accumulators.append(accumulator)
        parameter.register_post_accumulate_grad_hook(after)
        parameter.requires_grad_(requires_grad=is_trained)

    # --- during backward ---

    def begin(self) -> None:
        """Reduce at the end of the running backward, even if it computes no gradients here."""
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
        if before is not None and not isinstance(before, DTensor):  # unreduced, or set by the user
            gradient = before.float().add_(gradient)
            del self._sums[id(parameter)]
        if not self.reduces:
            if self._reduction.is_ordered:
                raise OptionError(UNREDUCED)
            if isinstance(before, DTensor):
                if before.to_local().any():
                    raise OptionError(_REDUCED_BEFORE)
                del self._sums[id(parameter)]  # zero_grad(set_to_none=False)
            wide = gradient.float() if self._reduction.dtype is not None else gradient
            set_gradient(parameter, wide)
            mark_unreduced(wide)
            return
        self._bucket_of[id(parameter)].take(parameter, gradient)
        # A backward inside of this one may come to a parameter again.
        if torch._C._current_graph_task_id() == self._graph_task:  # noqa: SLF001
            self._launch(lambda bucket: bucket.is_complete)

    def _launch(self, may_begin: Callable[[Bucket], bool]) -> None:
        """Launch buckets in order while ``may_begin`` allows it, except the last."""
        while self._next < len(self.buckets) - 1 and may_begin(self.buckets[self._next]):
            self.buckets[self._next].launch()
            self._next += 1

    def _reduce_rest(self) -> bool:
        """Reduce the remaining buckets; return whether gradients came too late for their bucket."""
        # The last bucket alone can say whether more follows, so all others go before it.
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
        """Reduce the remaining buckets at the end of backward."""
        if self.reduces:
            self._take_waiting()
            while self._reduce_rest():
                if self._reduction.is_ordered:
                    raise OptionError(TWICE)
        self._put_back()
        self._is_in_backward = False

    def _take_waiting(self) -> None:
        """Take unreduced gradients of parameters that the last micro-batch did not use."""
        for bucket in self.buckets[self._next :]:
            for parameter in bucket.parameters:
                if parameter.grad is not None and is_unreduced(parameter.grad):
                    bucket.take(parameter, parameter.grad)
                    parameter.grad = None

    def _set(self, parameter: nn.Parameter, rows: torch.Tensor) -> None:
        before = self._sums.pop(id(parameter), None)
        if before is None:
            before = parameter.grad  # only other ranks have a gradient of this backward
        if before is not None:  # from earlier micro-batches, or set by the user
            share = share_in(parameter)
            earlier = before.to_local() if isinstance(before, DTensor) else share.rows(before)
            rows = earlier.float() + rows
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
        gradients = [p.grad for bucket in self.buckets for p in bucket.parameters]
        return any(gradient is not None and is_unreduced(gradient) for gradient in gradients)

    def recover(self) -> bool:
        """Drop the state of a backward that did not end; return whether one had begun."""
        # Within a backward this is the forward of a checkpoint, and the backward goes on.
        if not self._is_in_backward or torch._C._current_graph_task_id() != -1:  # noqa: SLF001
            return False
        for bucket in self.buckets:
            bucket.drop()
        self._sums.clear()
        self._is_in_backward = False
        return True
