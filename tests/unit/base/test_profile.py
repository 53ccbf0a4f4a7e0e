"""The rates of a machine: as JSON, in the cache, by directory; what is no profile."""

import json
import os
import platform
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from machines import DISK, PROFILE
from tensorstow.base import profile as profiles
from tensorstow.base.errors import DirectoryError, OptionError
from tensorstow.base.profile import (
    ComputeRates,
    DirectoryRates,
    LinkRates,
    Profile,
    cached_profile_path,
    identify_machine,
    read_profile,
    update_key,
    write_profile,
)

FAST = DirectoryRates(read=6e9, write=5e9, mixed=4e9, block_bytes=1 << 20, depth=32)
SLOW = replace(FAST, mixed=0.2e9)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def made(**directories: DirectoryRates) -> Profile:
    return Profile(
        machine=identify_machine(),
        memory_read=20e9,
        memory_write=10e9,
        memory_copy=15e9,
        checksums=10e9,
        update={update_key(torch.bfloat16, "split"): 1e9},
        compute={"cpu": ComputeRates({"float32": 1e11}, 5e9, 1e-5, 1e9)},
        directories=directories,
        link=LinkRates(24e9, 25e9, 40e9),
    )


def test_json_gives_the_same_profile() -> None:
    profile = made(**{"/nvme": FAST})
    assert Profile.from_json(json.dumps(profile.as_dict())) == profile
    bare = profile.but(link=None, directories={})
    assert Profile.from_json(json.dumps(bare.as_dict())) == bare


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"machine": 1}', "[" * 100_000, json.dumps({"memory_read": None})]
)
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="tensorstow calibrate"):
        Profile.from_json(text)


def test_the_cache_has_one_file_for_each_machine() -> None:
    assert read_profile() is None
    profile = made(**{"/nvme": FAST})
    path = write_profile(profile)
    assert path == cached_profile_path()
    assert read_profile() == profile
    other = profile.but(machine={**profile.machine, "cores": 1000})
    assert write_profile(other) != path
    assert read_profile() == profile
    assert sorted(each.name for each in path.parent.iterdir()) == sorted(
        [path.name, cached_profile_path(other.machine).name]
    )


def test_whatever_rates_depend_on_names_the_file() -> None:
    here = identify_machine()
    assert here.keys() == {
        "node",
        "cpu",
        "cores",
        "memory_bytes",
        "accelerator",
        "accelerators",
        "torch",
    }
    assert here["node"] == platform.node()
    assert here["torch"] == torch.__version__
    assert cached_profile_path() == cached_profile_path(here)
    others = {cached_profile_path({**here, name: "another"}) for name in here}
    assert len(others | {cached_profile_path(here)}) == len(here) + 1


def test_an_interrupted_write_leaves_the_old_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_profile(made())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_profile(made(**{"/nvme": FAST}))
    assert read_profile() == made()
    assert list(path.parent.iterdir()) == [path]


def test_a_cache_of_another_version_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    path = write_profile(made())
    path.write_text("{}")
    assert read_profile() is None
    assert "tensorstow calibrate" in caplog.text
    with pytest.raises(OptionError, match="profile"):
        read_profile(path)
    with pytest.raises(OptionError, match="no such file"):
        read_profile(path.parent / "missing")
    lacking = made().as_dict()
    del lacking["memory_read"]
    path.write_text(json.dumps(lacking))
    with pytest.raises(OptionError, match=rf"in {re.escape(str(path))}: .* lacks memory_read"):
        read_profile(path)


def test_a_cache_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    with pytest.raises(DirectoryError, match="profile"):
        write_profile(made())


def test_a_directory_has_the_rates_of_its_disk(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    profile = made(**{str(tmp_path.resolve()): FAST})
    assert profile.rates_of(tmp_path) == FAST
    assert profile.rates_of(inside) == FAST
    assert profile.rates_of(Path("/dev/shm")) is None  # another filesystem
    assert profile.rates_of(tmp_path / "missing") is None
    assert made(a=SLOW, b=FAST).rates_of(None) == FAST
    assert made().rates_of(None) is None


def test_the_verdict_says_what_a_step_costs() -> None:
    assert FAST.is_worth_offloading
    assert FAST.verdict == (
        "Worth offloading to: the states of 1e9 bf16 parameters take 5 s per step."
    )
    assert not SLOW.is_worth_offloading
    assert "Not worth offloading to" in SLOW.verdict
    assert "1e+02 s" in SLOW.verdict


def test_a_machine_has_one_identity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert identify_machine() == identify_machine()
    assert identify_machine()["cores"] == len(os.sched_getaffinity(0))
    monkeypatch.setattr(profiles, "_CPUINFO", tmp_path / "none")
    assert identify_machine()["cpu"]  # the architecture


def test_shares_are_in_proportion_to_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / name for name in "abc"]
    rates = [replace(DISK, mixed=mixed) for mixed in (1.0, 2.0, 5.0)]
    known = dict(zip(map(str, paths), rates, strict=True))
    monkeypatch.setattr(profiles, "read_profile", lambda: PROFILE.but(directories=known))
    assert profiles.drive_shares(paths) == pytest.approx([1 / 8, 2 / 8, 5 / 8])
    assert profiles.drive_shares(paths[:1]) == [1.0]
    assert profiles.drive_shares([]) == []
    monkeypatch.setattr(profiles, "read_profile", lambda: None)
    assert profiles.drive_shares(paths) == [1 / 3] * 3


def test_drives_together_have_the_rate_of_the_last_one_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "_drive_of", str)
    fast = replace(DISK, read=8.0, write=4.0, mixed=6.0)
    slow = replace(DISK, read=2.0, write=2.0, mixed=3.0)
    paths = [tmp_path / name for name in "ab"]
    measured = PROFILE.but(directories={str(paths[0]): fast, str(paths[1]): slow})
    together = measured.rates_over(paths)
    assert together == replace(fast, read=6.0, write=6.0, mixed=9.0)
    assert measured.rates_over(paths[1:]) == slow
    assert measured.rates_over([]) == fast
    assert PROFILE.rates_over(paths) is None


def test_directories_of_one_drive_share_its_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drives = {"a": "1", "b": "1", "c": "2"}
    monkeypatch.setattr(profiles, "_drive_of", lambda path: drives[path.name])
    paths = [tmp_path / name for name in drives]
    measured = PROFILE.but(directories={str(path): DISK for path in paths})
    monkeypatch.setattr(profiles, "read_profile", lambda: measured)
    assert profiles.drive_shares(paths) == pytest.approx([1 / 4, 1 / 4, 1 / 2])
    assert measured.rates_over(paths[:2]) == DISK
    together = measured.rates_over(paths)
    assert together is not None
    assert together.mixed == 2 * DISK.mixed


def test_a_directory_that_is_to_be_made_is_on_the_drive_of_its_parent(tmp_path: Path) -> None:
    assert profiles._drive_of(tmp_path / "not" / "there") == profiles._drive_of(tmp_path)
