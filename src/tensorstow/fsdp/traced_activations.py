"""Bytes of activations, and operations, of a forward and a backward without memory.

They run with fake tensors, and every storage is followed from the operation that makes it to its
end, as torch's memory tracker does, in a third of its time.
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from tensorstow.activations.offload import LEAST_BYTES
from tensorstow.activations.recompute import Recompute
from tensorstow.activations.saved import StorageIdentity, address_of, version_of
from tensorstow.base.activation_placement import ActivationPlacement
from tensorstow.base.errors import OptionError
from tensorstow.fsdp.placed_activations import blocks_with_activations
from tensorstow.fsdp.traced_placement import TracedPlacement
from tensorstow.fsdp.units import Unit, units_of
from tensorstow.io.allocator import is_large
from tensorstow.planner.placement import HeldActivations
from tensorstow.planner.seconds import MicroBatch

_UNWRITTEN = frozenset({torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty})
_GATHERS = frozenset({torch.ops.aten.embedding, torch.ops.aten.index, torch.ops.aten.gather})
"""Operations that read as much as they write, whatever the size of their source."""
_GET_DEVICE = torch.ops.prim.device.default
"""Asks a tensor for its device: it makes nothing."""
_RANDOM = frozenset({torch.ops.aten.bernoulli_, torch.ops.aten.bernoulli})
_OF_ONE_LAYER = frozenset({"late", "together", "large_together", "largest_saved_bytes"})
"""Counts that do not grow with the number of layers."""


@dataclass(slots=True)
class Activations:
    """Activations and operations of forward and backward of one micro-batch.

    The peak is at one of two moments, whatever the model's depth.
    """

    early: int = 0
    """Peak activation bytes until the first block has gradients: as when backward begins."""
    early_together: int = 0
    """The same with gradients, minus the bytes of all gradients."""
    early_small: int = 0
    """Peak bytes of activations in the C library's heap until then: large tensors cannot use what
    these leave ([Note: Large blocks] in ``io.allocator``)."""
    early_large: int = 0
    """Peak bytes of the others until then."""
    early_large_together: int = 0
    """The same with gradients, minus the bytes of all gradients."""
    late: int = 0
    """Peak activation bytes after the first block's backward."""
    together: int = 0
    """The same with gradients, minus the bytes of all gradients."""
    large_together: int = 0
    """The same without small activations."""
    operations: int = 0
    """Floating point operations of forward and backward."""
    tensor_bytes: int = 0
    """Bytes read and written by operations that are no products."""
    calls: int = 0
    """Operations of either kind."""
    random_elements: int = 0
    """Random numbers drawn, for dropout."""
    saved_bytes: int = 0
    """Bytes that blocks move elsewhere in forward and back in backward; the peaks exclude them."""
    largest_saved_bytes: int = 0
    """The largest storage of these."""

    @property
    def peak_bytes(self) -> int:
        """Return the peak of activations alone, without gradients."""
        return max(self.early, self.late)

    def extended(self, deeper: "Activations", layers: int) -> "Activations":
        """Extrapolate to ``layers`` more layers by ``deeper``, which has one more."""
        more = {}
        for field in fields(Activations):
            low, high = getattr(self, field.name), getattr(deeper, field.name)
            is_of_one = field.name in _OF_ONE_LAYER
            more[field.name] = max(low, high) if is_of_one else low + layers * (high - low)
        return Activations(**more)

    def held(self) -> HeldActivations:
        """Return the peaks, for ``planner.placement``."""
        return HeldActivations(
            peak=self.peak_bytes,
            beside_gradients=max(self.early_together, self.together),
            small=self.early_small,
            large=self.early_large,
            large_beside_gradients=max(self.early_large_together, self.large_together),
            saved=self.saved_bytes,
            largest_saved=self.largest_saved_bytes,
        )

    def micro_batch(self, tokens: int) -> MicroBatch:
        """Return the counts, for ``planner.seconds``."""
        return MicroBatch(
            tokens, self.operations, self.tensor_bytes, self.calls, self.random_elements
        )


def watch(
    module: nn.Module,
    placed: TracedPlacement,
    train: Callable[[], object],
    units: Sequence[Unit] | None = None,
) -> Activations:
    """Return the bytes and operations of ``train``, which runs forward and backward of ``module``.

    ``train`` is called once. Parameters have no memory. Without ``units`` these are the module's
    repeated blocks and the root.
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
    seen = peaks.seen
    seen.saved_bytes, seen.largest_saved_bytes = offload.saved_bytes, offload.largest_bytes
    return seen


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
        self._small = 0
        """Those of small ones, in the C library's heap."""
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Every live storage, by address."""
        for tensor in (*module.parameters(), *module.buffers()):
            self._follow(tensor.untyped_storage())
        self._fixed, self._fixed_small = self.held, self._small
        none_yet = -self._gradients
        self.seen = Activations(
            early_together=none_yet,
            early_large_together=none_yet,
            together=none_yet,
            large_together=none_yet,
        )
        """The peaks and counts so far."""

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Stop counting a storage: its memory is counted elsewhere."""
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001
        self._add(-1, storage.nbytes())
        # This callback replaces ``gone``, which would subtract the bytes again.
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
        self._see()
        return result

    def _see(self) -> None:
        """Raise the peaks to what is held now."""
        seen, together = self.seen, self.held - self._fixed
        gradients = [p.grad.nbytes for p in self._trained if p.grad is not None]
        grad_bytes = sum(gradients)
        small = self._small - self._fixed_small
        small = max(small - sum(n for n in gradients if not is_large(n)), 0)
        large_together = together - small - self._gradients
        if all(p.grad is not None for p in self._first):
            seen.late = max(seen.late, together - grad_bytes)
            seen.together = max(seen.together, together - self._gradients)
            seen.large_together = max(seen.large_together, large_together)
        else:
            seen.early = max(seen.early, together - grad_bytes)
            seen.early_together = max(seen.early_together, together - self._gradients)
            seen.early_small = max(seen.early_small, small)
            seen.early_large = max(seen.early_large, together - grad_bytes - small)
            seen.early_large_together = max(seen.early_large_together, large_together)

    def _follow(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it goes."""
        key, nbytes = storage._cdata, storage.nbytes()  # noqa: SLF001
        if key in self._live:
            return

        def gone(_: object) -> None:
            del self._live[key]
            self._add(-1, nbytes)

        self._live[key] = weakref.ref(storage, gone)
        self._add(1, nbytes)

    def _add(self, count: int, nbytes: int) -> None:
        """Count a storage, or with ``count`` -1 no longer."""
        self.held += count * nbytes
        if not is_large(nbytes):
            self._small += count * nbytes

    def _count(self, func: Any, arguments: Any, result: Any) -> None:  # noqa: ANN401  # torch's own
        """Count an operation, its memory, and the bytes that it moves unless it is a product."""
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._follow(value.untyped_storage())
        read = _storages(arguments)
        written = _storages(result)
        if written.keys() <= read.keys() and not func._schema.is_mutable:  # noqa: SLF001
            return  # a view, or no tensor
        self.seen.calls += 1
        kind = func._overloadpacket  # noqa: SLF001
        if kind in _RANDOM:
            self.seen.random_elements += sum(
                value.numel() for value in tree_leaves(result) if isinstance(value, torch.Tensor)
            )
        if kind in flop_registry:
            args, keywords = arguments
            self.seen.operations += int(flop_registry[kind](*args, **keywords, out_val=result))
        if kind in _UNWRITTEN or kind in flop_registry:
            return
        new = sum(written.values())
        self.seen.tensor_bytes += new + (new if kind in _GATHERS else sum(read.values()))


def _storages(tree: Any) -> dict[int, int]:  # noqa: ANN401
    """Return the bytes of the tensors in a tree, by storage; a view has those of its elements."""
    nbytes: dict[int, int] = {}
    for value in tree_leaves(tree):
        if isinstance(value, torch.Tensor):
            key = value.untyped_storage()._cdata  # noqa: SLF001
            nbytes[key] = max(nbytes.get(key, 0), value.numel() * value.element_size())
    return nbytes


@contextmanager
def tracer_quiet() -> Iterator[None]:
    """Keep torch from logging why a model cannot be traced: the caller reports it in one line."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def loss_of(output: Any) -> torch.Tensor:  # noqa: ANN401  # any output of a model
    """Return the loss that a model returned, or the mean square of its first output."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    while isinstance(output, tuple | list) or hasattr(output, "logits"):
        output = output.logits if hasattr(output, "logits") else output[0]
    if not isinstance(output, torch.Tensor):
        message = f"The model returned {type(output).__name__}: a loss, or a tensor, is needed."
        raise OptionError(message)
    return output if output.ndim == 0 else output.float().square().mean()


@dataclass(eq=False, slots=True, weakref_slot=True)
class _TracedStorage:
    """A saved storage; it lives as long as autograd has a tensor of it."""

    nbytes: int
    identity: StorageIdentity
    restored: torch.Tensor | None = None


class TracedOffload:
    """Hooks on blocks like those of ``ActivationOffload``, which count and move nothing.

    What a block saves leaves at once; what backward asks for stays until backward releases it.
    """

    def __init__(self, bring: Callable[[torch.Tensor], object]) -> None:
        """Begin at zero; ``bring`` is called with each storage that comes back."""
        self.saved_bytes = 0
        """Bytes saved in one forward, each storage once."""
        self.largest_bytes = 0
        """Bytes of the largest saved storage."""
        self._bring = bring
        self._storages: weakref.WeakValueDictionary[tuple[int, int], _TracedStorage] = (
            weakref.WeakValueDictionary()
        )
        self._parameters: set[int] = set()
        self._entered: list[saved_tensors_hooks] = []

    def register(self, blocks: Iterable[nn.Module]) -> None:
        """Put hooks on blocks, whose parameters stay where they are."""
        for block in blocks:
            self._parameters |= {address_of(p.untyped_storage()) for p in block.parameters()}
            block.register_forward_pre_hook(self._enter)
            block.register_forward_hook(self._leave, always_call=True)

    def _enter(self, *_: object) -> None:
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._entered.append(hooks)

    def _leave(self, *_: object) -> None:
        self._entered.pop().__exit__()

    def _pack(self, tensor: torch.Tensor) -> Any:  # noqa: ANN401  # torch's own signature
        source = tensor.untyped_storage()
        address, nbytes = address_of(source), source.nbytes()
        # ActivationOffload leaves these where they are, too.
        if address in self._parameters or nbytes < LEAST_BYTES:
            return tensor.detach()
        key = (address, version_of(tensor))
        storage = self._storages.get(key)
        if storage is None:
            storage = self._storages[key] = _TracedStorage(nbytes, StorageIdentity(source))
            self.saved_bytes += nbytes
            self.largest_bytes = max(self.largest_bytes, nbytes)
        offset = int(tensor.storage_offset())
        return storage, tensor.dtype, (tensor.size(), tensor.stride(), offset)

    def _unpack(self, saved: Any) -> torch.Tensor:  # noqa: ANN401
        if isinstance(saved, torch.Tensor):
            return saved
        storage, dtype, layout = saved
        if storage.restored is None:
            storage.restored = torch.empty(storage.nbytes, dtype=torch.uint8)
            self._bring(storage.restored)
        whole: torch.Tensor = storage.restored.view(dtype)
        return whole.as_strided(*layout)
