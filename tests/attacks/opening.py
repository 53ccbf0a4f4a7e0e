"""A run is begun, gone on with, looked at, saved, while a call of the system fails."""

import gc
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attacks.faults import Faults
from tensorstow import AdamW
from tensorstow.base.errors import StowError
from tensorstow.memory.buffer_pool import BufferPool
from tensorstow.store.inspect import inspect_store
from tensorstow.store.rank_dirs import stores_in
from tensorstow.store.recovery import hold_recovery
from tensorstow.store.remove import hold_dead_run


def make(directory: Path, **given: object) -> AdamW:
    weights = [torch.nn.Parameter(torch.ones(300))]
    return AdamW(weights, states="disk", dir=directory, **given)  # type: ignore[arg-type]


def begin(directory: Path) -> None:
    make(directory / "new").close()


def go_on(directory: Path) -> None:
    optimizer = make(directory / "run")
    try:
        optimizer.resume()
    finally:
        optimizer.close()


def scratch(directory: Path) -> None:
    make(directory, durability="none").close()


def buffer_pool(directory: Path) -> None:
    BufferPool([directory], 1 << 16, 1 << 16).close()


def look(directory: Path) -> None:
    for store in stores_in(directory / "run"):
        inspect_store(store)
        with hold_dead_run(store):
            pass


def recovery(directory: Path) -> None:
    with hold_recovery([directory / "run"]):
        pass


def export(directory: Path) -> None:
    optimizer = make(directory, durability="none")
    optimizer.save_safetensors(directory / "states.safetensors")
    optimizer.load_safetensors(directory / "states.safetensors")
    optimizer.close()


ACTS = (begin, go_on, scratch, buffer_pool, look, recovery, export)


class OpeningFaults:
    """What is done to a copy of a small run, with faults."""

    def __init__(self, place: Path, patch: pytest.MonkeyPatch) -> None:
        """Make the run in ``place``, which is empty."""
        self._golden, self._root = place / "golden", place / "work"
        self._golden.mkdir()
        optimizer = make(self._golden / "run")
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.commit()
        optimizer.close()
        self._faults = Faults(patch, self._root)

    def count(self, act: Callable[[Path], None]) -> int:
        """Return how many calls of the system there are that may fail."""
        self._renew()
        act(self._root)
        return len(self._faults.calls)

    def fail(self, act: Callable[[Path], None], at: int, code: int) -> str:
        """Let one call fail; return the error's name, "well", or what is wrong with it."""
        self._renew()
        self._faults.arm(at, code)
        try:
            act(self._root)
        except StowError as error:
            told = str(error)
            if str(self._root) in told and ". " in told:  # which path, and what to do
                return type(error).__name__
            return f"WRONG: call {at}, {self._faults.calls[at]}, {code}: {told}"
        except Exception as error:  # noqa: BLE001  # that is the finding
            return f"WRONG: call {at}, {self._faults.calls[at]}, {code}: a bare {error!r}"
        finally:
            gc.collect(0)
        return "well"

    def fill(self, act: Callable[[Path], None]) -> None:
        """Act where no byte and no file can be added."""
        self._renew()
        self._faults.is_full = True
        try:
            act(self._root)
        finally:
            self._faults.is_full = False

    def _renew(self) -> None:
        self._faults.arm(-1, 0)
        shutil.rmtree(self._root, ignore_errors=True)
        shutil.copytree(self._golden, self._root)
        self._faults.arm(-1, 0)
