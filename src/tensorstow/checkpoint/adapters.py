"""Adapters of peft: the names that a model has for the tensors of its base, and first values.

peft puts its own modules around those of the base. A file of the base has its tensors under
shorter names, and has none of the adapters. Only this module knows about peft, and it does not
import peft: only a program that has imported it has a model with adapters.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.tensors.placeholder import swap_parameter

_WRAPPERS = {
    ("peft.peft_model", "PeftModel"): ("base_model",),
    ("peft.mixed_model", "PeftMixedModel"): ("base_model",),
    ("peft.tuners.tuners_utils", "BaseTuner"): ("model",),
    ("peft.tuners.tuners_utils", "BaseTunerLayer"): ("base_layer",),
    ("peft.utils.other", "AuxiliaryTrainingWrapper"): ("original_module", "token_adapter"),
    ("tensorstow.measure.adapters", "AdaptedModel"): ("base_model",),
    ("tensorstow.measure.adapters", "Tuner"): ("model",),
    ("tensorstow.measure.adapters", "Adapted"): ("base_layer",),
}
"""Classes of peft, and of the planner, and the children that a wrapper is put around."""
_COPIES = "modules_to_save"
"""The child of a wrapper that has a trained copy of the module for each adapter."""
_DRAWN = (True, False, "gaussian")
"""Kinds of ``init_lora_weights`` that draw random numbers and read no weight of the base."""
_KEEPING_BASE = (*_DRAWN, "eva", "mica", "orthogonal")
"""Kinds that leave the weights of the base as they are."""


class Adapters:
    """The adapters of one model, and the names of the tensors below them."""

    def __init__(self, model: nn.Module) -> None:
        """Read the names of all tensors of ``model``, which need not have adapters."""
        self.base = model
        """The model inside all wrappers."""
        self.base_names: dict[str, str] = {}
        """Names in the base, by the model's names; the adapters' tensors have none."""
        self.names: set[str] = set()
        """The model's names of the adapters' own tensors."""
        self._model = model
        self._walk(model, "", "")

    def initialize(self) -> None:
        """Give adapters on the meta device the first values that peft draws for them.

        Layers are drawn in peft's order, with as many random numbers: after the same
        ``torch.manual_seed`` the values are those of ``get_peft_model`` over a base on the CPU.
        """
        configurations = self._configurations()
        for _, layer, adapter in list(self._layers_on_meta()):
            _initialize(layer, adapter, configurations[adapter].init_lora_weights)

    def validate(self, is_in_files: Callable[[str], bool] | None) -> None:
        """Raise OptionError if peft computes an adapter from the base's weights, or changes those.

        ``is_in_files``: whether the files that are read have a tensor of the model's name; None: no
        files are read.
        """
        if not self.names or (is_in_files is not None and all(map(is_in_files, self.names))):
            return  # the files are of the model with its adapters
        drawn: set[int] = set()
        for name, layer, adapter in self._layers_on_meta():
            reason = self._why_not_drawn(layer, adapter)
            if reason:
                raise _refuse_unread(name, reason)
            drawn.update(id(parameter) for parameter in _parameters_of(layer, adapter))
        for name, parameter in self._model.named_parameters():
            if name in self.names and parameter.is_meta and id(parameter) not in drawn:
                raise _refuse_unread(name, "it is of another kind than LoRA")
        change = None if is_in_files is None else self._change_of_base()
        if change is not None:
            message = (
                f"weights= was given, and peft has changed the weights of the base ({change}):"
                " those of the files are others. Leave weights= out, and pass the model with the"
                " values that peft gave it."
            )
            raise OptionError(message)

    def _walk(self, module: nn.Module, name: str, base: str | None) -> None:
        """Note the names below ``module``; ``base``: its name in the base, None for an adapter."""
        around = _wrapped_children(module)
        if base == "" and not around:
            self.base = module
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):  # noqa: SLF001
            if tensor is not None and (base is None or around):
                self.names.add(_join(name, key))
            elif tensor is not None and base is not None:
                self.base_names[_join(name, key)] = _join(base, key)
        for key, child in module._modules.items():  # noqa: SLF001  # those with two names twice
            if child is None:
                continue
            if around and key == _COPIES:
                for adapter, copy in child.named_children():
                    self._walk(copy, f"{_join(name, key)}.{adapter}", base)
            elif around:
                self._walk(child, _join(name, key), base if key in around else None)
            else:
                self._walk(child, _join(name, key), None if base is None else _join(base, key))

    def _configurations(self) -> Mapping[str, Any]:
        """Return peft's configurations, by the names of the adapters."""
        configurations = (getattr(module, "peft_config", None) for module in self._model.modules())
        return next((c for c in configurations if isinstance(c, dict)), {})

    def _layers_on_meta(self) -> Iterator[tuple[str, Any, str]]:
        """Yield layers of LoRA with parameters on the meta device, and the name of the adapter."""
        kind = _class_of("peft.tuners.lora.layer", "LoraLayer")
        if kind is None or not self.names:
            return
        for adapter in self._configurations():
            for name, layer in self._model.named_modules():
                if isinstance(layer, kind) and any(
                    p.is_meta for p in _parameters_of(layer, adapter)
                ):
                    yield name, layer, adapter

    def _why_not_drawn(self, layer: Any, adapter: str) -> str | None:  # noqa: ANN401  # peft's
        """Return why an adapter needs more than random numbers; None: it needs no more."""
        configuration = self._configurations()[adapter]
        kind = configuration.init_lora_weights
        if kind not in _DRAWN:
            return f"init_lora_weights={kind!r} computes it from the weights of the base"
        if adapter in getattr(layer, "lora_variant", {}):
            variant = type(layer.lora_variant[adapter]).__name__
            return f"its {variant} has values that peft computes from the weights of the base"
        if getattr(configuration, "ensure_weight_tying", False):
            return "ensure_weight_tying=True shares it with another layer"
        return None

    def _change_of_base(self) -> str | None:
        """Return what made peft change the weights of the base; None: it left them."""
        for configuration in self._configurations().values():
            kind = getattr(configuration, "init_lora_weights", True)
            if kind not in _KEEPING_BASE:
                return f"init_lora_weights={kind!r}"
            if getattr(configuration, "kasa_config", None) is not None:
                return "kasa_config"
        merged = (getattr(module, "merged_adapters", None) for module in self._model.modules())
        return "merge_adapter()" if any(merged) else None


def _wrapped_children(module: nn.Module) -> tuple[str, ...]:
    """Return the children that a wrapper of peft is put around; none of other modules."""
    for (place, name), children in _WRAPPERS.items():
        kind = _class_of(place, name)
        if kind is not None and isinstance(module, kind):
            return children
    return ()


def _class_of(place: str, name: str) -> Any:  # noqa: ANN401  # a class of peft
    """Return a class of peft; None: its module is not imported, or has no such class."""
    return getattr(sys.modules.get(place), name, None)


def _parts_of(layer: Any, adapter: str) -> list[Any]:  # noqa: ANN401  # peft's
    """Return the modules and parameters of one adapter of a layer, in the order of their making."""
    parts = [getattr(layer, name, {}) for name in layer.adapter_layer_names]
    return [by_adapter[adapter] for by_adapter in parts if adapter in by_adapter]


def _parameters_of(layer: Any, adapter: str) -> list[nn.Parameter]:  # noqa: ANN401  # peft's
    parts = _parts_of(layer, adapter)
    return [p for part in parts for p in ([part] if _is_alone(part) else part.parameters())]


def _is_alone(part: object) -> bool:
    """Return whether a part is a parameter itself, as those of embeddings are."""
    return isinstance(part, nn.Parameter)


@torch.no_grad()
def _initialize(layer: Any, adapter: str, kind: object) -> None:  # noqa: ANN401  # peft's
    """Draw the values of one adapter as peft does: in the default dtype, as new modules do."""
    parameters = _parameters_of(layer, adapter)
    dtypes = [parameter.dtype for parameter in parameters]
    for parameter in parameters:
        swap_parameter(parameter, torch.empty(parameter.shape, device="cpu"))
    # peft's modules draw values when they are made, and reset_lora_parameters() draws them again.
    for part in _parts_of(layer, adapter):
        part.normal_() if _is_alone(part) else part.reset_parameters()
    layer.reset_lora_parameters(adapter, kind)
    base = layer.get_base_layer()
    weight = getattr(base, getattr(layer, "parameter_name", "weight"), None)
    for parameter, dtype in zip(parameters, dtypes, strict=True):
        values = parameter.detach()
        if isinstance(weight, torch.Tensor) and weight.is_floating_point():
            values = values.to(weight.dtype)  # as peft does before it makes some of them fp32
        swap_parameter(parameter, values.to(dtype))


def _refuse_unread(name: str, reason: str) -> OptionError:
    message = (
        f"Layer {name!r} has an adapter on the meta device, whose first values tensorstow cannot"
        f" draw: {reason}. Make it over a base that has its values: call from_pretrained(), which"
        " maps the files without reading them, then get_peft_model(), then stow()."
    )
    return OptionError(message)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
