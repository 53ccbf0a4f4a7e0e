"""Directories that can hold states, and those that only look like it."""

import os
from functools import partial
from pathlib import Path

import pytest

from tensorstow.base.directories import (
    check_directory,
    choose_directory,
    default_candidates,
    expand_path,
    inspect_directory,
    make_directories,
    make_folder,
    path_inside,
)
from tensorstow.base.errors import DirectoryError, StoreFormatError
from tensorstow.base.mounts import mount_of

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
    assert (facts.mount.filesystem, facts.mount.device) == ("ext4", "/dev/vda")
    assert facts.is_writable
    assert not facts.mount.is_memory
    assert facts.free_bytes > 0


def test_probing_leaves_nothing_behind(tmp_path: Path) -> None:
    inspect_directory(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_shared_memory_is_seen_as_memory() -> None:
    assert inspect_directory("/dev/shm").mount.filesystem == "tmpfs"
    with pytest.raises(DirectoryError, match="stays in RAM"):
        check_directory("/dev/shm")


@pytest.mark.parametrize(
    ("kind", "device"), [("tmpfs", "tmpfs"), ("ramfs", "none"), ("ext4", "/dev/zram0")]
)
def test_every_kind_of_memory_is_refused(tmp_path: Path, kind: str, device: str) -> None:
    table = mount_table(tmp_path, ("/", "ext4", "/dev/vda"), (str(tmp_path), kind, device))
    with pytest.raises(DirectoryError, match=f"{kind} on {device}"):
        check_directory(tmp_path, mountinfo=table)


def test_symbolic_links_lead_to_the_real_filesystem(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/dev/shm")
    assert inspect_directory(link).mount.filesystem == "tmpfs"


def test_no_mount_table_means_unknown_not_refused(tmp_path: Path) -> None:
    facts = check_directory(tmp_path, mountinfo=tmp_path / "absent")
    assert facts.mount.filesystem == "unknown"


def test_a_missing_directory_is_made_and_its_parents_are_not(tmp_path: Path) -> None:
    (facts,) = make_directories([tmp_path / "run"])
    assert facts.path == tmp_path / "run"
    deep = tmp_path / "nvm e" / "a" / "run"
    with pytest.raises(DirectoryError) as caught:
        make_directories([tmp_path / "other", deep])
    assert str(caught.value) == (
        f"Directory {deep} was requested, and {tmp_path / 'nvm e'} does not exist. If the path is"
        f" right and its disk mounted, make it: mkdir -p '{deep}'"
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]


def test_what_was_made_for_one_that_is_refused_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(DirectoryError, match=f"{file}/run was requested: Not a directory"):
        make_directories([tmp_path / "nvme", file / "run"])
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


@pytest.mark.parametrize("path", ["/proc", "/proc/self/x", "/proc/x/y", "/sys/kernel", "/sys/x"])
def test_a_filesystem_of_the_kernel_is_no_place_for_files(path: str) -> None:
    calls = (lambda: make_directories([path]), lambda: make_folder(Path(path)))
    for call in (*calls, lambda: check_directory(path)):
        with pytest.raises(DirectoryError, match=r"is in (proc|sysfs), .* no place for files"):
            call()


def test_nothing_is_made_in_a_filesystem_of_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making a directory among cgroups succeeds, and makes a cgroup."""
    table = mount_table(tmp_path, ("/", "ext4", "/dev/vda"), (str(tmp_path), "cgroup2", "none"))
    known = partial(mount_of, mountinfo=table)
    monkeypatch.setattr("tensorstow.base.directories.mount_of", known)
    for call in (lambda: make_directories([tmp_path / "x"]), lambda: make_folder(tmp_path / "x")):
        with pytest.raises(DirectoryError, match="is in cgroup2"):
            call()
    assert not (tmp_path / "x").exists()


def test_a_folder_that_cannot_be_made_is_an_error_of_ours(tmp_path: Path) -> None:
    make_folder(tmp_path / "one" / "two")
    make_folder(tmp_path / "one" / "two")
    for slip in (
        tmp_path / "a" / "b" / "c",
        Path("/no-such-mount/run"),
        Path("/no-such-mount/a/b"),
    ):
        with pytest.raises(DirectoryError, match=r"does not exist.*mkdir -p"):
            make_folder(slip)
    assert not (tmp_path / "a").exists()
    assert not Path("/no-such-mount").exists()
    (tmp_path / "file").touch()
    with pytest.raises(DirectoryError, match=str(tmp_path / "file")):
        make_folder(tmp_path / "file" / "two")


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


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../file", "/etc/passwd", "a/../../file", "link", "a\0b", 3, None],
)
def test_a_name_that_leads_out_of_a_directory_is_refused(tmp_path: Path, name: object) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "file").touch()
    (folder / "link").symlink_to(tmp_path / "file")
    with pytest.raises(StoreFormatError, match=r"index names .* which is no file in") as told:
        path_inside(folder, name, folder / "index")
    assert repr(name) in str(told.value)


def test_names_inside_of_a_directory_are_paths(tmp_path: Path) -> None:
    blobs, cached = tmp_path / "blobs", tmp_path / "snapshots" / "one"
    for folder in (blobs, cached):
        folder.mkdir(parents=True)
    (blobs / "0a").touch()
    (cached / "cached").symlink_to("../../blobs/0a")
    (tmp_path / "elsewhere").touch()
    (blobs / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("cached", "absent", "zero/weight"):
        assert path_inside(cached, name, cached / "index") == cached / name
    with pytest.raises(StoreFormatError, match="'link'"):
        path_inside(blobs, "link", blobs / "index")
    assert path_inside(blobs, "link", blobs / "index", links=True) == blobs / "link"


def test_an_error_shows_a_path_as_it_is_typed() -> None:
    with pytest.raises(DirectoryError, match=r"^'s3:/bucket' was given as a path: it is a URL"):
        expand_path(Path("s3://bucket"))
