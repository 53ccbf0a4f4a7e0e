"""Takes the ``extra`` values of a commit apart into JSON and tensors, and rebuilds them."""

import base64
import io
import logging
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from tensorstow.store.tensors import tensor_bytes

logger = logging.getLogger("tensorstow")

_TENSOR, _TUPLE, _PAIRS = "__tensor__", "__tuple__", "__pairs__"
_BYTES, _SET, _FROZEN_SET = "__bytes__", "__set__", "__frozenset__"
_ARRAY, _SCALAR = "__array__", "__scalar__"
_NAMESPACE, _PATH = "__namespace__", "__path__"
_DTYPE, _DEVICE = "__dtype__", "__device__"
_TAGS = frozenset(
    {
        *(_TENSOR, _TUPLE, _PAIRS, _BYTES, _SET, _FROZEN_SET, _ARRAY, _SCALAR),
        *(_NAMESPACE, _PATH, _DTYPE, _DEVICE),
    }
)
_MOST_NESTED = 100
_SCALAR_KINDS = frozenset("biufcSUmM")


def flatten(value: object, name: str) -> tuple[Any, list[torch.Tensor]]:
    """Return ``value`` as JSON and the tensors that were in it.

    Lists, tuples, sets, dicts, numbers, text, bytes, booleans, None, tensors, numpy's arrays and
    scalars, argparse's namespaces, paths, torch's dtypes and devices come back as they were (a
    subclass of tuple, set or dict comes back as a tuple, set or dict). Raises TypeError, which
    names the place, for anything else: an object would need pickle, which runs code when it is
    read. DTypeError for a tensor without plain elements.
    """
    tensors: list[torch.Tensor] = []
    return _plain(value, name, tensors, 0), tensors


def check_extra(extra: object) -> None:
    """Raise TypeError or DTypeError for an ``extra`` that a commit could not keep."""
    flatten(extra_of(extra), "extra")


def is_checked(extra: Callable[[], object] | None) -> bool:
    """Return whether the values that ``extra`` returns can be stored; raise if they cannot.

    False if it raises for now: it may refer to an object that is made later, such as a scheduler of
    this optimizer. It is called again at the first step, where errors are raised.
    """
    if extra is None:
        return True
    try:
        values = extra()
    except Exception:  # a user's function: the first step raises it
        logger.debug("extra() raised at construction; the first step calls it again", exc_info=True)
        return False
    check_extra(values)
    return True


def extra_of(extra: object) -> dict[str, Any]:
    """Return ``extra`` as a dict; raise TypeError if it is none."""
    if not isinstance(extra, Mapping):
        message = (
            f"extra is a {type(extra).__name__}: it is a dict, or a function that returns one."
        )
        raise TypeError(message)
    return dict(extra)


def inflate(plain: object, tensor_at: Callable[[int], torch.Tensor]) -> Any:  # noqa: ANN401
    """Rebuild the value given to ``flatten``; ``tensor_at`` returns its tensors by number."""
    if isinstance(plain, list):
        return [inflate(v, tensor_at) for v in plain]
    if not isinstance(plain, dict):
        return plain
    for mark, make in _MAKERS.items():
        if mark in plain:
            return make(plain[mark], tensor_at)
    return {k: inflate(v, tensor_at) for k, v in plain.items()}


def _plain(value: object, place: str, tensors: list[torch.Tensor], depth: int) -> Any:  # noqa: ANN401
    # By type: a float64 of numpy is a float, and would come back as a plain one.
    if value is None or type(value) in {bool, int, float, str}:
        return value
    if isinstance(value, dict | list | tuple | set | frozenset):
        if depth == _MOST_NESTED:
            message = (
                f"{place[:80]}... is nested more than {_MOST_NESTED} deep, or contains itself: a"
                " commit does not keep that."
            )
            raise TypeError(message)
        if isinstance(value, dict):
            return _plain_dict(value, place, tensors, depth)
        plain = [_plain(v, f"{place}[{i}]", tensors, depth + 1) for i, v in enumerate(value)]
        marks = ((tuple, _TUPLE), (set, _SET), (frozenset, _FROZEN_SET))
        return next(({mark: plain} for kind, mark in marks if isinstance(value, kind)), plain)
    if type(value) is Namespace:
        return {_NAMESPACE: _plain(vars(value), place, tensors, depth)}
    return _plain_leaf(value, place, tensors)


def _plain_leaf(value: object, place: str, tensors: list[torch.Tensor]) -> dict[str, Any]:
    # First: a bytes_ of numpy is bytes too.
    if isinstance(value, np.generic):
        return {_SCALAR: _scalar(value, place)}
    named = ((PurePath, _PATH), (torch.dtype, _DTYPE), (torch.device, _DEVICE))
    for kind, mark in named:
        if isinstance(value, kind):
            return {mark: str(value).removeprefix("torch.") if mark == _DTYPE else str(value)}
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        tensor_bytes(value)  # raises if there are none to keep
        tensors.append(value)
        return {_TENSOR: len(tensors) - 1}
    # Other subclasses, such as masked arrays, have more than their elements.
    if isinstance(value, np.ndarray) and type(value) in {np.ndarray, np.memmap}:
        tensors.append(_array(value, place))
        return {_ARRAY: len(tensors) - 1}
    message = (
        f"{place} is a {type(value).__name__}: a commit keeps numbers, text, bytes, booleans, None,"
        " lists, tuples, sets, dicts, namespaces, paths, dtypes, devices, tensors and numpy's"
        " arrays. Keep what it is made from."
    )
    raise TypeError(message)


def _plain_dict(
    value: dict[Any, object], place: str, tensors: list[torch.Tensor], depth: int
) -> Any:  # noqa: ANN401
    # A dict with a key that looks like a tag is kept as pairs.
    if all(type(key) is str for key in value) and _TAGS.isdisjoint(value):
        return {k: _plain(v, f"{place}[{k!r}]", tensors, depth + 1) for k, v in value.items()}
    pairs = [
        [
            _plain(k, f"a key of {place}", tensors, depth + 1),
            _plain(v, f"{place}[{k!r}]", tensors, depth + 1),
        ]
        for k, v in value.items()
    ]
    return {_PAIRS: pairs}


def _scalar(value: np.generic, place: str) -> list[str]:
    """Return its dtype and bytes, so that a float32 is restored as a float32, not as a float."""
    if value.dtype.kind not in _SCALAR_KINDS:
        message = (
            f"{place} is a numpy scalar of dtype {value.dtype}: numbers, texts and times are kept."
            " Keep it as an array, or what it is made from."
        )
        raise TypeError(message)
    return [value.dtype.str, value.tobytes().hex()]


def _array(value: np.ndarray[Any, Any], place: str) -> torch.Tensor:
    """Return the array as numpy writes it to files, with its dtype, order and shape."""
    descr = np.lib.format.dtype_to_descr(value.dtype)
    # A dtype that numpy's files do not give back would return as another one.
    if value.dtype.hasobject or np.lib.format.descr_to_dtype(descr) != value.dtype:
        message = (
            f"{place} is a numpy array of dtype {value.dtype}: only plain elements are kept, for"
            " objects would need pickle. Convert it first."
        )
        raise TypeError(message)
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(value), allow_pickle=False)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _read_array(stored: torch.Tensor) -> np.ndarray[Any, Any]:
    if stored.numel() == 0:  # a placeholder, if only the other values are wanted
        return np.empty(0)
    file = io.BytesIO(stored.cpu().numpy().tobytes())
    array: np.ndarray[Any, Any] = np.lib.format.read_array(file, allow_pickle=False)
    return array


def _read_scalar(stored: list[str]) -> Any:  # noqa: ANN401
    name, text = stored
    dtype = np.dtype(name)
    if dtype.kind not in _SCALAR_KINDS:  # bytes as an object are an address
        message = f"A numpy scalar of dtype {name!r} was stored: numbers, texts and times are kept."
        raise TypeError(message)
    scalar: Any = np.ndarray((), dtype, buffer=bytes.fromhex(text))[()]
    return scalar


def _read_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        message = f"The dtype {name!r} was stored, and this torch ({torch.__version__}) has none."
        raise TypeError(message)
    return dtype


TensorAt = Callable[[int], torch.Tensor]

_MAKERS: dict[str, Callable[[Any, TensorAt], Any]] = {
    _TENSOR: lambda v, tensor_at: tensor_at(v),
    _TUPLE: lambda v, tensor_at: tuple(inflate(v, tensor_at)),
    _PAIRS: lambda v, tensor_at: {inflate(k, tensor_at): inflate(x, tensor_at) for k, x in v},
    _BYTES: lambda v, _: base64.b64decode(v),
    _SET: lambda v, tensor_at: set(inflate(v, tensor_at)),
    _FROZEN_SET: lambda v, tensor_at: frozenset(inflate(v, tensor_at)),
    _ARRAY: lambda v, tensor_at: _read_array(tensor_at(v)),
    _SCALAR: lambda v, _: _read_scalar(v),
    _NAMESPACE: lambda v, tensor_at: Namespace(**inflate(v, tensor_at)),
    _PATH: lambda v, _: Path(v),
    _DTYPE: lambda v, _: _read_dtype(v),
    _DEVICE: lambda v, _: torch.device(v),
}
