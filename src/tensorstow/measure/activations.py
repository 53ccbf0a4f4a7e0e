"""Bytes of activations, and operations, of one micro-batch: traced with fake tensors.

Forward and backward run without memory, and every storage is followed from the operation that makes
it to its end, as torch's memory tracker does, in a third of its time. A deep model of transformers
is traced with two layers and with three; what a layer adds is added for each.
"""

import copy
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from tensorstow.base.allocator import LARGE_BLOCK
from tensorstow.base.errors import OptionError
from tensorstow.fsdp.units import units_of
from tensorstow.measure.models import (
    NamedModel,
    call_function,
    first_line,
    from_config,
    loss_of,
    moved_to,
)
from tensorstow.planner.seconds import MicroBatch

_UNWRITTEN = frozenset({torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty})
_GATHERS = frozenset({torch.ops.aten.embedding, torch.ops.aten.index, torch.ops.aten.gather})
"""They read as much as they write, whatever they read it from."""
_RANDOM = frozenset({torch.ops.aten.bernoulli_, torch.ops.aten.bernoulli})
_WHOLE_LAYERS = 4
"""Deeper models are traced with two layers and with three."""


@dataclass(frozen=True, slots=True)
class Activations:
    """Activations and operations of forward and backward of one micro-batch."""

    peak_bytes: int
    """Of activations alone, gradients excluded."""
    beside_gradients: int
    """The most of activations and gradients together, less all gradients."""
    operations: int
    """Floating point operations of forward and backward."""
    tensor_bytes: int = 0
    """Read and written by operations that are no products."""
    calls: int = 0
    """Operations of either kind."""
    random_elements: int = 0
    """Random numbers drawn, for dropout."""
    large_bytes: int = 0
    """Of all large tensors that operations make."""

    def micro_batch(self, tokens: int) -> MicroBatch:
        """Return what is done, for ``planner.seconds``.

        Args:
            tokens: Of the micro-batch.
        """
        return MicroBatch(
            tokens,
            self.operations,
            self.tensor_bytes,
            self.calls,
            self.random_elements,
            self.large_bytes,
        )


def trace(model: NamedModel, batch: int, sequence: int) -> Activations:
    """Return the activations and operations of one micro-batch of token ids.

    Args:
        model: A model of transformers.
        batch: Sequences of a micro-batch.
        sequence: Tokens of a sequence.

    Raises:
        OptionError: It cannot be traced: what it does depends on values, say.
    """
    layers = getattr(model.config, "num_hidden_layers", 0)
    with _refusing(model, "Leave --batch and --seq out: activations then do not count."):
        if layers <= _WHOLE_LAYERS or getattr(model.config, "layer_types", None):
            found = _trace(model.config, batch, sequence)
        else:
            two, three = (_trace(_with_layers(model.config, n), batch, sequence) for n in (2, 3))
            found = two.extended(three, layers - 2)
    return _activations(model, found)


def trace_function(model: NamedModel) -> Activations:
    """Return the same of a model whose function returned the arguments of its forward, too.

    Args:
        model: A model with ``inputs``. Its function is called once more.

    Raises:
        OptionError: It cannot be traced: what it does depends on values, say.
    """
    advice = "Let the function return the module alone: activations then do not count."
    with _refusing(model, advice), FakeTensorMode():
        module, inputs = call_function(model.name)
        _cast(module.train(), model.dtype)
        first = next(module.parameters())
        given, named = moved_to(inputs or ((), {}), first.device, first.dtype)
        peaks = Peaks(module)
        with peaks:
            torch.autograd.backward(loss_of(module(*given, **named)))
    return _activations(model, peaks.traced())


def _cast(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Cast floating point parameters; ``Module.to`` cannot exchange fake ones."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules() if dtype is not None else ():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_floating_point() and parameter not in made:
                made[parameter] = nn.Parameter(parameter.to(dtype), parameter.requires_grad)
            setattr(part, name, made.get(parameter, parameter))


@contextmanager
def _refusing(model: NamedModel, advice: str) -> Iterator[None]:
    """Turn what a model raises without values into an OptionError."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True  # the error says it, in one line
    try:
        yield
    except OptionError:
        raise
    except Exception as error:  # any that a model's own code raises
        message = f"{model.name} cannot be traced without values: {first_line(error)}. {advice}"
        raise OptionError(message) from error
    finally:
        log.disabled = before


def _activations(model: NamedModel, found: "_Traced") -> Activations:
    trained = sum(p.nbytes for p in model.module.parameters() if p.requires_grad)
    return Activations(
        max(found.early, found.late),
        max(found.early - trained, found.together),
        found.operations,
        found.tensor_bytes,
        found.calls,
        found.random_elements,
        found.large_bytes,
    )


def between(one: Activations, whole: Activations, batch: int, part: int) -> Activations:
    """Return what a micro-batch of ``part`` sequences holds at most, and does.

    Operations and bytes grow by the same for each sequence; the peak is the largest of several
    moments that do, so the line between two of its values lies on it or above.

    Args:
        one: Traced with one sequence.
        whole: Traced with ``batch`` sequences.
        batch: More than one.
        part: From 1 to ``batch``.
    """

    def at(name: str) -> int:
        low, high = getattr(one, name), getattr(whole, name)
        return int(low + -(-(high - low) * (part - 1) // (batch - 1)))

    return Activations(*(at(each.name) for each in fields(Activations)))


@dataclass(frozen=True, slots=True)
class _Traced:
    """What was seen; bytes. A model has its peak in one of two moments, whatever its depth."""

    early: int
    """Of activations, until the first block has gradients: when backward begins, say."""
    late: int
    """Of activations behind that: what the first block and the embeddings need by themselves."""
    together: int
    """Then, of activations and gradients, less all gradients."""
    operations: int
    tensor_bytes: int
    calls: int
    random_elements: int
    large_bytes: int

    def extended(self, deeper: "_Traced", layers: int) -> "_Traced":
        """Extrapolate to ``layers`` more layers by ``deeper``, which has one more."""
        return _Traced(
            self.early + layers * (deeper.early - self.early),
            max(self.late, deeper.late),
            max(self.together, deeper.together),
            self.operations + layers * (deeper.operations - self.operations),
            self.tensor_bytes + layers * (deeper.tensor_bytes - self.tensor_bytes),
            self.calls + layers * (deeper.calls - self.calls),
            self.random_elements + layers * (deeper.random_elements - self.random_elements),
            self.large_bytes + layers * (deeper.large_bytes - self.large_bytes),
        )


def _with_layers(config: Any, layers: int) -> Any:  # noqa: ANN401  # transformers' own
    changed = copy.deepcopy(config)
    changed.num_hidden_layers = layers
    return changed


def _trace(config: Any, batch: int, sequence: int) -> _Traced:  # noqa: ANN401
    with FakeTensorMode():
        module = from_config(config, "cpu").train()
        ids = torch.zeros((batch, sequence), dtype=torch.long)
        peaks = Peaks(module)
        with peaks:
            module(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return peaks.traced()


class Peaks(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch is untyped here
    """The most bytes after any operation, and what operations there were."""

    def __init__(self, module: nn.Module) -> None:
        """Trace ``module``, whose parameters and buffers exist already."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch is untyped here
        self._trained = [p for p in module.parameters() if p.requires_grad]
        self._gradients = sum(p.nbytes for p in self._trained)
        self._first = [p for p in units_of(module)[0].parameters.values() if p.requires_grad]
        self.held = 0
        """Bytes of all storages that there are now."""
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Every storage that there is, by address."""
        for tensor in (*module.parameters(), *module.buffers()):
            self._follow(tensor.untyped_storage())
        self._fixed = self.held
        self.early = self.late = self.together = 0
        self.operations = self.tensor_bytes = self.calls = 0
        self.random_elements = self.large_bytes = 0

    def traced(self) -> _Traced:
        """Return what was seen."""
        done = (self.operations, self.tensor_bytes, self.calls)
        more = (self.random_elements, self.large_bytes)
        return _Traced(self.early, self.late, self.together, *done, *more)

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
        """Run ``func``, and look."""
        result = func(*args, **(kwargs or {}))
        self._count(func, (args, kwargs or {}), result)
        together = self.held - self._fixed
        grad_bytes = sum(p.grad.nbytes for p in self._trained if p.grad is not None)
        if all(p.grad is not None for p in self._first):
            self.late = max(self.late, together - grad_bytes)
            self.together = max(self.together, together - self._gradients)
        else:
            self.early = max(self.early, together - grad_bytes)
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

    def _count(self, func: Any, given: Any, result: Any) -> None:  # noqa: ANN401  # torch's own
        """Count an operation, its memory, and the bytes that it moves unless it is a product."""
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._follow(value.untyped_storage())
        read = _storages(given)
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
            args, keywords = given
            self.operations += int(flop_registry[kind](*args, **keywords, out_val=result))
        if kind in _UNWRITTEN or kind in flop_registry:
            return
        new = sum(written.values())
        self.tensor_bytes += new + (new if kind in _GATHERS else sum(read.values()))


def _storages(tree: Any) -> dict[int, int]:  # noqa: ANN401
    """Return the bytes of the tensors in a tree, by storage; of views, those that they show."""
    found: dict[int, int] = {}
    for value in tree_leaves(tree):
        if isinstance(value, torch.Tensor):
            key = value.untyped_storage()._cdata  # noqa: SLF001
            found[key] = max(found.get(key, 0), value.numel() * value.element_size())
    return found
