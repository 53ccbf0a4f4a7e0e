"""The mount that a path is on, and which kinds of filesystems keep no files on a disk."""

from pathlib import Path

import pytest

from tensorstow.base.mounts import Mount, mount_of, write_cache_of


@pytest.mark.parametrize(
    ("path", "filesystem"), [("/proc/1", "proc"), ("/proc", "proc"), ("/sys/x/y", "sysfs")]
)
def test_what_the_kernel_shows_is_known_also_where_nothing_is(path: str, filesystem: str) -> None:
    mount = mount_of(Path(path))
    assert mount.filesystem == filesystem
    assert mount.is_of_kernel
    assert not mount.is_memory


def test_the_longest_mount_point_is_meant_and_of_equals_the_latest(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "3 2 0:3 / /sys/my\\040disk rw shared:1 - xfs /dev/my\\040disk rw\n"
        "1 0 0:1 / / rw - tmpfs none rw\n"
        "1 0 8:1 / / rw - ext4 /dev/vda rw\n"
        "2 1 0:2 / /sys rw - sysfs sysfs rw\n"
    )
    assert mount_of(Path("/sys/my disk/x"), table) == Mount(
        "/sys/my disk", "xfs", "/dev/my disk", "0:3", frozenset({"rw"})
    )
    assert mount_of(Path("/sys/mine"), table).filesystem == "sysfs"
    assert mount_of(Path("/system"), table).filesystem == "ext4"
    assert mount_of(Path("/system"), tmp_path / "absent").filesystem == "unknown"


@pytest.mark.parametrize(
    ("mount", "kinds"),
    [
        (Mount("/", "ext4", "/dev/vda"), (False, False)),
        (Mount("/", "ext4", "/dev/zram0"), (True, False)),
        (Mount("/", "tmpfs", "tmpfs"), (True, False)),
        (Mount("/", "cgroup2", "cgroup2"), (False, True)),
        (Mount("/", "fuse.sshfs", "host:"), (False, False)),
    ],
)
def test_kinds_of_filesystems(mount: Mount, kinds: tuple[bool, bool]) -> None:
    assert (mount.is_memory, mount.is_of_kernel) == kinds


@pytest.mark.parametrize(
    ("options", "has_barriers"),
    [
        ("rw,relatime - ext4 /dev/vda rw,barrier=1", True),
        ("rw,relatime - ext4 /dev/vda rw,barrier=0", False),
        ("rw,nobarrier - xfs /dev/vda rw", False),
    ],
)
def test_barriers_are_read_from_either_list_of_options(
    options: str,
    has_barriers: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(f"1 0 8:1 / / {options}\n")
    assert mount_of(Path("/run"), table).has_barriers is has_barriers


def test_the_cache_of_a_partition_is_its_drives(tmp_path: Path) -> None:
    drive = tmp_path / "devices" / "nvme0n1"
    (drive / "queue").mkdir(parents=True)
    (drive / "nvme0n1p2").mkdir()
    (drive / "queue" / "write_cache").write_text("write back\n")
    numbers = tmp_path / "block"
    numbers.mkdir()
    (numbers / "259:0").symlink_to(drive)
    (numbers / "259:2").symlink_to(drive / "nvme0n1p2")
    for number in ("259:0", "259:2"):
        assert write_cache_of(Mount("/", "ext4", "/dev/x", number), numbers) == "write back"
    assert write_cache_of(Mount("/", "btrfs", "/dev/x", "0:44"), numbers) is None


@pytest.mark.parametrize(
    ("filesystem", "options", "is_local"),
    [
        ("ext4", "rw", False),
        ("nfs4", "rw,hard,local_lock=none", False),
        ("nfs", "rw,nolock,local_lock=all", True),
        ("lustre", "rw,localflock", True),
        ("cifs", "rw,nobrl", True),
        ("fuse", "rw", True),
        ("fuse.sshfs", "rw", True),
        ("fuse.glusterfs", "rw", False),
        ("fuse.mergerfs", "rw", False),
        ("fuseblk", "rw", False),
    ],
)
def test_whether_locks_reach_other_machines(
    filesystem: str, options: str, *, is_local: bool
) -> None:
    mount = Mount("/x", filesystem, "x", "", frozenset(options.split(",")))
    assert mount.has_local_locks is is_local
