"""Hooks that unshard weights for reading, and reshard before an update makes them stale.

[Note: Unsharded weights] FSDP2 allocates the memory of an unsharded weight at the first forward and
keeps it, and it does not unshard an unsharded weight. The consequences are handled here, by hooks
and FSDP2's own methods:

* Under inference_mode that memory could never be trained with, nor the views of shards that FSDP2
  takes before: such a forward does both outside of inference_mode.
* A unit's dtypes are those of what was trained at its first forward: a unit that was all frozen
  then is unsharded again once something in it is trained.
* A forward or a backward that an exception ends leaves weights unsharded and FSDP2 in the middle of
  it. FSDP2 is reset: at once after a forward, and after a backward when the next forward, step or
  resume begins. A step by gradients of half a backward is refused.
* Below stage 3 weights stay unsharded after a forward. After one without gradients they would
  remain the model's parameters (which have no gradients to clip or drop), and after any forward
  they would be stale after an update.

[Note: Micro-batches] Under stage 1 gradients stay unreduced between micro-batches and are reduced
with the last one. A micro-batch is a forward with gradients, unless a frontend says which is the
last. FSDP2 is set to keep weights unsharded and gradients unreduced before the last one; with it
they are reduced and weights resharded, so that the next forward unshards new ones.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tensorstow.base.errors import OptionError, PoisonedError
from tensorstow.fsdp.module_hooks import ModelHook, records_of
from tensorstow.fsdp.units import Unit, found_in
from tensorstow.optim.placed import PlacedOptimizer
from tensorstow.tensors.placeholder import ABORT_ADVICE, ConsumedGradient

INCOMPLETE = (
    "after a backward that did not end: some parameters have their gradients and others lost them."
)
_UNREDUCED = (
    "after a backward through units that FSDP2 did not see, and gradients were not"
    " reduced: a unit returned a tensor where none can be found (by a closure, a generator or a"
    " global name), or a graph was gone through twice. Return tensors in tuples, dicts or objects."
)


class UnshardHooks:
    """Hooks that reset FSDP2's unsharded weights between iterations ([Note: Unsharded weights])."""

    def __init__(
        self, model: nn.Module, units: Iterable[Unit], reset_reduction: Callable[[], None]
    ) -> None:
        """Take a model that is not sharded yet.

        ``reset_reduction`` is called after a reduction of gradients that may not have ended.
        """
        self._root = model
        self._reset_reduction = reset_reduction
        self._names = {id(unit.module): list(unit.parameters) for unit in units}
        self._modules: list[FSDPModule] = []
        self._frozen: dict[int, list[nn.Parameter]] = {}
        self._reshards_after_forward = False
        self._lost = ""
        """Why gradients of the next step are incomplete; empty: they are complete."""

    def register(self, optimizer: PlacedOptimizer, *, stage: int) -> None:
        """Register the hooks, once the model is sharded; in stage 3 FSDP2 reshards by itself."""
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                self._modules.append(module)
                parameters = [self._root.get_parameter(n) for n in self._names.get(id(module), ())]
                if not any(p.requires_grad for p in parameters):
                    self._frozen[id(module)] = parameters
                module.register_forward_pre_hook(self._pre_forward, prepend=True)
        self._root.register_forward_hook(self._post_forward, always_call=True)
        self._reshards_after_forward = stage < 3
        optimizer.register_step_pre_hook(self._pre_step)
        optimizer._register_rewrite_hook(self._around_rewrite)  # noqa: SLF001  # a hook of the engine

    # A compiled graph would treat these queries as constants.
    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def _pre_forward(self, module: nn.Module, _: Any) -> None:  # noqa: ANN401  # torch's own
        if not isinstance(module, FSDPModule):
            return
        if module is self._root and (self._recover() or self._lost):
            # What is in .grad is its owner's to drop, unless updates by it have begun.
            begun = any(isinstance(p.grad, ConsumedGradient) for p in self._root.parameters())
            self._lost = INCOMPLETE if begun else ""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(mode=False), torch.no_grad():
                if module is self._root:
                    self._root._get_fsdp_state()._lazy_init()  # noqa: SLF001  # nothing public does
                module.unshard()
        elif any(p.requires_grad for p in self._frozen.get(id(module), ())):
            del self._frozen[id(module)]
            module.unshard()

    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def _post_forward(self, *_: Any) -> None:  # noqa: ANN401
        if self._is_in_forward():  # FSDP2's own hook was not called: an exception ends it
            self._reset()
        elif self._reshards_after_forward and not torch.is_grad_enabled():
            self._reshard()

    def _pre_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:  # noqa: ANN401
        if self._recover():
            self._lost = INCOMPLETE
        unreduced = self._drop_unsharded_gradients(due_only=True)
        if unreduced:
            self._lost = _UNREDUCED
        if self._lost:
            refuse_step(optimizer, self._lost, in_any_case=unreduced)
            self._lost = ""
        self._reshard()

    def _around_rewrite(self, drops_gradients: bool) -> None:  # noqa: FBT001  # a hook
        if self._recover():
            self._lost = INCOMPLETE
        if drops_gradients:
            self._lost = ""
        self._reshard()

    def _is_in_forward(self) -> bool:
        return self._context().iter_forward_root is not None

    def _context(self) -> Any:  # noqa: ANN401  # torch's own, not public
        root: Any = self._root
        return root._get_fsdp_state()._state_ctx  # noqa: SLF001

    def _recover(self) -> bool:
        """Let FSDP2 forget an iteration that did not end; return whether its backward had begun."""
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001  # a checkpoint's forward
            return False
        # FSDP2 queues the callback when a backward begins; it runs when the backward ends.
        begun = bool(self._context().post_backward_final_callback_queued)
        if begun:
            self._drop_unsharded_gradients()
        if begun or self._is_in_forward():
            self._reset()
        return begun

    def _reset(self) -> None:
        reset: Callable[[], None] | None = getattr(self._root, "reset_iter_state", None)
        if reset is None:
            message = (
                "A forward or a backward was ended by an exception, and this version of torch"
                f" ({torch.__version__}) cannot reset FSDP2 after that; 2.13 can. Make the"
                " model anew, and resume() the last commit."
            )
            raise PoisonedError(message)
        reset()
        # One by one: an interrupt may have resharded some of a unit's and not changed its state.
        for _, sharded in records_of(self._modules):
            sharded.to_sharded()
        self._reset_reduction()

    def _drop_unsharded_gradients(self, *, due_only: bool = False) -> bool:
        """Drop unreduced gradients of unsharded weights; return whether there were any.

        ``due_only``: only those that were to be reduced by now, not those of earlier micro-batches.
        """
        any_dropped = False
        for group, sharded in records_of(self._modules):
            if due_only and not group.reduce_grads:
                continue
            # FSDP2 makes the unsharded parameter at its first all-gather.
            whole = getattr(sharded, "_unsharded_param", None)
            if whole is not None and whole.grad is not None:
                any_dropped, whole.grad = True, None
            if sharded.unsharded_accumulated_grad is not None:
                any_dropped, sharded.unsharded_accumulated_grad = True, None
        return any_dropped

    def _reshard(self) -> None:
        for module in self._modules:
            module.reshard()


def reduce_with_last(model: FSDPModule) -> Callable[[bool], None]:
    """Return a setter: FSDP2 reduces gradients, and reshards, in the last micro-batch alone."""

    def set_last(last: bool) -> None:  # noqa: FBT001
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)

    return set_last


@contextmanager
def not_reduced(model: nn.Module) -> Iterator[None]:
    """Leave gradients unreduced inside; no-op for a model on one rank, which has none to reduce."""
    placed: Any = model
    if not hasattr(placed, "set_requires_gradient_sync"):
        yield
        return
    placed.set_requires_gradient_sync(False)  # torch's
    try:
        yield
    finally:
        placed.set_requires_gradient_sync(True)


class MicroBatches:
    """Has gradients reduced in the last micro-batch of a step ([Note: Micro-batches])."""

    def __init__(self, set_last: Callable[[bool], None], steps: int) -> None:
        """Call ``set_last`` before each of the ``steps`` micro-batches that a step has."""
        self._set_last = set_last
        self._steps = steps
        self._seen = 0
        self._is_last: Any = None
        self._reduces = True

    def ask(self, is_last: Callable[[], bool]) -> None:
        """Ask a bound method whether a micro-batch is the last one, instead of counting."""
        self._is_last = weakref.WeakMethod(is_last)

    def tell(self) -> None:
        """Ask the method now whether the next backward reduces its gradients."""
        is_last = None if self._is_last is None else self._is_last()
        self._reduces = is_last is None or is_last()
        self._set_last(self._reduces)

    def register(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Put the hooks in place on ``module``, the model, and on its optimizer."""
        _MICRO_BATCHES[module] = weakref.ref(self)  # the optimizer's hook keeps it alive
        module.register_forward_pre_hook(ModelHook(self._pre_forward, module), prepend=True)
        optimizer.register_step_pre_hook(self._pre_step)

    def _pre_forward(self, *_: object) -> None:
        if not torch.is_grad_enabled():
            return
        if self._is_last is not None:
            self.tell()
            return
        self._seen += 1
        # No step() came after the last micro-batch: this forward begins the next round.
        if self._seen > self._steps:
            self._seen = 1
        self._set_last(self._seen == self._steps)

    def _pre_step(self, *_: Any) -> None:  # noqa: ANN401
        if not self._reduces:
            message = (
                "step() was called, and the last backward was not to reduce its gradients: under"
                " stage 1 that of the last micro-batch does. Take it before, or use stage 2 or 3."
            )
            raise OptionError(message)
        if self._seen % self._steps:
            message = (
                f"step() was called after {self._seen} of accumulation_steps={self._steps}"
                " micro-batches: under stage 1 gradients are reduced with the last one, and these"
                " were not. Take all, or use stage 2 or 3."
            )
            raise OptionError(message)
        self._seen = 0


_MICRO_BATCHES: Any = weakref.WeakKeyDictionary()
"""Weak references, by the model: the optimizer has them."""


def micro_batches_of(module: nn.Module) -> MicroBatches | None:
    """Return the micro-batches of a stage 1 model; None: another stage, or one rank."""
    reference: Any = found_in(_MICRO_BATCHES, module)
    micro_batches: MicroBatches | None = None if reference is None else reference()
    return micro_batches


def refuse_step(
    optimizer: torch.optim.Optimizer, reason: str, *, in_any_case: bool = False
) -> None:
    """Raise OptionError for a step after a backward that did not end, unless no gradient is left.

    ``in_any_case``: also then.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    if all(gradient is None for gradient in gradients) and not in_any_case:
        return
    advice = "Call zero_grad() and go on with the next batch."
    if any(isinstance(gradient, ConsumedGradient) for gradient in gradients):
        advice = f'With overlap="backward" updates by some have begun: {ABORT_ADVICE}.'
    message = f"step() was called {reason} {advice}"
    raise OptionError(message)
