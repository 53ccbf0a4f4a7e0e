"""Makes reads of a parameter wait until its update is done.

[Note: Unpublished] While its update is under way, a parameter has a subclass of its own class,
whose ``__torch_function__`` waits, restores the parameter's class, and runs the operation. So every
torch operation on the parameter itself sees the new weight, wherever it is called: averages of
weights, norms, copies, ``p.data``. Operations that need no bytes (``shape``, ``grad``) do not wait.
A graph of ``torch.compile`` guards the classes of parameters, so it is not entered with an
unpublished one; hooks wait before. Between a backward whose updates may be undone and ``step()``
the waiter undoes them, so operations see the old weight.

Gradients and states in memory that an update still uses have such a class too, for ``zero_grad``
and for who resets moments.

Reads without a torch operation on the parameter are not detected. Views and arrays that were taken
before ``step()`` are known by another way ([Note: Aliases]); extensions that use a tensor's address
without torch's dispatch are not.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, cast

import torch
from torch.nn.functional import embedding

from tensorstow.base.errors import OptionError

_GETTERS = (
    "_backward_hooks", "_grad", "_post_accumulate_grad_hooks", "_version", "device", "dtype",
    "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_nested", "is_quantized",
    "is_sparse", "itemsize", "layout", "nbytes", "ndim", "output_nr", "requires_grad",
    "retains_grad", "shape",
)  # fmt: skip
_SETTERS = ("grad", "requires_grad")
_METHODS = (
    "__len__", "dim", "element_size", "get_device", "is_complex", "is_contiguous",
    "is_floating_point", "nelement", "numel", "register_hook", "register_post_accumulate_grad_hook",
    "requires_grad_", "retain_grad", "size", "storage_offset", "stride",
)  # fmt: skip


def _without_bytes() -> Iterator[object]:
    for name in _GETTERS:
        yield getattr(torch.Tensor, name).__get__
    for name in _SETTERS:
        yield getattr(torch.Tensor, name).__set__
    yield getattr(torch.Tensor.grad, "__delete__")  # noqa: B009  # torch types it as a tensor
    for name in _METHODS:
        yield getattr(torch.Tensor, name)
    yield from (torch.is_complex, torch.is_floating_point, torch.numel)


_HARMLESS = frozenset(_without_bytes())


Waiter = Callable[[Iterable[int]], None]
"""Blocks until the parameters with the given ids may be read."""

_waiters: dict[int, Waiter] = {}
"""Waiters by the id of an unpublished parameter."""
RowReader = Callable[[torch.Tensor], None]
"""Blocks until rows of one parameter, by their numbers, may be read."""
_row_readers: dict[int, RowReader] = {}


def mark_unpublished(
    parameter: torch.Tensor, waiter: Waiter, row_reader: RowReader | None = None
) -> None:
    """Make reads of ``parameter`` call ``waiter`` first, until it is marked published.

    If there is a ``row_reader``, ``torch.nn.functional.embedding`` calls that instead.
    """
    _waiters[id(parameter)] = waiter
    if row_reader is not None:
        _row_readers[id(parameter)] = row_reader
    kind = type(parameter)
    if not issubclass(kind, Unpublished):
        parameter.__class__ = _unpublished(kind)


def mark_published(parameter: torch.Tensor) -> None:
    """Restore the class of ``parameter``: reads no longer wait."""
    _waiters.pop(id(parameter), None)
    _row_readers.pop(id(parameter), None)
    kind = type(parameter)
    if issubclass(kind, Unpublished):
        parameter.__class__ = kind.published


class Unpublished:
    """Base of the classes of unpublished parameters."""

    __slots__ = ()
    published: ClassVar[type[torch.Tensor]]
    """The parameter's class when it is published."""

    @classmethod
    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001  # a graph has no time
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # whatever the function returns
        """Wait for the weights that ``function`` reads, and call it."""
        del types
        keywords = kwargs or {}
        if function in _HARMLESS:
            # The call would come back here otherwise.
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                return function(*args, **keywords)
        if function is embedding:
            row_reader = _row_readers.get(id(keywords.get("weight", args[-1])))
            if row_reader is not None:
                row_reader(keywords.get("input", args[0]))
                # The weight stays unpublished: its other rows may be old.
                with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                    return function(*args, **keywords)
        tensors = list(_tensors_in((args, keywords)))
        for tensor in tensors:
            _wait_for(tensor)
        if not tensors:
            message = (
                f"{function} was called on a weight that step() is still updating: call"
                " optimizer.wait() first."
            )
            raise OptionError(message)
        # The tensors have their own classes by now, so the call does not come back here.
        return function(*args, **keywords)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:  # noqa: ANN401
        """Copy the new weight, when it is published."""
        return copy.deepcopy(_wait_for(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401
        """Save the new weight, when it is published."""
        return _wait_for(self).__reduce_ex__(protocol)


class _UnpublishedShard(Unpublished):
    """For DTensors, some of whose methods call no torch function."""

    __slots__ = ()

    def to_local(self, **kwargs: Any) -> Any:  # noqa: ANN401
        """Return the new shard, when it is published."""
        return _ask(self, "to_local", kwargs)

    def full_tensor(self, **kwargs: Any) -> Any:  # noqa: ANN401
        """Return the whole new weight, when it is published."""
        return _ask(self, "full_tensor", kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Redistribute the new weight, when it is published."""
        return _ask(self, "redistribute", kwargs, *args)


def _ask(shard: Any, name: str, kwargs: Mapping[str, Any], *args: object) -> Any:  # noqa: ANN401
    """Call a method of the shard's published class, at once if torch functions are disabled."""
    kind = type(shard)
    if issubclass(kind, Unpublished):  # else another thread has published it
        kind = kind.published
    if torch._C._is_torch_function_enabled():  # noqa: SLF001  # else the waiter itself calls
        _wait_for(shard)
    return getattr(kind, name)(shard, *args, **kwargs)


@functools.cache
def _unpublished(kind: type[torch.Tensor]) -> Any:  # noqa: ANN401  # a class made here
    common = _UnpublishedShard if hasattr(kind, "device_mesh") else Unpublished
    return type(f"Unpublished{kind.__name__}", (common, kind), {"__slots__": (), "published": kind})


def _wait_for(tensor: Any) -> Any:  # noqa: ANN401
    """Wait for the update of ``tensor`` and return it."""
    waiter = _waiters.get(id(tensor))
    if waiter is not None:
        waiter([id(tensor)])
    # The waiter of a schedule that is gone does nothing: the class is restored all the same. Not if
    # another thread has marked the tensor anew meanwhile.
    if _waiters.get(id(tensor)) is waiter:
        mark_published(tensor)
    return tensor


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, Unpublished):
        yield cast("torch.Tensor", value)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
