"""Places the activations of a model's blocks by a plan."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from torch import nn

from tensorstow.activations.offload import ActivationOffload
from tensorstow.activations.pool import ActivationBytes
from tensorstow.activations.recompute import Recompute
from tensorstow.base.activation_placement import ActivationPlacement
from tensorstow.base.directories import Paths, read_paths
from tensorstow.base.errors import OptionError
from tensorstow.base.plan import Plan
from tensorstow.fsdp.units import ROOT, Unit
from tensorstow.io.transfer_log import TransferLog
from tensorstow.report.run_record import Compared
from tensorstow.states.memory import StateMemory


class PlacedActivations:
    """The hooks that move a model's activations, or recompute them."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        plan: Plan,
        directory: Paths | None,
    ) -> None:
        """Register hooks on the blocks, which ``validate_activations`` has checked.

        Raises DirectoryError if the directory of scratch files cannot be used; None: one is chosen.
        """
        self._offloads: list[ActivationOffload] = []
        self._open = ExitStack()
        modules: dict[ActivationPlacement, list[nn.Module]] = {}
        for name, module in blocks_with_activations(units).items():
            modules.setdefault(plan.activations_of(name), []).append(module)
        with ExitStack() as opened:  # an error with the directory leaves no hooks
            if on_host := modules.get(ActivationPlacement.HOST):
                self._add(opened, ActivationOffload(model, "host", None, (), on_host))
            if on_disk := modules.get(ActivationPlacement.DISK):
                paths = read_paths(directory, "dir")
                budget = plan.activation_ram_budget
                self._add(opened, ActivationOffload(model, "disk", budget, paths, on_disk))
            if recomputed := modules.get(ActivationPlacement.RECOMPUTE):
                opened.callback(Recompute(recomputed).close)
            self._open = opened.pop_all()

    def _add(self, opened: ExitStack, offload: ActivationOffload) -> None:
        opened.callback(offload.close)
        self._offloads.append(offload)

    def nbytes(self) -> list[ActivationBytes]:
        """Return the bytes held and moved, of offloads to host memory and to disk."""
        return [o._pool.nbytes() for o in self._offloads]  # noqa: SLF001  # inside of the engine

    def close(self) -> None:
        """Remove all hooks, and free memory and files. Idempotent."""
        self._open.close()

    # --- a part of a recording ---

    def start_log(self, log: TransferLog) -> None:
        """Log nothing: transfers of activations are counted."""

    def end_log(self) -> None:
        """Do nothing: no transfers were logged."""

    def held(self) -> Mapping[str, Callable[[], int]]:
        """Return functions that return the host memory of moved activations, by name."""
        if not self._offloads:
            return {}
        return {"saved activations": lambda: sum(count.host_bytes for count in self.nbytes())}

    def moved(self) -> Mapping[str, int]:
        """Return the bytes moved so far."""
        counts = self.nbytes()
        if not counts:
            return {}
        return {
            "activations read": sum(count.bytes_read for count in counts),
            "activations written": sum(count.bytes_written for count in counts),
            "from the accelerator": sum(count.bytes_down for count in counts),
            "to the accelerator": sum(count.bytes_up for count in counts),
        }

    def disk_bytes(self) -> int:
        """Return the bytes on disk."""
        return sum(count.disk_bytes for count in self.nbytes())

    def compared(self, memory: StateMemory) -> list[Compared]:
        """Return nothing: activations depend on the batch, which the running plan has not seen."""
        del memory
        return []

    def predicted(self) -> None:
        """Return None: the parameters' part predicts the step."""


def blocks_with_activations(units: Sequence[Unit]) -> dict[str, nn.Module]:
    """Return the units whose activations can be placed, by name: the outermost below the root.

    Tiles are inside other units.
    """
    blocks = [unit for unit in units if unit.name != ROOT]
    inner = {id(part) for unit in blocks for part in unit.module.modules() if part != unit.module}
    return {unit.name: unit.module for unit in blocks if id(unit.module) not in inner}


def validate_activations(plan: Plan, units: Sequence[Unit]) -> None:
    """Check that the model has the blocks whose activations a plan places."""
    names = list(blocks_with_activations(units))
    unknown = sorted(set(plan.activation_units) - set(names))
    if unknown:
        message = (
            f"activation_units names {unknown}, and the model's blocks are {names}. (Activations of"
            " what is outside of blocks, or inside of one, are not placed by themselves.)"
        )
        raise OptionError(message)
    if not plan.keeps_activations and not names:
        message = (
            f"activations={plan.activations!r} was given, and the model has no repeated blocks:"
            " name its parts by units=, or leave it out."
        )
        raise OptionError(message)
