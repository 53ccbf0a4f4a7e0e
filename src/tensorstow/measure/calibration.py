"""All rates of this machine, measured in about ten seconds."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from tensorstow.base.directories import resolve_path
from tensorstow.base.profile import LinkRates, Profile, identify_machine
from tensorstow.io.device_link import open_link
from tensorstow.io.pinned import PinnedBlock
from tensorstow.measure.device_rates import measure_device_updates
from tensorstow.measure.disk_rates import measure_directory
from tensorstow.measure.host_rates import (
    fastest,
    measure_checksums,
    measure_compute,
    measure_fresh_memory,
    measure_memory,
    measure_updates,
    waited,
)

_LINK_BYTES = 256 << 20


def calibrate(directories: Iterable[Path], tell: Callable[[str], None] = lambda _: None) -> Profile:
    """Return the rates of this machine: four seconds, and four for each directory.

    ``tell`` is called with a description before each measurement.

    Raises:
        DirectoryError: A directory is missing, read-only, in RAM or too full.
    """
    cpu = torch.device("cpu")
    # Directories can raise errors: they come first.
    disks = {}
    for directory in directories:
        tell(f"{directory}: reading and writing")
        path = resolve_path(directory)
        disks[str(path)] = measure_directory(path)
    tell("host memory")
    read, write, copy = measure_memory()
    fresh, checksums = measure_fresh_memory(), measure_checksums()
    tell("updates")
    update = measure_updates()
    tell("computing")
    compute = {cpu.type: measure_compute(cpu)}
    link, device_update = None, {}
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        tell(f"{device.type}: computing, and its link")
        compute[device.type] = measure_compute(device)
        link = measure_link(device)
        tell(f"{device.type}: updates")
        device_update = measure_device_updates(device)
    return Profile(
        identify_machine(),
        memory_read=read,
        memory_write=write,
        memory_copy=copy,
        memory_fresh=fresh,
        checksums=checksums,
        update=update,
        device_update=device_update,
        compute=compute,
        directories=disks,
        link=link,
    )


def measure_link(device: torch.device, seconds: float = 0.6) -> LinkRates:
    """Return bytes per second between pinned host memory and an accelerator."""
    link = open_link(device)
    pinned = [PinnedBlock(_LINK_BYTES, device, link.synchronize) for _ in range(2)]
    blocks = [block.tensor(0, _LINK_BYTES, torch.uint8) for block in pinned]
    on_device = [torch.zeros(_LINK_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    up, down = [(on_device[0], blocks[0])], [(blocks[1], on_device[1])]
    ready = [link.record_event()]
    turn = seconds / 3

    def both() -> None:
        link.h2d(up, ready)
        link.d2h(down, ready)

    return LinkRates(
        _LINK_BYTES / fastest(waited(lambda: link.h2d(up, ready), device), turn),
        _LINK_BYTES / fastest(waited(lambda: link.d2h(down, ready), device), turn),
        2 * _LINK_BYTES / fastest(waited(both, device), turn),
    )
