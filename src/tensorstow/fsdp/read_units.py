"""Units of a model that is only read: blocks, and the modules that are in none, one by one.

[Note: Parts of the root] What is in no block (embeddings, the last norm, the head) is one unit in
training, unsharded for the whole forward. To read it, it is cut: each module with parameters of its
own is a unit, together with those that share one with it. A plan names such a unit by its module,
or all of them by the name of the root, "".

[Note: Experts] A module that has the weights of all experts of a layer, as stacked tensors, is a
unit of its own inside of its block. Its call is told which experts tokens are routed to, and those
alone are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from tensorstow.base.plan import Plan
from tensorstow.base.tiers import Tier
from tensorstow.fsdp.experts import take_experts
from tensorstow.fsdp.units import ROOT, Unit, units_of
from tensorstow.nn.routed_experts import is_of_experts


@dataclass(frozen=True, eq=False, slots=True)
class ReadUnit(Unit):
    """Parameters that are read and used together; its name is that of its first module."""

    modules: Sequence[nn.Module]
    """Those that use the parameters when they run."""
    part_of: str | None = None
    """The name of the unit that it is a part of in training."""

    def tier_in(self, plan: Plan) -> Tier:
        """Return its tier in a plan, which names it or the unit that it is a part of."""
        is_named = self.part_of is None or self.name in plan.parameter_units
        return plan.tier_of(self.name if is_named else str(self.part_of))

    @property
    def experts(self) -> int:
        """How many experts its tensors stack; 0: it is no unit of experts."""
        is_stacked = len(self.modules) == 1 and is_of_experts(self.module)
        return len(next(iter(self.parameters.values()))) if is_stacked else 0


def read_units_of(model: nn.Module, blocks: Sequence[nn.Module] | None = None) -> list[ReadUnit]:
    """Return the units of a model that is only read, in the order of definition.

    Every parameter is in one of them. ``blocks``: as of ``units_of``.
    """
    *units, root = units_of(model, blocks)
    parts = _parts_of(model, root)
    blocks_read = [part for unit in units for part in _without_experts(unit)]
    order = {name: at for at, (name, _) in enumerate(model.named_modules())}
    return sorted([*blocks_read, *parts], key=lambda unit: order[unit.name])


def parents_of(units: Sequence[ReadUnit]) -> dict[str, list[str]]:
    """Return, by unit, the names of the units whose modules contain it."""
    inside: dict[str, list[str]] = {unit.name: [] for unit in units}
    for outer in units:
        below = {id(m) for module in outer.modules for m in module.modules()}
        for unit in units:
            if unit is not outer and any(id(module) in below for module in unit.modules):
                inside[unit.name].append(outer.name)
    return inside


def _without_experts(unit: Unit) -> list[ReadUnit]:
    """Return a block without its experts, and each module of experts."""
    rest = replace(unit, parameters=dict(unit.parameters))
    experts = [
        ReadUnit(taken.name, taken.module, taken.parameters, [taken.module], unit.name)
        for taken in take_experts(rest)
    ]
    block = ReadUnit(unit.name, unit.module, rest.parameters, [unit.module])
    return [block, *experts] if rest.parameters else experts


def _parts_of(model: nn.Module, root: Unit) -> list[ReadUnit]:
    """Return the units that the root is cut into."""
    rest = {id(p) for p in root.parameters.values()}
    groups: list[tuple[set[int], list[tuple[str, nn.Module]]]] = []
    for name, module in model.named_modules():
        mine = {id(p) for p in module.parameters(recurse=False)} & rest
        if not mine:
            continue
        shared = [group for group in groups if group[0] & mine]
        groups = [group for group in groups if group not in shared]
        members = mine.union(*(ids for ids, _ in shared))
        groups.append((members, [named for _, modules in shared for named in modules]))
        groups[-1][1].append((name, module))
    return [
        ReadUnit(
            *modules[0],
            {n: p for n, p in root.parameters.items() if id(p) in members},
            [module for _, module in modules],
            ROOT,
        )
        for members, modules in groups
    ]
