"""Low-rank adapters round the linear layers of a model without values, shaped as peft's."""

from typing import Any

import torch
from torch import nn

from tensorstow.base.errors import OptionError


class Adapted(nn.Module):
    """A linear layer, and the two narrow ones whose product is added to its output."""

    def __init__(self, base_layer: nn.Module, rank: int) -> None:
        """Create the narrow layers in fp32, as peft does, on the device of ``base_layer``."""
        super().__init__()
        weight: Any = base_layer.weight
        # Conv1D of transformers has its weight transposed.
        outer, inner = weight.shape if isinstance(base_layer, nn.Linear) else weight.shape[::-1]
        self.base_layer = base_layer
        with torch.device(weight.device):
            self.lora_A = nn.Linear(inner, rank, bias=False, dtype=torch.float32)
            self.lora_B = nn.Linear(rank, outer, bias=False, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum, in the dtype of the layer."""
        output: torch.Tensor = self.base_layer(x)
        added: torch.Tensor = self.lora_B(self.lora_A(x.to(torch.float32)))
        return (output + added).to(output.dtype)


class Tuner(nn.Module):
    """A model with adapters inside, as the wrapper of peft has it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class AdaptedModel(nn.Module):
    """A model with adapters, whose modules have the names that peft gives them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = Tuner(model)

    def forward(self, *positional: Any, **named: Any) -> Any:  # noqa: ANN401  # the model's own
        """Call the model."""
        return self.base_model.model(*positional, **named)


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Freeze a model, and add adapters to all its linear layers but the output's.

    Raises:
        OptionError: The model has no such layer.
    """
    model.requires_grad_(requires_grad=False)
    output = getattr(model, "get_output_embeddings", lambda: None)()
    layers = {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
        and module is not output
    }
    if not layers or "" in layers:
        message = f"--lora r={rank} was given, and the model has no linear layers inside."
        raise OptionError(message)
    for name, layer in layers.items():
        model.set_submodule(name, Adapted(layer, rank))
    return AdaptedModel(model)
