"""From the tensors of a checkpoint to a model's own: what transformers renames, merges and splits.

[Note: Conversion] transformers (from version 5) computes with other tensors than its checkpoints
have: experts as one tensor, vision towers under other names. Its own conversions say which tensors
of a file make which of the model; here they are asked, tensor by tensor, so that memory is that of
one tensor and its sources. Other models have what their files have.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Read = Callable[[str], torch.Tensor]
"""Returns a tensor of the files by its name there."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a tensor of a model is made of."""

    shape: tuple[int, ...]
    sources: tuple[str, ...]
    """Names in the files."""
    make: Callable[[Read], torch.Tensor] | None = None
    """None: it is the one source."""


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether ``model`` is a PreTrainedModel; transformers is not imported for that."""
    module = sys.modules.get("transformers.modeling_utils")
    return module is not None and isinstance(model, module.PreTrainedModel)


def origins_of(model: nn.Module | None, shapes: Mapping[str, Sequence[int]]) -> dict[str, Origin]:
    """Return what the tensors of ``model`` are made of in files with tensors of these ``shapes``.

    By the model's names; what the files have besides is there by its own.
    """
    as_they_are = {name: Origin(tuple(shape), (name,)) for name, shape in shapes.items()}
    if model is None or not is_of_transformers(model):
        return as_they_are
    try:
        from transformers import conversion_mapping, core_model_loading  # noqa: PLC0415
    except ImportError:  # before version 5, whose models have what their files have
        return as_they_are
    given: Any = model
    conversions = conversion_mapping.get_model_conversion_mapping(given)
    return as_they_are | _converted(model, shapes, conversions, core_model_loading)


def _converted(
    model: Any,  # noqa: ANN401  # another library's
    shapes: Mapping[str, Sequence[int]],
    conversions: Iterable[Any],
    theirs: Any,  # noqa: ANN401  # transformers.core_model_loading
) -> dict[str, Origin]:
    """Return what is renamed or made, as ``from_pretrained`` would have it."""
    renamings = [c for c in conversions if isinstance(c, theirs.WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, theirs.WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    known = dict(model.named_parameters(remove_duplicate=False))
    known |= dict(model.named_buffers(remove_duplicate=False))
    origins: dict[str, Origin] = {}
    parts: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(shapes, key=theirs.dot_natural_key):
        given = (model.base_model_prefix, known)
        target, pattern = theirs.rename_source_key(name, renamings, converters, *given)
        if target not in known and name in known:
            target, pattern = theirs.rename_source_key(name, [], [], *given)
        if pattern is not None:
            parts.setdefault(target, []).append((name, pattern))
        elif target in known:
            origins.setdefault(target, Origin(tuple(shapes[name]), (name,)))
    for target, sources in parts.items():
        origins |= _made(model, target, sources, by_pattern[sources[0][1]], shapes)
    return origins


def _made(
    model: Any,  # noqa: ANN401
    target: str,
    sources: Sequence[tuple[str, str]],
    converter: Any,  # noqa: ANN401  # a WeightConverter
    shapes: Mapping[str, Sequence[int]],
) -> dict[str, Origin]:
    """Return what ``converter`` makes of ``sources``, each with the pattern that it matched."""

    def convert(read: Read) -> dict[str, torch.Tensor]:
        fresh = deepcopy(converter)
        for name, pattern in sources:
            fresh.add_tensor(target, name, pattern, read(name))
        made = fresh.convert(target, model=model, config=model.config)
        return {n: t[0] if isinstance(t, list) else t for n, t in made.items()}

    def maker(name: str) -> Callable[[Read], torch.Tensor]:
        return lambda read: convert(read)[name]

    names = tuple(name for name, _ in sources)
    alike = convert(lambda name: torch.empty(tuple(shapes[name]), device="meta"))
    return {n: Origin(tuple(t.shape), names, maker(n)) for n, t in alike.items()}
