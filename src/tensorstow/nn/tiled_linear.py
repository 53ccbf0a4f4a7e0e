"""``TiledLinear``: a linear layer in tiles, each of which is a module and a unit."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.tensors.dtensor import OffloadedWeight, is_sharded, part_of, to_local


class TiledLinear(nn.Module):
    """A linear layer whose weight is cut into tiles, each a linear layer of its own.

    Under ``stow`` each tile is a unit: its parameters are gathered for its own product and freed
    after it, so the layer needs the memory of two tiles (one is read ahead) and not of the whole
    weight. Arguments, attributes and names of parameters (``linears.ROW.COLUMN.weight``) are those
    of DeepSpeed's class.

    With ``in_splits=1`` every output is bitwise that of an ``nn.Linear`` of its tile's rows. With
    more it is the sum of ``in_splits`` products in the dtype of the output, added in the order of
    the inputs; the last product includes the bias. The gradient of the input is the sum of
    ``out_splits`` products. Outputs and gradients may differ by rounding from those of one layer
    with the whole weight, because torch's libraries choose the order of sums by shape and
    processor. The difference of an output is at most 2 n u / (1 - n u) times the sum of the
    magnitudes of its terms, where n is their number plus ``in_splits``, and u is half of the
    dtype's ``eps``. Products of 16-bit operands are added in fp32, and each is rounded once more.

    Args:
        in_features: The size of the input's last dimension.
        out_features: The size of the output's last dimension.
        bias: Whether outputs have a bias.
        in_splits: How many parts the input dimension is cut into, as equal as possible.
        out_splits: How many parts the output dimension is cut into.
        input_is_already_split: Whether ``forward`` takes a sequence of ``in_splits`` tensors.
        combine_out_splits: Whether ``forward`` returns one tensor; False: a list of ``out_splits``.
        linear_cls: The class of tiles, called as ``linear_cls(in, out, bias=..., **kwargs)``.
        init_linear: A layer whose parameters are copied. Default: None, tiles initialize their own.
        kwargs: Further keywords of ``linear_cls``, such as ``device`` and ``dtype``.

    Raises:
        OptionError: A dimension has fewer elements than parts, or ``init_linear`` does not match.
    """

    def __init__(  # noqa: PLR0913, PLR0917  # upstream's
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,  # noqa: FBT001, FBT002
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,  # noqa: FBT001, FBT002
        combine_out_splits: bool = True,  # noqa: FBT001, FBT002
        linear_cls: Any = nn.Linear,  # noqa: ANN401
        init_linear: nn.Linear | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.use_bias = bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts = _edges("in", in_features, in_splits)
        self.out_parts = _edges("out", out_features, out_splits)
        self._is_linear = isinstance(linear_cls, type) and issubclass(linear_cls, nn.Linear)
        self.linears = nn.ModuleList()
        for rows in _ranges(self.out_parts):
            row = nn.ModuleList()
            for columns in _ranges(self.in_parts):
                has_bias = bias and columns.stop == in_features
                row.append(linear_cls(len(columns), len(rows), bias=has_bias, **kwargs))
            self.linears.append(row)
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(
        self, input_: torch.Tensor | Sequence[torch.Tensor]
    ) -> torch.Tensor | list[torch.Tensor]:
        """Return the layer's output.

        Args:
            input_: A tensor (..., in_features), or its parts with ``input_is_already_split``.

        Returns:
            A tensor (..., out_features), or its parts without ``combine_out_splits``.

        Raises:
            OptionError: The input is not split as the layer expects.
        """
        parts = self._parts_of(input_)
        shape = parts[0].shape[:-1]
        if len(shape) > 1 and self._is_linear:
            # Otherwise each tile would return a view, and FSDP2 warns about views.
            parts = [part.reshape(-1, part.shape[-1]) for part in parts]
        outputs: list[torch.Tensor] = []
        for row in self.linears:
            first, *rest = zip(_listed(row), parts, strict=True)
            total = first[0](first[1])
            for tile, part in rest:
                total = total + tile(part)
            outputs.append(total.view(*shape, total.shape[-1]))
        if not self.combine_out_splits:
            return outputs
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copy weight and bias from another layer.

        If this layer is sharded, each rank copies its rows of ``other``: pass the same values on
        every rank.

        Args:
            other: A layer of the same sizes, whole in memory.

        Raises:
            OptionError: The sizes differ, one has a bias and the other none, ``other`` is sharded,
                or this layer has no memory yet (``zero.Init``, the meta device).
        """
        bias = getattr(other, "bias", None)
        self._check(other.weight, bias)
        for rows, row in zip(_ranges(self.out_parts), self.linears, strict=True):
            for columns, tile in zip(_ranges(self.in_parts), _listed(row), strict=True):
                values = other.weight[rows.start : rows.stop, columns.start : columns.stop]
                _copy(tile.weight, values)
                if bias is not None and columns.stop == self.in_features:
                    _copy(tile.bias, bias[rows.start : rows.stop])

    def extra_repr(self) -> str:
        """Return the sizes, and how they are cut.

        Returns:
            Text for ``repr``.
        """
        return (
            f"in_features={self.in_features}, out_features={self.out_features},"
            f" bias={self.use_bias}, in_splits={self.in_splits}, out_splits={self.out_splits}"
        )

    def tiles(self) -> list[nn.Module]:
        """Return the tiles in the order of their products.

        Returns:
            The modules, row after row.
        """
        return [tile for row in self.linears for tile in _listed(row)]

    def _parts_of(self, input_: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self.in_splits == 1 and isinstance(input_, torch.Tensor):
            return [input_]  # as upstream, with input_is_already_split or without
        if isinstance(input_, torch.Tensor) and not self.input_is_already_split:
            return torch.split(input_, [len(part) for part in _ranges(self.in_parts)], dim=-1)
        if isinstance(input_, torch.Tensor) or not self.input_is_already_split:
            wanted = "a sequence of parts" if self.input_is_already_split else "one tensor"
            message = (
                f"TiledLinear(input_is_already_split={self.input_is_already_split}) was given a"
                f" {type(input_).__name__}: it takes {wanted}."
            )
            raise OptionError(message)
        if len(input_) != self.in_splits:
            message = f"TiledLinear has in_splits={self.in_splits}, and got {len(input_)} parts."
            raise OptionError(message)
        return input_

    def _check(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        if weight.shape != (self.out_features, self.in_features):
            message = (
                f"copy_params_from was given a weight of shape {tuple(weight.shape)}; this layer's"
                f" is {(self.out_features, self.in_features)}."
            )
            raise OptionError(message)
        if self.use_bias != (bias is not None):
            layers = ("this", "the other") if self.use_bias else ("the other", "this")
            message = "copy_params_from: {} layer has a bias, and {} layer has none."
            message = message.format(*layers)
            raise OptionError(message)
        sources = [weight] if bias is None else [weight, bias]
        if any(is_sharded(t) or isinstance(t, OffloadedWeight) for t in sources):
            message = (
                "copy_params_from was given a layer that is sharded. Gather it first"
                " (deepspeed.zero.GatheredParameters, or weight.full_tensor())."
            )
            raise OptionError(message)
        if weight.is_meta or any(p.is_meta for p in self.parameters()):
            message = (
                "copy_params_from needs values and memory to copy them to, and a layer is on the"
                " meta device. Copy after the model is placed (stow, initialize)."
            )
            raise OptionError(message)


def tiles_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the tiles of every layer of a model that has more than one tile."""
    for module in model.modules():
        if isinstance(module, TiledLinear) and len(tiles := module.tiles()) > 1:
            yield from tiles


def _edges(side: str, features: int, splits: int) -> list[int]:
    """Return where each of ``splits`` nearly equal parts begins, and where the last ends."""
    if not 1 <= splits <= features:
        message = f"{side}_splits={splits} was given; it is 1 to {side}_features={features}."
        raise OptionError(message)
    least, longer = divmod(features, splits)
    return [least * i + min(i, longer) for i in range(splits + 1)]


def _ranges(edges: Sequence[int]) -> list[range]:
    return [range(a, b) for a, b in pairwise(edges)]


def _listed(row: nn.Module) -> list[Any]:
    return list(row.children())


def _copy(parameter: torch.Tensor, values: torch.Tensor) -> None:
    to_local(parameter).copy_(part_of(values, parameter, "The value"))
