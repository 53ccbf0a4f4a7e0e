"""Hooks that block a module until its parameters are updated, for ``overlap="forward"``.

[Note: Waiting] A block of the model (a child of a ``ModuleList`` or ``Sequential``) waits, before
it runs, for every parameter in it. A module outside of all blocks waits for its parameters too,
except for those in blocks that were seen to run by themselves: so the root waits for the rest, as
does a submodule that is called directly. Until a block has been seen to run, the root waits for its
parameters, as they may be read without calling the block.

[Note: Compiled] A graph of ``torch.compile`` cannot wait in its middle: reads of a weight could be
reordered before the wait. So hooks are traced away, and the caller of a graph waits for all its
parameters: the root, or a block whose own hook ran outside of the graph. A block counts as waiting
only if its hook ran since a graph was last traced. If the whole model is one graph no hook runs
outside, and the step itself waits. A graph guards the classes of parameters ([Note: Unpublished])
and is traced again when it meets an unpublished one, so no wait is missed when a model is compiled
or called in another way. The root's hook leaves one operator in the graph, which raises an error if
the schedule forbids reading weights.

[Note: Gathered] FSDP2 reads the parameters of a group when the first of the group's modules runs,
so each of these waits for all of them, whichever block they are in. It copies their shards in a
stream of its own, which does not wait for the caller's stream: so that stream waits too.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from tensorstow.nn.tiled_linear import TiledLinear, tiles_of

_CONTAINERS = (nn.ModuleList, nn.Sequential)


def is_called(module: nn.Module) -> bool:
    """Return whether a module has a ``forward``: containers as ``ModuleDict`` have none."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the model's own blocks: the children of its outermost containers of several.

    A child that cannot be called, as a ``ModuleDict``, counts as its children. A tiled layer that
    is in no block counts as its tiles.
    """

    def called(block: nn.Module) -> Iterator[nn.Module]:
        if is_called(block):
            yield block
        else:
            for part in block.children():
                yield from called(part)

    def walk(parent: nn.Module) -> Iterator[nn.Module]:
        if isinstance(parent, TiledLinear):
            yield from tiles_of(parent)
            return
        if isinstance(parent, _CONTAINERS) and len(parent) > 1:
            for child in parent:
                yield from called(child)
            return
        for child in parent.children():
            yield from walk(child)

    return list(dict.fromkeys(walk(module)))


# An operator of a graph takes no Python objects, so it names its hooks by number.
_numbers = itertools.count()
_by_number: "weakref.WeakValueDictionary[int, ForwardWaits]" = weakref.WeakValueDictionary()


def _ask(number: int) -> None:
    """Make the hooks with this number wait, when a graph runs."""
    waits = _by_number.get(number)
    if waits is not None:
        waits.ask()


def _ask_nothing(number: int) -> None:
    """Do nothing: a graph is being traced."""
    del number


# Not `torch.library.custom_op`: that imports torch's compiler, which takes longer than all of ours.
_operators: Any = torch.library.Library("tensorstow", "DEF")  # type: ignore[no-untyped-call]
_operators.define("ask(int number) -> ()")
_operators.impl("ask", _ask, "CompositeExplicitAutograd")
torch.library.register_fake("tensorstow::ask", _ask_nothing, lib=_operators)
# The operator has no result, so torch would drop it from the graph as dead code.
torch.fx.has_side_effect(torch.ops.tensorstow.ask.default)


class ForwardWaits:
    """Hooks on a model that wait for weights before they are read."""

    def __init__(self, module: nn.Module, wait: Callable[[Iterable[int] | None], None]) -> None:
        """Call ``wait`` with ids of parameters, or None for all, before they are read.

        ``wait`` returns at once if nothing is under way. Hooks hold ``module``, not the other way
        round.
        """
        self._root = module
        self._wait = wait
        self._blocks = blocks_of(module)
        self._block_ids = {id(block) for block in self._blocks}
        self._inside: set[int] = {id(m) for b in self._blocks for m in b.modules()}
        self._seen: dict[int, nn.Module] = {}
        self._sets: dict[int, frozenset[int]] = {}
        self._calls: dict[int, nn.Module] = {}
        self._order: list[int] = []
        self._running = 0
        """Number of calls of the root and of blocks, outside of graphs, that have not returned."""
        self.blind = False
        """True if the model is in one compiled graph: no hook runs outside of it."""
        self._number = next(_numbers)
        _by_number[self._number] = self
        self._known = frozenset(id(p) for p in module.parameters())
        self._hooks: list[Any] = []
        for part in dict.fromkeys((module, *self._blocks)):
            # Without ``always_call`` a forward that raises would count as running.
            after = part.register_forward_hook(self._after, prepend=True, always_call=True)
            self._hooks.append(after)
        for part in module.modules():
            self._hooks.append(part.register_forward_pre_hook(self._before, prepend=True))
            saving: Any = part.register_state_dict_pre_hook
            loading: Any = part.register_load_state_dict_pre_hook
            self._hooks += [saving(self._before_all_of), loading(self._before_all_of)]

    def close(self) -> None:
        """Remove the hooks. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __reduce__(self) -> tuple[object, ...]:
        """Wait, as a saved model's bytes are read later; give it hooks that never wait."""
        self._wait(None)
        return _inert, ()

    @torch.no_grad()
    def __deepcopy__(self, memo: dict[int, Any]) -> "ForwardWaits":
        """Give a copy of the model hooks that never wait: no optimizer updates it.

        Weights that were copied before this hook may be old, so they are copied again.
        """
        self._wait(None)
        for parameter in self._root.parameters():
            if id(parameter) in memo:
                memo[id(parameter)].copy_(parameter)
        return _inert()

    def covers(self, identity: int) -> bool:
        """Return whether a module waits for the parameter with this ``id``."""
        return identity in self._known and not self.blind

    def order(self) -> list[int]:
        """Return ids of parameters in the order in which forward needed them since the last call.

        Without a forward since then, return the same order again. Called by each step.
        """
        self._running = 0  # an interrupt may have left calls that will not return
        if self._calls or not self._order:
            needed = self._needs(self._root)
            # The root waits for these before any block runs.
            first = [id(p) for p in self._root.parameters() if id(p) in needed]
            rest = [id(p) for block in self._calls.values() for p in block.parameters()]
            self._order = list(dict.fromkeys((*first, *rest)))
            self._calls.clear()
        return self._order

    def _before(self, module: nn.Module, _: Any) -> None:  # noqa: ANN401  # torch's own signature
        if torch.compiler.is_compiling():
            self._traced()
            if module is self._root:
                torch.ops.tensorstow.ask(self._number)
            return
        if module is self._root or id(module) in self._block_ids:
            self._running += 1
        if id(module) in self._block_ids:
            self._calls.setdefault(id(module), module)
            if id(module) not in self._seen:
                # From now on modules outside of this block leave its parameters to it.
                self._seen[id(module)] = module
                self._sets.clear()
        needs = self._needs(module)
        self._wait(needs)
        stream = _copy_in_stream(module)
        if stream is not None:
            with stream:
                self._wait(needs)

    def _after(self, *_: Any) -> None:  # noqa: ANN401
        if not torch.compiler.is_compiling() and self._running:
            self._running -= 1

    def _traced(self) -> None:
        """Make sure that the graph being traced never runs with old weights."""
        self._seen.clear()
        self._sets.clear()
        # If no root or block runs outside of a graph, the whole model is in this one.
        self.blind = self.blind or not self._running
        self._wait(None)

    # The tracer runs it, as after `torch.compiler.assume_constant_result`, which would import
    # torch's compiler.
    _traced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001

    def ask(self) -> None:
        """Wait for all: a graph of the whole model is about to run."""
        self._wait(None)

    def _before_all_of(self, module: nn.Module, *_: Any) -> None:  # noqa: ANN401
        self._wait([id(p) for p in module.parameters()])

    def _needs(self, module: nn.Module) -> frozenset[int]:
        """Return the ids of the parameters that ``module`` waits for."""
        needs = self._sets.get(id(module))
        if needs is None:
            ids = {id(p): None for p in module.parameters()}
            if id(module) not in self._inside:
                outside = {id(p) for p in self._outside_of_seen(module)}
                ids = {i: None for i in ids if i in outside}
            ids |= {id(p): None for p in _gathered_with(module, self._root)}
            needs = frozenset(ids)
            if needs <= self._known:  # else they are FSDP2's unsharded ones now
                self._sets[id(module)] = needs
        return needs

    def _outside_of_seen(self, module: nn.Module) -> Iterator[torch.Tensor]:
        if id(module) not in self._seen:
            yield from _outside(module, lambda child: id(child) in self._seen)


def _gathered_with(module: nn.Module, root: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters that FSDP2 gathers when ``module`` runs ([Note: Gathered])."""
    state = _fsdp_state(module)
    if state is None:
        return
    for other in root.modules():
        if _fsdp_state(other) is state:
            yield from _outside(other, lambda child: _fsdp_state(child) is not None)


def _outside(module: nn.Module, is_apart: Callable[[nn.Module], bool]) -> Iterator[torch.Tensor]:
    """Yield the parameters in ``module`` but for those in children that are ``is_apart``."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not is_apart(child):
            yield from _outside(child, is_apart)


def _fsdp_state(module: nn.Module) -> object:
    """Return the state of a module's FSDP2 group; None outside of groups."""
    state: Any = getattr(module, "_get_fsdp_state", None)
    return None if state is None else state()


def _copy_in_stream(module: nn.Module) -> torch.Stream | None:
    """Return the stream in which FSDP2 reads the shards of ``module``; None if it has none.

    It waits for the caller's stream when the root is called, and for nothing when a unit is.
    """
    context: Any = getattr(_fsdp_state(module), "_comm_ctx", None)
    stream: Any = getattr(context, "all_gather_copy_in_stream", None)
    return stream if isinstance(stream, torch.Stream) else None


def _inert() -> ForwardWaits:
    return ForwardWaits(nn.Module(), _nothing)


def _nothing(_: Iterable[int] | None) -> None:
    pass
