"""Bytes of activations, and operations, of one micro-batch: traced with fake tensors.

A deep model of transformers is traced with two layers and with three. The difference counts for
each further layer.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tensorstow.base.errors import OptionError
from tensorstow.fsdp.traced_activations import Activations, loss_of, tracer_quiet, watch
from tensorstow.fsdp.traced_placement import KEPT, TracedPlacement
from tensorstow.measure.adapters import with_adapters
from tensorstow.measure.models import (
    NamedModel,
    call_function,
    first_line,
    from_config,
    moved_to,
)
from tensorstow.measure.user_code import UserCodeError

_WHOLE_LAYERS = 4
"""Deeper models are traced with two layers and with three."""


def trace(
    model: NamedModel, batch: int, sequence: int, placed: TracedPlacement = KEPT
) -> Activations:
    """Return the activations and operations of one micro-batch of token ids.

    Raises:
        OptionError: It cannot be traced, for example because it depends on values.
    """
    layers = getattr(model.config, "num_hidden_layers", 0)
    with _refusing(model, "Leave --batch and --seq out: activations then do not count."):
        if layers <= _WHOLE_LAYERS or getattr(model.config, "layer_types", None):
            return _trace(model.config, model.lora, batch, sequence, placed)
        two, three = (
            _trace(_with_layers(model.config, n), model.lora, batch, sequence, placed)
            for n in (2, 3)
        )
        return two.extended(three, layers - 2)


def trace_function(model: NamedModel, placed: TracedPlacement = KEPT) -> Activations:
    """Return the same for a model whose function also returned the arguments of its forward.

    Its function is called once more.

    Raises:
        OptionError: It cannot be traced, for example because it depends on values.
    """
    advice = "Let the function return the module alone: activations then do not count."
    with _refusing(model, advice), FakeTensorMode():
        module, inputs = call_function(model.name)
        _cast(module.train(), model.dtype)
        module = module if model.lora is None else with_adapters(module, model.lora)
        first = next(module.parameters())
        positional, named = moved_to(inputs or ((), {}), first.device, first.dtype)
        return watch(
            module, placed, lambda: torch.autograd.backward(loss_of(module(*positional, **named)))
        )


def _cast(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Cast floating point parameters; ``Module.to`` cannot exchange fake ones."""
    cast: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay tied
    for part in module.modules() if dtype is not None else ():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_floating_point() and parameter not in cast:
                cast[parameter] = nn.Parameter(parameter.to(dtype), parameter.requires_grad)
            setattr(part, name, cast.get(parameter, parameter))


@contextmanager
def _refusing(model: NamedModel, advice: str) -> Iterator[None]:
    """Raise OptionError for any error of a model that runs without values."""
    try:
        with tracer_quiet():
            yield
    except OptionError:
        raise
    except Exception as error:  # any that a model's own code raises
        raised = error.__cause__ if isinstance(error, UserCodeError) else None
        reason = first_line(raised or error)
        message = f"{model.name} cannot be traced without values: {reason}. {advice}"
        raise OptionError(message) from error


def between(one: Activations, whole: Activations, batch: int, part: int) -> Activations:
    """Return the activations and operations of a micro-batch of ``part`` sequences, at most.

    They are between those of ``one`` sequence and of a ``whole`` batch. Operations and bytes grow
    linearly with the number of sequences. The peak is the maximum of several linear functions, so
    the line between two of its values is an upper bound.
    """

    def at(name: str) -> int:
        low, high = getattr(one, name), getattr(whole, name)
        return int(low + -(-(high - low) * (part - 1) // (batch - 1)))

    activations = Activations(*(at(field.name) for field in fields(Activations)))
    # Storages that are small in one sequence are large in several: only bounds are known.
    return replace(
        activations,
        early_small=min(part * one.early_small, activations.early),
        early_large=activations.early,
        early_large_together=activations.early_together,
        large_together=activations.together,
    )


def _with_layers(config: Any, layers: int) -> Any:  # noqa: ANN401  # transformers' own
    changed = copy.deepcopy(config)
    changed.num_hidden_layers = layers
    return changed


def _trace(
    config: Any,  # noqa: ANN401  # transformers' own
    lora: int | None,
    batch: int,
    sequence: int,
    placed: TracedPlacement,
) -> Activations:
    with FakeTensorMode():
        module = from_config(config, "cpu").train()
        module = module if lora is None else with_adapters(module, lora)
        ids = torch.zeros((batch, sequence), dtype=torch.long)

        def train() -> None:
            module(input_ids=ids, labels=ids, use_cache=False).loss.backward()

        return watch(module, placed, train)
