"""Applies what a plan says of activations to the blocks of a model."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from torch import nn

from tensorstow.activations.offload import ActivationOffload
from tensorstow.activations.pool import ActivationBytes
from tensorstow.activations.recompute import Recompute
from tensorstow.base.activation_placement import ActivationPlacement
from tensorstow.base.errors import OptionError
from tensorstow.base.plan import Plan
from tensorstow.fsdp.units import ROOT, Unit
from tensorstow.io.transfer_log import TransferLog
from tensorstow.report.run_record import Compared
from tensorstow.states.memory import StateMemory


class PlacedActivations:
    """What moves a model's activations, or computes them again."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        plan: Plan,
        directory: str | os.PathLike[str] | None,
    ) -> None:
        """Put hooks on the blocks.

        Args:
            model: The whole model.
            units: All units of it.
            plan: The plan; ``validate_activations`` has checked it.
            directory: Of the scratch files; None: one is chosen.

        Raises:
            DirectoryError: It cannot be made, or is read-only, in RAM or full.
        """
        self._offloads: list[ActivationOffload] = []
        self._open = ExitStack()
        modules = modules_by_placement(units, plan)
        with ExitStack() as made:  # a directory that is refused leaves no hooks
            if "host" in modules:
                self._add(made, ActivationOffload(model, "host", None, (), modules["host"]))
            if "disk" in modules:
                paths = [] if directory is None else [Path(directory).expanduser()]
                budget = plan.activation_ram_budget
                on_disk = ActivationOffload(model, "disk", budget, paths, modules["disk"])
                self._add(made, on_disk)
            if "recompute" in modules:
                made.callback(Recompute(modules["recompute"]).close)
            self._open = made.pop_all()

    def _add(self, made: ExitStack, offload: ActivationOffload) -> None:
        made.callback(offload.close)
        self._offloads.append(offload)

    def nbytes(self) -> list[ActivationBytes]:
        """Return what is held and was moved, of those in host memory and of those on disk."""
        return [offload.nbytes() for offload in self._offloads]

    def close(self) -> None:
        """Take every hook off, and let memory and files go. Idempotent."""
        self._open.close()

    # --- a part of a recording ---

    def start_log(self, log: TransferLog) -> None:
        """Log nothing: their transfers are counted."""

    def end_log(self) -> None:
        """Stop logging nothing."""

    def held(self) -> Mapping[str, Callable[[], int]]:
        """Return the host memory of saved tensors that were moved, over time."""
        if not self._offloads:
            return {}
        return {"saved activations": lambda: sum(each.host_bytes for each in self.nbytes())}

    def moved(self) -> Mapping[str, int]:
        """Return the bytes moved so far."""
        counts = self.nbytes()
        if not counts:
            return {}
        return {
            "activations read": sum(each.bytes_read for each in counts),
            "activations written": sum(each.bytes_written for each in counts),
            "from the accelerator": sum(each.bytes_down for each in counts),
            "to the accelerator": sum(each.bytes_up for each in counts),
        }

    def disk_bytes(self) -> int:
        """Return the bytes on disk."""
        return sum(each.disk_bytes for each in self.nbytes())

    def compared(self, memory: StateMemory) -> list[Compared]:
        """Return nothing: a batch decides about them, and no plan that runs has seen it."""
        del memory
        return []

    def predicted(self) -> None:
        """Return None: the parameters' part has the step."""


def blocks_with_activations(units: Sequence[Unit]) -> dict[str, nn.Module]:
    """Return the units whose activations can be placed, by name: the outermost but the root.

    Args:
        units: All units of a model; tiles are inside of others.
    """
    blocks = [unit for unit in units if unit.name != ROOT]
    inner = {id(part) for unit in blocks for part in unit.module.modules() if part != unit.module}
    return {unit.name: unit.module for unit in blocks if id(unit.module) not in inner}


def modules_by_placement(
    units: Sequence[Unit], plan: Plan
) -> Mapping[ActivationPlacement, list[nn.Module]]:
    """Return the blocks by what is done with their activations, those that keep them left out.

    Args:
        units: All units of a model.
        plan: The plan.
    """
    found: dict[ActivationPlacement, list[nn.Module]] = {}
    for name, module in blocks_with_activations(units).items():
        placement = plan.activations_of(name)
        if placement != "keep":
            found.setdefault(placement, []).append(module)
    return found


def validate_activations(plan: Plan, units: Sequence[Unit]) -> None:
    """Check that the model has the blocks whose activations a plan places.

    Args:
        plan: The plan.
        units: All units of the model.

    Raises:
        OptionError: It lacks one that is named, or has none at all.
    """
    names = list(blocks_with_activations(units))
    unknown = sorted(set(plan.activation_units) - set(names))
    if unknown:
        message = (
            f"activation_units names {unknown}, and the model's blocks are {names}. (Activations of"
            " what is outside of blocks, or inside of one, are not placed by themselves.)"
        )
        raise OptionError(message)
    if plan.activation_placements != {"keep"} and not names:
        message = (
            f"activations={plan.activations!r} was given, and the model has no repeated blocks:"
            " name its parts by units=, or leave it out."
        )
        raise OptionError(message)
