"""Builds the model that a command line names, on the meta device."""

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.measure.known_models import KNOWN

Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional and keyword arguments of a forward."""


@dataclass(frozen=True, eq=False, slots=True)
class NamedModel:
    """A model on the meta device, with its name."""

    name: str
    module: nn.Module
    config: Any = None
    """Transformers' configuration; None: a function built the model."""
    inputs: Inputs | None = None
    """What its function returned beside it; None: nothing."""
    dtype: torch.dtype | None = None
    """That its parameters were cast to; None: they are as they were made."""


def build_model(name: str, dtype: torch.dtype | None = None) -> NamedModel:
    """Return the model called ``name``, on the meta device.

    Args:
        name: A name of KNOWN; a configuration of transformers, as a file or the folder of a
            ``config.json``; or ``module:function``, which is called without arguments, and returns
            a module, or a module and the arguments of its forward as a tuple or a dict. Modules
            are looked for in the working directory too.
        dtype: Of floating point parameters; None: as the configuration or the function has it.

    Raises:
        OptionError: It is no model, or transformers is needed and not installed.
    """
    path = Path(name)
    if name in KNOWN:
        found = _from_config(name, dict(KNOWN[name]), dtype)
    elif path.is_dir() or path.is_file():
        found = _from_config(name, _read(path), dtype)
    elif ":" in name:
        with torch.device("meta"):
            module, inputs = call_function(name)
        found = NamedModel(name, module, None, inputs, dtype)
    else:
        message = (
            f"MODEL={name!r} was given: it is none of {', '.join(KNOWN)}, no file or folder that"
            " is there, and no module:function."
        )
        raise OptionError(message)
    if dtype is not None:
        found.module.to(dtype)
    if not any(p.numel() for p in found.module.parameters()):
        message = f"MODEL={name!r} was given, which has no parameters: there is nothing to place."
        raise OptionError(message)
    return found


def from_config(config: Any, device: str = "meta") -> nn.Module:  # noqa: ANN401
    """Return a model of transformers: a causal language model where there is one of its kind.

    Args:
        config: A configuration of transformers.
        device: Where its parameters are made.

    Raises:
        OptionError: transformers cannot build it.
    """
    from transformers import AutoModel, AutoModelForCausalLM  # noqa: PLC0415  # optional

    kind: Any = AutoModelForCausalLM if is_causal(config) else AutoModel
    try:
        with torch.device(device):
            model: Any = kind.from_config(config)
    except Exception as error:  # any that a model's own code raises
        message = f"No model could be made of the configuration: {first_line(error)}"
        raise OptionError(message) from error
    if kind is AutoModelForCausalLM and getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # what it falls back to, with a warning at its first loss
    made: nn.Module = model
    return made


def is_causal(config: Any) -> bool:  # noqa: ANN401  # transformers' own
    """Return whether transformers has a causal language model of a configuration's kind.

    Args:
        config: A configuration of transformers.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING  # noqa: PLC0415  # optional

    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING


def first_line(error: Exception) -> str:
    """Return what an error says in one line, with its class.

    Args:
        error: Any.
    """
    said = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _from_config(name: str, given: dict[str, Any], dtype: torch.dtype | None) -> NamedModel:
    try:
        from transformers import AutoConfig  # noqa: PLC0415  # optional
    except ImportError as error:
        message = (
            f"MODEL={name!r} was given, which transformers builds, and it is not installed:"
            " `pip install transformers`, or name a module:function."
        )
        raise OptionError(message) from error
    kind = given.pop("model_type", None)
    if not isinstance(kind, str):
        message = f"MODEL={name!r} was given: its configuration says no model_type."
        raise OptionError(message)
    try:
        config = AutoConfig.for_model(kind, **given)
    except (ValueError, TypeError, KeyError) as error:
        message = f"MODEL={name!r} was given: transformers does not take it: {first_line(error)}"
        raise OptionError(message) from error
    if dtype is not None:
        config.dtype = dtype
    return NamedModel(name, from_config(config), config)


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"MODEL={str(path)!r} was given: {file} is no configuration: {error}."
        raise OptionError(message) from error
    if not isinstance(given, dict):
        message = f"MODEL={str(path)!r} was given: {file} is no JSON object."
        raise OptionError(message)
    return given


def call_function(name: str, option: str = "MODEL") -> tuple[nn.Module, Inputs | None]:
    """Call a user's function that builds a model.

    Args:
        name: ``module:function``; the module may be in the working directory.
        option: How errors call what the user has given.

    Returns:
        The module, and the arguments of its forward; None: it returned none.

    Raises:
        OptionError: It is not there, it raised, or it returned no module.
    """
    where, _, function = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # behind all others, whose modules it must not hide
    try:
        build: Callable[[], object] = getattr(importlib.import_module(where), function)
    except (ImportError, AttributeError) as error:
        message = f"{option}={name!r} was given: {error}."
        raise OptionError(message) from error
    except Exception as error:  # any that the user's module raises
        message = f"{option}={name!r} was given, and importing {where} raised {first_line(error)}"
        raise OptionError(message) from error
    try:
        made = build()
    except Exception as error:  # any that the user's function raises
        message = f"{option}={name!r} was given, and it raised {first_line(error)}"
        if torch.get_default_device().type == "meta":
            message += (
                ". It is called under torch.device('meta'), where tensors have no values: let it"
                " take no argument and read none (.item(), .numpy())."
            )
        raise OptionError(message) from error
    given = None
    if isinstance(made, tuple) and len(made) == 2:
        made, given = made
    if not isinstance(made, nn.Module):
        message = f"{option}={name!r} was given: it returned {type(made).__name__}, no nn.Module."
        raise OptionError(message)
    return made, None if given is None else _arguments(given)


def _arguments(given: object) -> Inputs:
    if isinstance(given, Mapping):
        return (), given
    return (given if isinstance(given, tuple) else (given,)), {}


def moved_to(inputs: Inputs, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Return the arguments of a forward on another device; floating point ones in another dtype.

    Args:
        inputs: The arguments.
        device: Where the model's parameters are.
        dtype: Of the model's parameters.
    """

    def moved(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device=device, dtype=dtype if value.is_floating_point() else value.dtype)

    given, named = inputs
    return tuple(moved(each) for each in given), {k: moved(v) for k, v in named.items()}
