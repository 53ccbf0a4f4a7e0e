"""Bytes of activations, and operations, of a forward and a backward without memory.

They run with fake tensors, and every storage is followed from the operation that makes it to its
end, as torch's memory tracker does, in a third of its time.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from tensorstow.activations.recompute import Recompute
from tensorstow.base.activation_placement import ActivationPlacement
from tensorstow.base.allocator import LARGE_BLOCK
from tensorstow.base.errors import OptionError
from tensorstow.fsdp.placed_activations import blocks_with_activations
from tensorstow.fsdp.traced_offload import TracedOffload
from tensorstow.fsdp.traced_placement import TracedPlacement
from tensorstow.fsdp.units import Unit, units_of
from tensorstow.planner.placement import HeldActivations
from tensorstow.planner.seconds import MicroBatch

_UNWRITTEN = frozenset({torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty})
_GATHERS = frozenset({torch.ops.aten.embedding, torch.ops.aten.index, torch.ops.aten.gather})
"""Operations that read as much as they write, whatever the size of their source."""
_GET_DEVICE = torch.ops.prim.device.default
"""Asks a tensor for its device: it makes nothing."""
_RANDOM = frozenset({torch.ops.aten.bernoulli_, torch.ops.aten.bernoulli})


@dataclass(frozen=True, slots=True)
class Activations:
    """Activations and operations of forward and backward of one micro-batch."""

    peak_bytes: int
    """The peak of activations alone, without gradients."""
    beside_gradients: int
    """The peak of activations and gradients together, minus all gradients."""
    operations: int
    """Floating point operations of forward and backward."""
    tensor_bytes: int = 0
    """Bytes read and written by operations that are no products."""
    calls: int = 0
    """Operations of either kind."""
    random_elements: int = 0
    """Random numbers drawn, for dropout."""
    large_bytes: int = 0
    """Bytes of all large tensors that operations make."""
    saved_bytes: int = 0
    """Bytes that blocks move elsewhere in forward and back in backward; the peaks exclude them."""
    largest_saved_bytes: int = 0
    """The largest storage of these."""

    def held(self) -> HeldActivations:
        """Return the peaks, for ``planner.placement``."""
        return HeldActivations(
            self.peak_bytes, self.beside_gradients, self.saved_bytes, self.largest_saved_bytes
        )

    def micro_batch(self, tokens: int) -> MicroBatch:
        """Return the counts, for ``planner.seconds``.

        Args:
            tokens: The tokens of the micro-batch.
        """
        return MicroBatch(
            tokens,
            self.operations,
            self.tensor_bytes,
            self.calls,
            self.random_elements,
            self.large_bytes,
        )


@dataclass(frozen=True, slots=True)
class TracedStep:
    """Traced bytes and operations. A model's peak is at one of two moments, whatever its depth."""

    early: int
    """Peak activation bytes until the first block has gradients: as when backward begins."""
    early_together: int
    """The same with gradients, minus the bytes of all gradients."""
    late: int
    """Peak activation bytes after the first block's backward."""
    together: int
    """The same with gradients, minus the bytes of all gradients."""
    operations: int
    tensor_bytes: int
    calls: int
    random_elements: int
    large_bytes: int
    saved: int = 0
    largest_saved: int = 0

    def extended(self, deeper: "TracedStep", layers: int) -> "TracedStep":
        """Extrapolate to ``layers`` more layers by ``deeper``, which has one more."""
        return TracedStep(
            self.early + layers * (deeper.early - self.early),
            self.early_together + layers * (deeper.early_together - self.early_together),
            max(self.late, deeper.late),
            max(self.together, deeper.together),
            self.operations + layers * (deeper.operations - self.operations),
            self.tensor_bytes + layers * (deeper.tensor_bytes - self.tensor_bytes),
            self.calls + layers * (deeper.calls - self.calls),
            self.random_elements + layers * (deeper.random_elements - self.random_elements),
            self.large_bytes + layers * (deeper.large_bytes - self.large_bytes),
            self.saved + layers * (deeper.saved - self.saved),
            max(self.largest_saved, deeper.largest_saved),
        )

    def activations(self) -> Activations:
        """Return the peaks and counts that plans are predicted with."""
        return Activations(
            max(self.early, self.late),
            max(self.early_together, self.together),
            self.operations,
            self.tensor_bytes,
            self.calls,
            self.random_elements,
            self.large_bytes,
            self.saved,
            self.largest_saved,
        )


def watch(
    module: nn.Module,
    placed: TracedPlacement,
    train: Callable[[], object],
    units: Sequence[Unit] | None = None,
) -> TracedStep:
    """Return the bytes and operations of ``train``, which runs forward and backward of ``module``.

    Args:
        module: A module whose parameters have no memory.
        placed: What its blocks do with their activations.
        train: The function to trace; it is called once.
        units: The module's units. Default: None, its repeated blocks and the root.
    """
    units = units_of(module) if units is None else units
    blocks = blocks_with_activations(units).values()
    peaks = Peaks(module, units)
    offload = TracedOffload(peaks.leave_out if placed.device_is_host else lambda _: None)
    if placed.placement is ActivationPlacement.RECOMPUTE:
        Recompute(blocks)
    elif placed.placement is not ActivationPlacement.KEEP:
        offload.register(blocks)
    with peaks:
        train()
    return replace(peaks.traced(), saved=offload.saved_bytes, largest_saved=offload.largest_bytes)


class Peaks(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch is untyped here
    """The peak bytes after any operation, and counts of operations."""

    def __init__(self, module: nn.Module, units: Sequence[Unit] | None = None) -> None:
        """Trace ``module``, whose parameters and buffers exist already, and its ``units``."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch is untyped here
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._gradients = sum(p.nbytes for p in self._trained)
        self._first = [
            p for p in (units or units_of(module))[0].parameters.values() if p.requires_grad
        ]
        self.held = 0
        """Bytes of all live storages."""
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Every live storage, by address."""
        for tensor in (*module.parameters(), *module.buffers()):
            self._follow(tensor.untyped_storage())
        self._fixed = self.held
        self.early = self.late = 0
        self.early_together = self.together = -self._gradients
        self.operations = self.tensor_bytes = self.calls = 0
        self.random_elements = self.large_bytes = 0

    def traced(self) -> TracedStep:
        """Return the peaks and counts so far."""
        done = (self.operations, self.tensor_bytes, self.calls)
        more = (self.random_elements, self.large_bytes)
        held = (self.early, self.early_together, self.late, self.together)
        return TracedStep(*held, *done, *more)

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Stop counting a storage: its memory is counted elsewhere."""
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001
        self.held -= storage.nbytes()
        self._live[key] = weakref.ref(storage, lambda _: self._live.pop(key))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing compiles here, and torch would load its compiler to skip it."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  # torch's own signature
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run ``func``, and update the peaks and counts."""
        if func is _GET_DEVICE:  # a backward asks for it more often than for all else
            return args[0].fake_device
        result = func(*args, **(kwargs or {}))
        self._count(func, (args, kwargs or {}), result)
        together = self.held - self._fixed
        grad_bytes = sum(p.grad.nbytes for p in self._trained if p.grad is not None)
        if all(p.grad is not None for p in self._first):
            self.late = max(self.late, together - grad_bytes)
            self.together = max(self.together, together - self._gradients)
        else:
            self.early = max(self.early, together - grad_bytes)
            self.early_together = max(self.early_together, together - self._gradients)
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it goes."""
        key, nbytes = storage._cdata, storage.nbytes()  # noqa: SLF001
        if key in self._live:
            return

        def gone(_: object) -> None:
            del self._live[key]
            self.held -= nbytes

        self._live[key] = weakref.ref(storage, gone)
        self.held += nbytes

    def _count(self, func: Any, arguments: Any, result: Any) -> None:  # noqa: ANN401  # torch's own
        """Count an operation, its memory, and the bytes that it moves unless it is a product."""
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._follow(value.untyped_storage())
        read = _storages(arguments)
        written = _storages(result)
        if written.keys() <= read.keys() and not func._schema.is_mutable:  # noqa: SLF001
            return  # a view, or no tensor
        self.calls += 1
        kind = func._overloadpacket  # noqa: SLF001
        self.large_bytes += sum(
            nbytes for key, nbytes in written.items() if key not in read and nbytes >= LARGE_BLOCK
        )
        if kind in _RANDOM:
            self.random_elements += sum(
                value.numel() for value in tree_leaves(result) if isinstance(value, torch.Tensor)
            )
        if kind in flop_registry:
            args, keywords = arguments
            self.operations += int(flop_registry[kind](*args, **keywords, out_val=result))
        if kind in _UNWRITTEN or kind in flop_registry:
            return
        new = sum(written.values())
        self.tensor_bytes += new + (new if kind in _GATHERS else sum(read.values()))


def _storages(tree: Any) -> dict[int, int]:  # noqa: ANN401
    """Return the bytes of the tensors in a tree, by storage; a view has those of its elements."""
    nbytes: dict[int, int] = {}
    for value in tree_leaves(tree):
        if isinstance(value, torch.Tensor):
            key = value.untyped_storage()._cdata  # noqa: SLF001
            nbytes[key] = max(nbytes.get(key, 0), value.numel() * value.element_size())
    return nbytes


def loss_of(output: Any) -> torch.Tensor:  # noqa: ANN401  # any output of a model
    """Return the loss that a model returned, or the mean square of its first output.

    Args:
        output: The return value of its forward.

    Raises:
        OptionError: Its first element is no tensor.
    """
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    while isinstance(output, tuple | list) or hasattr(output, "logits"):
        output = output.logits if hasattr(output, "logits") else output[0]
    if not isinstance(output, torch.Tensor):
        message = f"The model returned {type(output).__name__}: a loss, or a tensor, is needed."
        raise OptionError(message)
    return output if output.ndim == 0 else output.float().square().mean()
