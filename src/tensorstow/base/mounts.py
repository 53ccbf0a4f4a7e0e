"""Filesystems that paths are on, by the kernel's list of mounts."""

import re
from pathlib import Path
from typing import NamedTuple

from tensorstow.base.cores import read_or_empty

MOUNTINFO = Path("/proc/self/mountinfo")
FSTAB = Path("/etc/fstab")
_BLOCK_DEVICES = Path("/sys/dev/block")
_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs"})
_MEMORY_DEVICES = ("/dev/zram", "/dev/ram")
_KERNEL_FILESYSTEMS = frozenset(
    {
        *("proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs", "tracefs", "securityfs"),
        *("configfs", "bpf", "pstore", "efivarfs", "mqueue", "binfmt_misc", "fusectl", "nsfs"),
        *("selinuxfs", "smackfs", "resctrl", "rpc_pipefs", "nfsd", "functionfs", "gadgetfs"),
    }
)

_SHARED_LOCKS = ("fuse.glusterfs", "fuse.ceph", "fuse.juicefs", "fuse.mfs", "fuse.moosefs")
_OF_ONE_MACHINE = ("fuse.mergerfs", "fuse.fuse-overlayfs", "fuse.gocryptfs", "fuse.encfs")
_LOCAL_LOCKS = frozenset(
    {"nolock", "local_lock=all", "local_lock=flock", "localflock", "noflock", "nobrl"}
)


class Mount(NamedTuple):
    """A mounted filesystem."""

    point: str
    filesystem: str
    """The kind as the kernel names it: ext4, xfs, overlay, tmpfs ..."""
    device: str
    """What is mounted: /dev/nvme0n1p2, a network share, or a plain word."""
    number: str = ""
    """The block device as the kernel numbers it, 259:2; 0 before the colon: it is none."""
    options: frozenset[str] = frozenset()

    @property
    def has_barriers(self) -> bool:
        """Return whether a sync of a file reaches the drive, as long as the drive flushes."""
        return not self.options & {"nobarrier", "barrier=0"}

    @property
    def has_local_locks(self) -> bool:
        """Return whether other machines may have this mounted and do not see this one's locks."""
        is_fuse = self.filesystem == "fuse" or self.filesystem.startswith("fuse.")
        is_exempt = self.filesystem.startswith((*_SHARED_LOCKS, *_OF_ONE_MACHINE))
        return (is_fuse and not is_exempt) or bool(self.options & _LOCAL_LOCKS)

    @property
    def is_memory(self) -> bool:
        """Bytes written here stay in RAM."""
        is_block_device = self.device.startswith(_MEMORY_DEVICES)
        return self.filesystem in _MEMORY_FILESYSTEMS or is_block_device

    @property
    def is_of_kernel(self) -> bool:
        """What is here are the kernel's own values, and no files that are kept."""
        return self.filesystem in _KERNEL_FILESYSTEMS


def mount_of(path: Path, mountinfo: Path = MOUNTINFO) -> Mount:
    """Return the mount that a path lies on: the longest that is a parent, the latest of equals.

    The path is absolute, without symbolic links, and may be missing. The kernel's own list is read
    because statfs has only numbers, which Python does not expose.
    """
    lines = _lines_of(mountinfo)
    mounts = [mount for line in lines if path.is_relative_to((mount := _parse_mount(line)).point)]
    # max() keeps the first of equals, and a later mount on the same point hides the earlier.
    unknown = Mount("/", "unknown", "unknown")
    return max(reversed(mounts), key=lambda mount: len(mount.point), default=unknown)


def write_cache_of(mount: Mount, root: Path = _BLOCK_DEVICES) -> str | None:
    """Return "write back" if a drive is told to flush its cache, "write through" if it has none.

    That is what the kernel believes; None: the mount is not of one block device.
    """
    device = root / mount.number
    for folder in (device, device.resolve().parent):  # a partition's drive is its parent
        if text := read_or_empty(folder / "queue" / "write_cache").strip():
            return text
    return None


def unmounted_point(path: Path, *, fstab: Path = FSTAB, mountinfo: Path = MOUNTINFO) -> Path | None:
    """Return the mount point that a path is at or below, if the system's table has it unmounted.

    What is written there goes to the disk that the mount point is on, often the root disk.
    """
    rows = [line.split() for line in _lines_of(fstab) if not line.lstrip().startswith("#")]
    points = {Path(_unescape(row[1])) for row in rows if len(row) > 2}
    above = sorted(point for point in points if point.is_absolute() and path.is_relative_to(point))
    mounted = {Path(_parse_mount(line).point) for line in _lines_of(mountinfo)} if above else set()
    return next((p for p in above if p not in mounted and p != Path(p.anchor)), None)


def _lines_of(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


def _parse_mount(line: str) -> Mount:
    """Read one line: ``36 35 98:0 /root /point options [tags] - filesystem device options``."""
    before, _, after = line.partition(" - ")
    filesystem, device, *rest = after.split(" ")
    _, _, number, _, point, of_mount, *_ = before.split(" ")
    options = frozenset(option for text in (of_mount, *rest) for option in text.split(","))
    return Mount(_unescape(point), filesystem, _unescape(device), number, options)


def _unescape(text: str) -> str:
    r"""Undo the kernel's escapes: a space in a path is written as ``\040``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
