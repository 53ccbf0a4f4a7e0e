"""Directories that can hold states, and those that only look like it."""

import os
from pathlib import Path

import pytest

from tensorstow.base.directories import (
    check_directory,
    choose_directory,
    default_candidates,
    inspect_directory,
    make_directories,
)
from tensorstow.base.errors import DirectoryError

HUGE = 1 << 62


def mount_table(folder: Path, *mounts: tuple[str, str, str]) -> Path:
    """Write a mountinfo of (mount point, filesystem, device)."""
    lines = [
        f"{number} 1 8:{number} / {point} rw,relatime shared:1 - {kind} {device} rw\n"
        for number, (point, kind, device) in enumerate(mounts)
    ]
    path = folder / "mountinfo"
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Make everything one ext4 disk, wherever the tests run."""
    return mount_table(tmp_path, ("/", "ext4", "/dev/vda"))


def test_facts_of_a_directory_on_disk(tmp_path: Path, disk: Path) -> None:
    facts = inspect_directory(tmp_path, mountinfo=disk)
    assert facts.path == tmp_path.resolve()
    assert (facts.filesystem, facts.device) == ("ext4", "/dev/vda")
    assert facts.is_writable
    assert not facts.is_memory_backed
    assert facts.free_bytes > 0


def test_probing_leaves_nothing_behind(tmp_path: Path) -> None:
    inspect_directory(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_shared_memory_is_seen_as_memory() -> None:
    assert inspect_directory("/dev/shm").filesystem == "tmpfs"
    with pytest.raises(DirectoryError, match="stays in RAM"):
        check_directory("/dev/shm")


@pytest.mark.parametrize(
    ("kind", "device"), [("tmpfs", "tmpfs"), ("ramfs", "none"), ("ext4", "/dev/zram0")]
)
def test_every_kind_of_memory_is_refused(tmp_path: Path, kind: str, device: str) -> None:
    table = mount_table(tmp_path, ("/", "ext4", "/dev/vda"), (str(tmp_path), kind, device))
    with pytest.raises(DirectoryError, match=f"{kind} on {device}"):
        check_directory(tmp_path, mountinfo=table)


def test_the_longest_mount_point_wins_in_any_order(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    table = mount_table(tmp_path, (str(inner), "xfs", "/dev/b"), ("/", "ext4", "/dev/a"))
    assert inspect_directory(inner, mountinfo=table).filesystem == "xfs"
    assert inspect_directory(tmp_path, mountinfo=table).filesystem == "ext4"


def test_a_later_mount_on_the_same_point_hides_the_earlier(tmp_path: Path) -> None:
    table = mount_table(tmp_path, ("/", "tmpfs", "none"), ("/", "ext4", "/dev/vda"))
    assert inspect_directory(tmp_path, mountinfo=table).filesystem == "ext4"


def test_a_name_that_only_begins_alike_is_another_directory(tmp_path: Path) -> None:
    (tmp_path / "run2").mkdir()
    table = mount_table(tmp_path, ("/", "ext4", "a"), (f"{tmp_path}/run", "tmpfs", "b"))
    assert inspect_directory(tmp_path / "run2", mountinfo=table).filesystem == "ext4"


def test_spaces_in_mount_points_are_unescaped(tmp_path: Path) -> None:
    spaced = tmp_path / "my disk"
    spaced.mkdir()
    escaped = str(spaced).replace(" ", "\\040")
    table = mount_table(tmp_path, ("/", "ext4", "a"), (escaped, "xfs", "b"))
    assert inspect_directory(spaced, mountinfo=table).filesystem == "xfs"


def test_symbolic_links_lead_to_the_real_filesystem(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/dev/shm")
    assert inspect_directory(link).filesystem == "tmpfs"


def test_no_mount_table_means_unknown_not_refused(tmp_path: Path) -> None:
    facts = check_directory(tmp_path, mountinfo=tmp_path / "absent")
    assert facts.filesystem == "unknown"


def test_missing_directories_are_made_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (facts,) = make_directories([tmp_path / "run"])
    assert facts.path == tmp_path / "run"
    assert not caplog.records
    deep = tmp_path / "nvme" / "a" / "run"
    make_directories([deep, tmp_path / "run"])
    assert deep.is_dir()
    assert f"{deep} was made, and {tmp_path / 'nvme'} above it" in caplog.text


def test_what_was_made_for_one_that_is_refused_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(DirectoryError, match=f"{file}/run was requested and cannot be made"):
        make_directories([tmp_path / "nvme" / "run", file / "run"])
    assert sorted(tmp_path.iterdir()) == [file]
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DirectoryError, match="nowhere was requested but does not exist"):
        make_directories([tmp_path / "link"])


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match=r"does not exist\. Create it"):
        check_directory(tmp_path / "absent")


def test_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(DirectoryError, match="is not a directory"):
        check_directory(file)


def test_a_directory_that_takes_no_files_is_refused(disk: Path) -> None:
    # Nobody can create a file in /proc, root included.
    with pytest.raises(DirectoryError, match="no file can be created"):
        check_directory("/proc", mountinfo=disk)


def test_too_little_space_names_both_sizes(tmp_path: Path, disk: Path) -> None:
    with pytest.raises(DirectoryError, match=r"iB free where 4096\.0 PiB are needed"):
        check_directory(tmp_path, HUGE, mountinfo=disk)


def test_exactly_enough_space_is_enough(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _path: space)
    free = space.f_bavail * space.f_frsize
    assert check_directory(tmp_path, free, mountinfo=disk).free_bytes == free
    with pytest.raises(DirectoryError):
        check_directory(tmp_path, free + 1, mountinfo=disk)


def test_the_first_candidate_that_will_do_is_chosen(tmp_path: Path) -> None:
    memory, good, other = (tmp_path / name for name in ("memory", "good", "other"))
    for folder in (memory, good, other):
        folder.mkdir()
    table = mount_table(tmp_path, ("/", "ext4", "/dev/vda"), (str(memory), "tmpfs", "none"))
    candidates = [tmp_path / "absent", memory, good, other]
    assert choose_directory(0, candidates, mountinfo=table).path == good


def test_with_no_candidate_left_every_reason_is_told(tmp_path: Path, disk: Path) -> None:
    candidates = [tmp_path / "absent", Path("/proc"), tmp_path]
    with pytest.raises(DirectoryError) as caught:
        choose_directory(HUGE, candidates, mountinfo=disk)
    lines = str(caught.value).splitlines()
    assert "4096.0 PiB" in lines[0]
    for line, words in zip(lines[1:], ("not exist", "no file can", "free where"), strict=True):
        assert words in line


def test_the_users_own_choice_comes_first_and_shared_memory_never() -> None:
    candidates = default_candidates({"TMPDIR": "/scratch", "HOME": "/home/me"})
    assert candidates == [
        Path("/scratch"),
        Path("/var/tmp"),
        Path("/home/me/.cache"),
        Path.cwd(),
    ]
    assert default_candidates({}) == [Path("/var/tmp"), Path.cwd()]
