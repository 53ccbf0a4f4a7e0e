"""Builds the model that a command line names, on the meta device."""

import contextlib
import importlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.base.regular_file import read_text
from tensorstow.measure.adapters import with_adapters
from tensorstow.measure.known_models import KNOWN
from tensorstow.measure.user_code import UserCodeError

_MOST_LAYERS = 10_000
"""A configuration with more layers is a mistake, and would take minutes to build."""
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
    """Arguments that its function returned with the module; None: it returned none."""
    dtype: torch.dtype | None = None
    """The dtype that its parameters were cast to; None: they were not cast."""
    lora: int | None = None
    """The rank of adapters, which alone are trained; None: there are none."""


def build_model(name: str, dtype: torch.dtype | None = None, lora: int | None = None) -> NamedModel:
    """Return the model called ``name``, on the meta device.

    Args:
        name: A name of KNOWN, or the Hub's for it; a configuration of transformers, as a file or
            the folder of a ``config.json``; or ``module:function``, which is called without
            arguments, and returns a module, or a module and the arguments of its forward as a tuple
            or a dict. The working directory is searched for modules, too.
        dtype: The dtype of floating point parameters; None: the configuration's or the function's.
        lora: The rank of adapters to add; None: the model is trained as it is.

    Raises:
        OptionError: The name is no model, or transformers is required and not installed.
        UserCodeError: The function raised an error.
    """
    path = Path(name)
    catalog_name = name if name in KNOWN else _short_name(name)
    if catalog_name in KNOWN and (catalog_name == name or not _exists(path)):
        model = _from_config(name, dict(KNOWN[catalog_name]), dtype)
    elif _exists(path):
        model = _from_config(name, _read(path), dtype)
    elif ":" in name:
        with torch.device("meta"):
            module, inputs = call_function(name)
        model = NamedModel(name, module, None, inputs, dtype)
    else:
        near = get_close_matches(_short_name(name), KNOWN, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        message = (
            f"MODEL={name!r} was given: it is none of {', '.join(KNOWN)}, no existing file or"
            f" folder, and no module:function.{hint}"
        )
        raise OptionError(message)
    if dtype is not None:
        model.module.to(dtype)
    if not any(p.numel() for p in model.module.parameters()):
        message = f"MODEL={name!r} was given, which has no parameters: there is nothing to place."
        raise OptionError(message)
    if lora is None:
        return model
    return replace(model, module=with_adapters(model.module, lora), lora=lora)


def _short_name(name: str) -> str:
    """Return a name of the Hub without its owner and variant: meta-llama/Llama-2-7b-chat-hf."""
    short = name.rpartition("/")[2].lower().removeprefix("meta-")
    for variant in ("-hf", "-chat", "-instruct"):
        short = short.removesuffix(variant)
    # Of the same sizes: 3.1 differs from 3 in how positions are scaled.
    return re.sub(r"^llama-?3(\.1)?-", "llama-3-", short)


def from_config(config: Any, device: str = "meta") -> nn.Module:  # noqa: ANN401
    """Return a model of transformers: a causal language model if its kind has one.

    Raises:
        OptionError: transformers cannot build it.
    """
    from transformers import AutoModel, AutoModelForCausalLM  # noqa: PLC0415  # optional

    kind: Any = AutoModelForCausalLM if is_causal(config) else AutoModel
    try:
        with torch.device(device):
            model: Any = kind.from_config(config)
    except Exception as error:  # any that a model's own code raises
        message = f"transformers cannot build a model from the configuration: {first_line(error)}"
        raise OptionError(message) from error
    if kind is AutoModelForCausalLM and getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # the fallback, without its warning at the first loss
    module: nn.Module = model
    return module


def is_causal(config: Any) -> bool:  # noqa: ANN401  # transformers' own
    """Return whether transformers has a causal language model of a configuration's kind."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING  # noqa: PLC0415  # optional

    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, with its class."""
    said = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _from_config(name: str, settings: dict[str, Any], dtype: torch.dtype | None) -> NamedModel:
    try:
        from transformers import AutoConfig  # noqa: PLC0415  # optional
    except ImportError as error:
        message = (
            f"MODEL={name!r} was given, which needs transformers, and it is not installed:"
            " `pip install transformers`, or name a module:function."
        )
        raise OptionError(message) from error
    kind = settings.pop("model_type", None)
    if not isinstance(kind, str):
        message = f"MODEL={name!r} was given: its configuration has no model_type."
        raise OptionError(message)
    try:
        config = AutoConfig.for_model(kind, **settings)
    except Exception as error:  # any that a configuration's own code raises
        message = f"MODEL={name!r} was given: transformers rejects it: {first_line(error)}"
        raise OptionError(message) from error
    layers = getattr(config, "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        message = f"MODEL={name!r} was given: {layers} layers are more than {_MOST_LAYERS:,}."
        raise OptionError(message)
    if dtype is not None:
        config.dtype = dtype
    return NamedModel(name, from_config(config), config)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # not a path: too long, or with a zero byte
        return False


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        settings = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError) as error:
        message = f"MODEL={str(path)!r} was given: {file} is no configuration: {error}."
        raise OptionError(message) from error
    if not isinstance(settings, dict):
        message = f"MODEL={str(path)!r} was given: {file} is no JSON object."
        raise OptionError(message)
    return settings


def call_function(name: str, option: str = "MODEL") -> tuple[nn.Module, Inputs | None]:
    """Call a user's function; return its module, and the arguments of its forward if it has some.

    Args:
        name: ``module:function``; the module may be in the working directory.
        option: The option's name in errors.

    Raises:
        OptionError: The function does not exist, or it returned no module.
        UserCodeError: The function, or its module, raised an error.
    """
    module_name, _, function = name.partition(":")
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.append(directory)  # last, so that it hides no installed module
    option = f"{option}={name!r}"
    try:
        source = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # any that the user's module raises
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            message = f"{option} was given: {error}."
            raise OptionError(message) from error
        raise UserCodeError(option, error, _file_of(module_name)) from error
    build: Callable[[], object] | None = getattr(source, function, None)
    if build is None:
        near = get_close_matches(function, vars(source), 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        message = f"{option} was given: {module_name} has no {function}.{hint}"
        raise OptionError(message)
    try:
        module = build()
    except (Exception, SystemExit) as error:  # any that the user's function raises
        of_values = isinstance(error, NotImplementedError) or "meta" in str(error)
        hint = ""
        if of_values and torch.get_default_device().type == "meta":
            hint = (
                "\nIt is called under torch.device('meta'), where tensors have no values: it must"
                " take no argument and read no value (.item(), .numpy())."
            )
        raise UserCodeError(option, error, getattr(source, "__file__", None), hint) from error
    inputs = None
    if isinstance(module, tuple) and len(module) == 2:
        module, inputs = module
    if not isinstance(module, nn.Module):
        message = f"{option} was given: it returned {type(module).__name__}, no nn.Module."
        raise OptionError(message)
    return module, None if inputs is None else _arguments(inputs)


def _file_of(module_name: str) -> str | None:
    """Return the file of a module that could not be imported."""
    with contextlib.suppress(ImportError, ValueError):
        spec = find_spec(module_name)
        return None if spec is None else spec.origin
    return None


def _arguments(inputs: object) -> Inputs:
    if isinstance(inputs, Mapping):
        return (), inputs
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def moved_to(inputs: Inputs, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Return the arguments of a forward on its model's device, floating point ones in its dtype."""

    def moved(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device=device, dtype=dtype if value.is_floating_point() else value.dtype)

    positional, named = inputs
    return tuple(moved(value) for value in positional), {k: moved(v) for k, v in named.items()}
