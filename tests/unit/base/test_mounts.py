"""The mount that a path is on, and which kinds of filesystems keep no files on a disk."""

from pathlib import Path

import pytest

from tensorstow.base.mounts import Mount, mount_of


@pytest.mark.parametrize(
    ("path", "filesystem"), [("/proc/1", "proc"), ("/proc", "proc"), ("/sys/x/y", "sysfs")]
)
def test_what_the_kernel_shows_is_known_also_where_nothing_is(path: str, filesystem: str) -> None:
    mount = mount_of(Path(path))
    assert mount.filesystem == filesystem
    assert mount.is_of_kernel
    assert not mount.is_memory


def test_a_mount_inside_of_another_one_is_by_itself(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "1 0 8:1 / / rw - ext4 /dev/vda rw\n"
        "2 1 0:2 / /sys rw - sysfs sysfs rw\n"
        "3 2 0:3 / /sys/my\\040disk rw shared:1 - xfs /dev/my\\040disk rw\n"
    )
    assert mount_of(Path("/sys/my disk/x"), table) == Mount("/sys/my disk", "xfs", "/dev/my disk")
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
