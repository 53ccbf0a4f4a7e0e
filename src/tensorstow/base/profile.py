"""The rates of a machine as `tensorstow calibrate` measured them, and where they are kept.

A profile is JSON. It is kept in the user's cache folder under the machine's identity, so that
machines that share a home folder do not share it.
"""

import contextlib
import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import torch

from tensorstow.base.cores import affinity_cores, read_or_empty
from tensorstow.base.directories import expand_path, inspect_directory, resolve_path
from tensorstow.base.errors import DirectoryError, OptionError, named
from tensorstow.base.fields import (
    NotNegativeFloat,
    PositiveFloat,
    PositiveInt,
    check_fields,
    from_fields,
    json_object,
)
from tensorstow.base.new_file import new_stream
from tensorstow.base.regular_file import memory_bytes, read_text

logger = logging.getLogger("tensorstow")

WORTH_OFFLOADING = 1e9
"""Bytes per second, read and written at once, from which a directory is worth offloading to: NVMe
drives have more, SATA drives and network filesystems less."""
_BYTES_PER_PARAMETER = 20
"""Read and written in a step for a bf16 parameter whose states are on disk in the split format."""
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class DirectoryRates:
    """The disk of a directory, in bytes per second, with ``depth`` requests under way."""

    read: PositiveFloat
    write: PositiveFloat
    mixed: PositiveFloat
    """Read and written at once, half each, both together."""
    block_bytes: PositiveInt
    """The size of requests that was fastest."""
    depth: PositiveInt
    """How many of them under way were enough."""

    @property
    def is_worth_offloading(self) -> bool:
        """Return whether states on this disk hold a step up less than they would elsewhere."""
        return self.mixed >= WORTH_OFFLOADING

    @property
    def verdict(self) -> str:
        """Return in one sentence whether it is worth offloading to."""
        seconds = 1e9 * _BYTES_PER_PARAMETER / self.mixed
        cost = f"the states of 1e9 bf16 parameters take {seconds:.2g} s per step"
        if self.is_worth_offloading:
            return f"Worth offloading to: {cost}."
        least = f"{WORTH_OFFLOADING / 1e9:g} GB/s"
        return f"Not worth offloading to: below {least}, {cost}; use a local NVMe drive."


@dataclass(frozen=True, slots=True)
class LinkRates:
    """The link between pinned host memory and an accelerator, in bytes per second."""

    up: PositiveFloat
    """Host to device."""
    down: PositiveFloat
    both: PositiveFloat
    """Both ways at once, both together."""


@dataclass(frozen=True, slots=True)
class ComputeRates:
    """Rates of forward and backward on one kind of device."""

    flops: Mapping[str, PositiveFloat]
    """Floating point operations per second of matrix products, by dtype."""
    tensor_bytes: PositiveFloat
    """Bytes read and written per second by elementwise operations in a row: each reads the result
    of the one before, and what no cache has."""
    call_seconds: NotNegativeFloat
    """The seconds of an operation on few elements."""
    random_elements: PositiveFloat
    """Random numbers drawn per second, as dropout needs them."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The rates of one machine: memory, update kernel, compute, disks and link."""

    machine: Mapping[str, Any]
    """Its identity, as ``identify_machine`` returns it."""
    memory_read: PositiveFloat
    """Bytes per second of host memory, all cores."""
    memory_write: PositiveFloat
    memory_copy: PositiveFloat
    """Read and written, both together."""
    checksums: PositiveFloat
    """Bytes per second of which all cores compute checksums."""
    update: Mapping[str, PositiveFloat] = field(default_factory=dict)
    """Parameters per second that the host's kernel updates, by "dtype/format"."""
    device_update: Mapping[str, PositiveFloat] = field(default_factory=dict)
    """The same of an accelerator, where their states are on it."""
    compute: Mapping[str, ComputeRates] = field(default_factory=dict)
    """Rates by the type of device, "cpu" or an accelerator's."""
    directories: Mapping[str, DirectoryRates] = field(default_factory=dict)
    """Rates by absolute path."""
    link: LinkRates | None = None
    """None: there is no accelerator."""

    def __post_init__(self) -> None:
        check_fields(self)

    def rates_of(self, directory: Path | None) -> DirectoryRates | None:
        """Return the rates of a directory, by its path or by the filesystem that it is on.

        None: those of the fastest directory that was measured.
        """
        if directory is None:
            return max(self.directories.values(), key=lambda rates: rates.mixed, default=None)
        path = resolve_path(directory)
        if str(path) in self.directories:
            return self.directories[str(path)]
        with contextlib.suppress(DirectoryError):
            wanted = inspect_directory(path).mount.device
            for measured, rates in self.directories.items():
                with contextlib.suppress(DirectoryError):
                    if inspect_directory(Path(measured)).mount.device == wanted:
                        return rates
        return None

    def rates_of_each(self, directories: Sequence[Path]) -> list[DirectoryRates]:
        """Return the rates of directories that are used at once; empty: one is not known.

        Those on one drive have equal parts of its rates.
        """
        drives = [_drive_of(directory) for directory in directories]
        per_drive = []
        for directory, drive in zip(directories, drives, strict=True):
            rates, count = self.rates_of(directory), drives.count(drive)
            if rates is None:
                return []
            part = {name: getattr(rates, name) / count for name in ("read", "write", "mixed")}
            per_drive.append(replace(rates, **part))
        return per_drive

    def rates_over(self, directories: Sequence[Path]) -> DirectoryRates | None:
        """Return the rates of several directories together, each with its share of the bytes.

        None: those of one are not known. Without directories, those of the fastest.
        """
        if not directories:
            return self.rates_of(None)
        rates = self.rates_of_each(directories)
        if not rates:
            return None
        mixed = sum(rate.mixed for rate in rates)
        # All end when the last one ends its share.
        read = min(rate.read * mixed / rate.mixed for rate in rates)
        write = min(rate.write * mixed / rate.mixed for rate in rates)
        return replace(rates[0], read=read, write=write, mixed=mixed)

    def but(self, **changes: Any) -> Self:  # noqa: ANN401  # the fields' types
        """Return a copy with other values of some fields."""
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, each directory's verdict among them."""
        values = asdict(self)
        for path, rates in self.directories.items():
            values["directories"][path]["verdict"] = rates.verdict
        return values

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the JSON of ``as_dict``; raise OptionError if it is no profile."""
        meant = "A profile is JSON, as `tensorstow calibrate --json` prints it"
        values = json_object(text, meant)
        if missing := sorted({f.name for f in fields(cls)} - values.keys()):
            message = f"{meant}: this one lacks {', '.join(missing)}."
            raise OptionError(message)
        measured = values["directories"]
        for rates in measured.values() if isinstance(measured, dict) else ():
            if isinstance(rates, dict):
                rates.pop("verdict", None)  # it follows from the rates
        return from_fields(cls, values, meant)


def drive_shares(directories: Sequence[Path]) -> list[float]:
    """Return each directory's share of the bytes that are spread over all.

    Shares are in proportion to the rates that ``tensorstow calibrate`` measured, of reading and
    writing at once. If one was not measured all are equal.
    """
    profile = read_profile() if len(directories) > 1 else None
    measured = [] if profile is None else profile.rates_of_each(directories)
    rates = [rate.mixed for rate in measured] or [1.0] * len(directories)
    return [rate / sum(rates) for rate in rates]


def _drive_of(directory: Path) -> str:
    """Return the device that a directory is on; its own path if that is not known."""
    path = resolve_path(directory)
    for existing in (path, *path.parents):  # it may be made later
        with contextlib.suppress(DirectoryError):
            return inspect_directory(existing).mount.device
    return str(path)


def dtype_key(dtype: torch.dtype) -> str:
    """Return the name of a dtype in profiles."""
    return str(dtype).removeprefix("torch.")


def update_key(dtype: torch.dtype, state_format: str) -> str:
    """Return the name of the update of a dtype, with states in a format, in profiles."""
    return f"{dtype_key(dtype)}/{state_format}"


def identify_machine() -> dict[str, Any]:
    """Return an identifier of this machine, from what its rates depend on."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = None
    if accelerator is not None:
        module: Any = torch.get_device_module(accelerator)
        name = getattr(module, "get_device_name", None)
        device = accelerator.type if name is None else str(name())
    return {
        "node": platform.node(),
        "cpu": _cpu_name(),
        "cores": affinity_cores(),
        "memory_bytes": memory_bytes(),
        "accelerator": device,
        "accelerators": 0 if accelerator is None else torch.accelerator.device_count(),
        "torch": torch.__version__,
    }


def cached_profile_path(machine: Mapping[str, Any] | None = None) -> Path:
    """Return the path of the cached profile of a machine, by its identity; None: this machine's."""
    identity = json.dumps(dict(machine or identify_machine()), sort_keys=True)
    number = hashlib.sha256(identity.encode()).hexdigest()[:16]
    root = os.environ.get("XDG_CACHE_HOME") or expand_path("~/.cache")
    return Path(root) / "tensorstow" / f"profile-{number}.json"


def read_profile(path: Path | None = None) -> Profile | None:
    """Return a profile, or None if no file was named and this machine was not measured.

    Args:
        path: A file; None: this machine's in the cache. One there that cannot be read is warned of.

    Raises:
        OptionError: The named file is no profile, or cannot be read.
    """
    try:
        file = path or cached_profile_path()
    except DirectoryError:  # the user has no home folder
        return None
    try:
        return Profile.from_json(read_text(file))
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        if path is not None:
            why = "there is no such file" if missing else str(error).rstrip(".")
            message = f"A profile was requested in {file}: {why}."
            raise OptionError(message) from error
        if not missing:  # for example of another version; everything works without a profile
            logger.warning("%s is no profile of this version: run `tensorstow calibrate`", file)
        return None


def write_profile(profile: Profile) -> Path:
    """Keep the profile of this machine in the cache, whole or not at all; return its file.

    Raises:
        DirectoryError: The cache folder cannot be written to.
    """
    path = cached_profile_path(profile.machine)
    with named("The profile", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_stream(path) as stream:
            stream.write((json.dumps(profile.as_dict(), indent=2) + "\n").encode())
    return path


def _cpu_name() -> str:
    lines = read_or_empty(_CPUINFO).splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
