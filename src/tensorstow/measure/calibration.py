"""All rates of this machine, measured in about ten seconds."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch

from tensorstow.base.directories import resolve_path
from tensorstow.base.profile import LinkRates, Profile, identify_machine, update_key
from tensorstow.formats.reference import adam_scalars
from tensorstow.formats.state_format import StateFormat
from tensorstow.io.allocator import cache_large_blocks
from tensorstow.io.device_link import open_link
from tensorstow.io.pinned import PinnedBlock
from tensorstow.measure.disk_rates import measure_directory
from tensorstow.measure.host_rates import (
    fastest,
    measure_checksums,
    measure_compute,
    measure_memory,
    measure_updates,
    waited,
)
from tensorstow.states.layout import Family
from tensorstow.states.update_trial import FAMILIES, PARAMETERS
from tensorstow.step.segment_update import SegmentUpdate
from tensorstow.step.update_rule import rule_on


def measure_device_updates(device: torch.device, seconds: float = 1.0) -> dict[str, float]:
    """Return parameters per second that an accelerator updates, by "dtype/format".

    Only exact formats are measured. The states are on the accelerator: the link's rates count their
    transfers.
    """
    exact = [(dtype, state_format) for dtype, state_format in FAMILIES if state_format.exact]
    turn = seconds / len(exact)
    return {
        update_key(dtype, state_format): PARAMETERS
        / fastest(waited(device_update_trial(device, dtype, state_format), device), turn)
        for dtype, state_format in exact
    }


def device_update_trial(
    device: torch.device, dtype: torch.dtype, state_format: StateFormat
) -> Callable[[], None]:
    """Return a function that updates ``PARAMETERS`` parameters on an accelerator, as a run does."""
    family = Family(dtype, amsgrad=False, format=state_format)
    streams = [
        torch.zeros(-(-PARAMETERS // spec.per), dtype=spec.dtype, device=device)
        for spec in family.specs
    ]
    rule = rule_on(device, family).rule
    weight, gradient = (torch.zeros(PARAMETERS, dtype=dtype, device=device) for _ in range(2))
    scalars = adam_scalars(
        lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, step=10, decoupled=True
    )
    segment = SegmentUpdate(weight, gradient, 0, 0, scalars, key=0, seed_master=False)
    tables = [
        torch.empty(rule.table_bytes(1), dtype=torch.uint8, device=side)
        for side in (torch.device("cpu"), device)
    ]
    pairs, update = rule.prepare([segment], family, tables[0], tables[1])
    for target, source in pairs:
        target.copy_(source)
    return partial(update, streams)


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
    cache_large_blocks()  # as a model's run has it
    tell("host memory")
    read, write, copy = measure_memory()
    checksums = measure_checksums()
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
