"""What a caller keeps with a commit: values and tensors, taken apart and put together again."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

_TENSOR, _TUPLE, _PAIRS = "__tensor__", "__tuple__", "__pairs__"


def take_apart(value: object, what: str) -> tuple[Any, list[torch.Tensor]]:
    """Return ``value`` as JSON and the tensors that were in it.

    Lists, tuples, dicts, numbers, text, booleans, None and tensors come back as they were (what is
    a class of its own upon tuple or dict, as a tuple or dict). Raises
    TypeError, which names the place, for anything else: an object would need pickle, which runs
    code when it is read.
    """
    tensors: list[torch.Tensor] = []
    return _plain(value, what, tensors), tensors


def put_together(plain: object, tensor_at: Callable[[int], torch.Tensor]) -> Any:  # noqa: ANN401
    """Return what ``take_apart`` was given; ``tensor_at`` returns its tensors by number."""
    if isinstance(plain, list):
        return [put_together(v, tensor_at) for v in plain]
    if not isinstance(plain, dict):
        return plain
    if _TENSOR in plain:
        return tensor_at(plain[_TENSOR])
    if _TUPLE in plain:
        return tuple(put_together(v, tensor_at) for v in plain[_TUPLE])
    if _PAIRS in plain:
        return {put_together(k, tensor_at): put_together(v, tensor_at) for k, v in plain[_PAIRS]}
    return {k: put_together(v, tensor_at) for k, v in plain.items()}


def _plain(value: object, where: str, tensors: list[torch.Tensor]) -> Any:  # noqa: ANN401
    if value is None or type(value) in {bool, int, float, str}:
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {_TENSOR: len(tensors) - 1}
    if isinstance(value, tuple):
        return {_TUPLE: _all_plain(value, where, tensors)}
    if isinstance(value, list):
        return _all_plain(value, where, tensors)
    if isinstance(value, dict):
        return _plain_dict(value, where, tensors)
    message = (
        f"{where} is a {type(value).__name__}: a commit keeps numbers, text, booleans, None, lists,"
        " tuples, dicts and tensors. Keep what it is made from."
    )
    raise TypeError(message)


def _all_plain(values: Sequence[object], where: str, tensors: list[torch.Tensor]) -> list[Any]:
    return [_plain(v, f"{where}[{i}]", tensors) for i, v in enumerate(values)]


def _plain_dict(value: dict[Any, object], where: str, tensors: list[torch.Tensor]) -> Any:  # noqa: ANN401
    simple = all(type(key) is str for key in value) and not {_TENSOR, _TUPLE, _PAIRS} & set(value)
    if simple:
        return {k: _plain(v, f"{where}[{k!r}]", tensors) for k, v in value.items()}
    pairs = [
        [_plain(k, f"a key of {where}", tensors), _plain(v, f"{where}[{k!r}]", tensors)]
        for k, v in value.items()
    ]
    return {_PAIRS: pairs}
