"""Units: modules whose parameters are all-gathered and freed together."""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from tensorstow.base.errors import OptionError, abbreviated
from tensorstow.nn.tiled_linear import tiles_of
from tensorstow.step.forward_waits import blocks_of, is_called

T = TypeVar("T")

ROOT = ""
"""The name of the unit that has what is in no block: embeddings, the head, the last norm."""


@dataclass(frozen=True, eq=False, slots=True)
class Unit:
    """A module and the parameters that move with it."""

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]
    """The parameters by the model's names; a tied one by its first name."""


def found_in(table: Mapping[nn.Module, T], model: nn.Module) -> T | None:
    """Return a table's entry for a model, or for the model that a wrapper holds; None: no entry."""
    return next((table[module] for module in model.modules() if module in table), None)


READ_ONLY: "weakref.WeakKeyDictionary[nn.Module, Any]" = weakref.WeakKeyDictionary()
"""Models that are only read, with their ``WeightStream``; None: all weights stay in memory."""


def is_read_only(model: nn.Module) -> bool:
    """Return whether ``stow`` has placed a model, or a part of it, without an optimizer."""
    return any(module in READ_ONLY for module in model.modules())


def units_of(model: nn.Module, blocks: Sequence[nn.Module] | None = None) -> list[Unit]:
    """Return the model's units in the order in which they are to be sharded: the root last.

    Args:
        model: The whole model.
        blocks: Modules that are units; None: the repeated blocks, which are the children of an
            outermost ``ModuleList`` or ``Sequential``. A block without parameters is no unit. Tiles
            of a ``TiledLinear`` are units of their own in any case, before the block they are in.

    Returns:
        Units with every parameter of the model in one of them. A parameter that several blocks
        share, or a block and the rest, belongs to the root.

    Raises:
        OptionError: A given block is not in the model, is inside another one, or is a container
            that cannot be called.
    """
    value: object = blocks
    if value is not None and (not isinstance(value, Iterable) or isinstance(value, torch.Tensor)):
        message = f"units={abbreviated(blocks)} was given: it is a list of the model's modules."
        raise OptionError(message)
    names = {id(m): name for name, m in model.named_modules()}
    chosen = list(blocks) if blocks is not None else blocks_of(model)
    _check(chosen, names)
    chosen = _with_tiles(model, chosen)
    owners: dict[int, set[str]] = {}
    inside = {id(m) for block in chosen for m in block.modules()}
    for module, owner in _nearest(model, {id(block): names[id(block)] for block in chosen}):
        if owner != ROOT or id(module) not in inside:  # else it has a second name outside
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), set()).add(owner)
    shared = [owner for owner in owners.values() if len(owner) > 1]
    tied = {name for owner in shared for name in owner} - {ROOT}
    units = []
    named = dict(model.named_parameters())
    for block in chosen:
        name = names[id(block)]
        mine = {n: p for n, p in named.items() if owners[id(p)] == {name}}
        if mine and name not in tied:
            units.append(Unit(name, block, mine))
    taken = {id(p) for unit in units for p in unit.parameters.values()}
    rest = {n: p for n, p in named.items() if id(p) not in taken}
    return [*units, Unit(ROOT, model, rest)]


def aliases_of(model: nn.Module) -> dict[str, list[str]]:
    """Return the further names of tied parameters, by their first."""
    first: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_name = first.setdefault(id(parameter), name)
        if first_name != name:
            aliases.setdefault(first_name, []).append(name)
    return aliases


def _with_tiles(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return ``blocks`` and the tiles of tiled layers, each before the block that it is in."""
    tiles = {id(tile): tile for tile in tiles_of(model)}
    with_tiles: dict[int, nn.Module] = {}
    for block in blocks:
        with_tiles |= {id(part): part for part in block.modules() if id(part) in tiles}
        with_tiles[id(block)] = block
    # Tiles that are in no block come last.
    return list((with_tiles | tiles).values())


def _nearest(
    module: nn.Module, names: Mapping[int, str], owner: str = ROOT
) -> Iterator[tuple[nn.Module, str]]:
    """Yield every module below ``module`` with the name of the innermost unit that it is in."""
    owner = names.get(id(module), owner)
    yield module, owner
    for child in module.children():
        yield from _nearest(child, names, owner)


def _check(blocks: Sequence[nn.Module], names: dict[int, str]) -> None:
    inside: dict[int, str] = {}
    for block in blocks:
        if id(block) not in names or names[id(block)] == ROOT:
            message = f"A unit ({type(block).__name__}) was given that is not inside the model."
            raise OptionError(message)
        for part in block.modules():
            if id(part) in inside:
                message = (
                    f"{names[id(block)]} and {inside[id(part)]} were given as units, and one is"
                    " inside the other: a parameter moves with one unit."
                )
                raise OptionError(message)
            inside[id(part)] = names[id(block)]
    for block in blocks:
        if not is_called(block):
            message = (
                f"{names[id(block)]} was given as a unit, and a {type(block).__name__} is never"
                " called: give the modules in it, whose weights are gathered when they are called."
            )
            raise OptionError(message)
