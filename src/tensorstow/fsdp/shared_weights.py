"""Weights that are whole on every rank, as plain parameters ([Note: Shares]).

[Note: Scalars] FSDP2 shards no scalars. They stay plain, and every rank updates them alike by the
mean of all ranks' gradients. It is reduced at the end of backward, after FSDP2's own reductions, so
that collectives come in one order on every rank. Each backward through the model's outputs reduces,
also on a rank whose scalars had no part in it.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_leaves

from tensorstow.base.errors import OptionError
from tensorstow.fsdp.gradient_reduction import GradientReduction, Reduction, RowLayout
from tensorstow.fsdp.module_hooks import ModelHook
from tensorstow.fsdp.units import Unit
from tensorstow.fsdp.unshard import INCOMPLETE, refuse_step
from tensorstow.optim.placed import PlacedOptimizer
from tensorstow.tensors.dtensor import rows_of_rank, to_local
from tensorstow.tensors.shares import RankShare, share_out

_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""The name in torch 2.13, or the older one."""


class SharedWeights:
    """The plain parameters of a model, of which each rank updates its rows."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        mesh: DeviceMesh,
        reduction: Reduction,
    ) -> None:
        """Share out the parameters, and reduce their gradients from now on.

        Args:
            model: The model, whose parameters have the same values on every rank.
            units: Its units; backward is expected to come to the last block first, and to end in
                the root.
            mesh: (shard,) or (replicate, shard).
            reduction: How gradients are reduced.
        """
        self._model = weakref.ref(model)
        self._mesh = mesh
        *blocks, root = [list(unit.parameters.values()) for unit in units]
        order = [*reversed(blocks), root]
        for parameter in (p for unit in order for p in unit):
            share_out(parameter, _share(parameter, mesh, weakref.WeakMethod(self.follow)))
        self._units = order
        self._reduction = GradientReduction(order, mesh, reduction)
        self._lost = False

    def set_reduces(self, reduces: bool) -> None:  # noqa: FBT001  # as FSDP2's
        """Reduce the gradients of the next backward, with those that wait, or let them wait."""
        self._reduction.reduces = reduces

    def register(self, optimizer: PlacedOptimizer) -> None:
        """Register the hooks of the model, and of the optimizer that ``stow`` made."""
        root = self._model()
        if root is not None:
            self._let_set_reduces(root)
            root.register_forward_pre_hook(ModelHook(self._pre_forward, root), prepend=True)
            if isinstance(root, FSDPModule):  # it shards the other parameters
                self._begin_with_backward(root)
        optimizer.register_step_pre_hook(self._pre_step)
        self._register_gathers(optimizer)

    def follow(self, optimizer: PlacedOptimizer) -> None:
        """Check and gather for one more optimizer, which begins its first step; not for the first.

        Each has parameters of its own: matrices in one, and the rest in another.
        """
        self._pre_step(optimizer)
        optimizer.register_step_pre_hook(self._pre_step)
        self._register_gathers(optimizer)

    def _register_gathers(self, optimizer: PlacedOptimizer) -> None:
        """Register hooks that gather the weights that ``optimizer`` writes."""
        itself = self
        # Weak: the optimizer has these functions as hooks.
        reference = weakref.ref(optimizer)

        def gather() -> None:
            alive = reference()
            if alive is not None:
                itself._reduction.include_unfrozen()
                itself._gather(itself._layouts_of(alive), alive)

        def around_rewrite(drops_gradients: bool) -> None:  # noqa: FBT001  # a hook
            itself._lost |= itself._reduction.recover()
            if drops_gradients:
                itself._lost = False
            alive = reference()
            if alive is not None:
                itself._gather(itself._layouts(), alive)

        optimizer._register_update_hook(gather)  # noqa: SLF001  # a hook of the engine
        optimizer._register_rewrite_hook(around_rewrite)  # noqa: SLF001  # a hook of the engine

    # --- inside ---

    def _let_set_reduces(self, root: Any) -> None:  # noqa: ANN401  # modules take any attribute
        """Give the model FSDP2's method; copies share the function."""
        # FSDP2's own method, which the attribute below hides.
        itself, of_fsdp = self, getattr(root, "set_requires_gradient_sync", None)

        def set_reduces(reduces: bool, **options: bool) -> None:  # noqa: FBT001  # torch's
            itself.set_reduces(reduces)
            if of_fsdp is not None:
                of_fsdp(reduces, **options)

        root.set_requires_gradient_sync = ModelHook(set_reduces)

    def _begin_with_backward(self, root: nn.Module) -> None:
        """Reduce in each backward through the model's outputs ([Note: Scalars])."""
        reduction = self._reduction

        def begin(_: torch.Tensor) -> None:
            reduction.begin()

        def post_forward(_: nn.Module, __: object, output: object) -> None:
            if torch.is_grad_enabled():
                for tensor in tree_leaves(output):
                    if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                        hooked: Any = tensor
                        hooked.register_hook(begin)

        root.register_forward_hook(ModelHook(post_forward, root))

    def _layouts_of(self, optimizer: PlacedOptimizer) -> list[RowLayout]:
        """Return the layouts of the buckets' parameters that ``optimizer`` updates."""
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        layouts = []
        for bucket in self._reduction.buckets:
            updated = [p for p in bucket.parameters if id(p) in ids]
            is_all = len(updated) == len(bucket.parameters)
            layouts.append(bucket.layout if is_all else RowLayout(updated, self._mesh))
        return [layout for layout in layouts if layout.parameters]

    def _layouts(self) -> list[RowLayout]:
        """Return the layouts to gather all parameters, also frozen ones, which a commit has too."""
        return [
            RowLayout([p for p in unit if p.dtype == dtype], self._mesh)
            for unit in self._units
            for dtype in dict.fromkeys(p.dtype for p in unit)
        ]

    @torch.no_grad()
    def _gather(self, layouts: Iterable[RowLayout], optimizer: PlacedOptimizer) -> None:
        """Gather all ranks' rows of parameters, once they are updated; collective."""
        if self._mesh.size(self._mesh.ndim - 1) == 1:
            return  # every rank updates the whole
        group = self._mesh.get_group(self._mesh.ndim - 1)
        # One layout's gather is under way while the rows of the next one are copied.
        pending: tuple[RowLayout, torch.Tensor, Any] | None = None
        for layout in layouts:
            optimizer.wait(layout.parameters)
            if not any(p.ndim for p in layout.parameters):
                continue  # every rank updates them
            local_rows = torch.zeros(layout.length, dtype=layout.parameters[0].dtype)
            for index, parameter in enumerate(layout.parameters):
                rows = layout.rows(parameter.data, layout.rank)
                layout.place(index, local_rows, rows).copy_(rows)
            gathered = local_rows.new_empty(layout.ranks * layout.length)
            work = _all_gather(gathered, local_rows, group, async_op=True)
            if pending is not None:
                _copy_out(*pending)
            pending = layout, gathered, work
        if pending is not None:
            _copy_out(*pending)

    def _pre_forward(self, *_: object) -> None:
        self._lost |= self._reduction.recover()
        if self._lost:  # until what the rest of that backward left is dropped
            gradients = [p.grad for unit in self._units for p in unit if p.grad is not None]
            self._lost = any(bool(to_local(gradient).any()) for gradient in gradients)

    def _pre_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:  # noqa: ANN401  # torch's
        self._lost |= self._reduction.recover()
        if self._lost:
            refuse_step(optimizer, INCOMPLETE)
        self._lost = False
        if self._reduction.has_unreduced:
            message = (
                "step() was called with gradients that are not reduced over the ranks yet: the"
                " last backward of a step is to reduce them."
            )
            raise OptionError(message)


def _copy_out(layout: RowLayout, gathered: torch.Tensor, work: Any) -> None:  # noqa: ANN401
    """Copy other ranks' rows to the parameters, once they are gathered.

    Version counters do not change: the update that wrote the rows has increased them.
    """
    work.wait()
    for rank, run in enumerate(gathered.view(layout.ranks, -1)):
        if rank == layout.rank:
            continue
        for index, parameter in enumerate(layout.parameters):
            rows = layout.rows(parameter.data, rank)
            if rows.ndim:
                rows.copy_(layout.place(index, run, rows))


def _share(
    parameter: torch.Tensor,
    mesh: DeviceMesh,
    follow: weakref.WeakMethod[Callable[[PlacedOptimizer], None]],
) -> RankShare:
    """Return the rows that FSDP2 would give this rank; all of a scalar, which has none."""
    last = mesh.ndim - 1
    start, stop, cut = 0, 0, False
    if parameter.ndim:
        start, stop = rows_of_rank(parameter.shape[0], mesh.get_local_rank(last), mesh.size(last))
        cut = True
    placements: Iterable[Any] = [Replicate()] * last + [Shard(0) if cut else Replicate()]
    meta = TensorMeta(parameter.shape, parameter.stride(), parameter.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return RankShare(start, stop, spec, DTensor, follow)
