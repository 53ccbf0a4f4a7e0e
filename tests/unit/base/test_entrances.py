"""Paths that no entrance takes: URLs, and directories of the root disk where a mount was meant."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import tensorstow
from tensorstow import AdamW, Plan, StowedOptimizer, deepspeed, offload_activations, stow
from tensorstow.base import directories, mounts
from tensorstow.base.errors import DirectoryError
from tensorstow.colossalai import HybridAdam
from tensorstow.tensornvme import DiskOffloader


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def initialize(path: str) -> object:
    place = {"device": "nvme", "nvme_path": path}
    zero = {"stage": 3, "offload_optimizer": place, "offload_param": place}
    options = {"type": "AdamW", "params": {"lr": 1e-3}}
    config = {"train_batch_size": 1, "optimizer": options, "zero_optimization": zero}
    return deepspeed.initialize(model=net(), config=config)


def states(path: str) -> object:
    return AdamW(net().parameters(), states="disk", dir=path)


ON_DISK = Plan(parameters="disk", states="disk", activations="disk")  # type: ignore[arg-type]
WRITERS: dict[str, Callable[[str], object]] = {
    "AdamW": states,
    "several": lambda path: AdamW(net().parameters(), states="disk", dir=["run", path]),
    "StowedOptimizer": lambda path: StowedOptimizer(
        torch.optim.SGD, net().parameters(), lr=1.0, momentum=0.9, states="disk", dir=path
    ),
    "stow": lambda path: stow(net(), AdamW, plan=ON_DISK, dir=path),
    "commits": lambda path: stow(net(), AdamW, plan=Plan(), dir=path),
    "activations": lambda path: offload_activations(net(), to="disk", dir=path),
    "weights": lambda path: tensorstow.save_safetensors(net(), path),
    "int8": lambda path: tensorstow.quantize_to_int8(net(), "weights", path),
    "report": lambda path: AdamW(net().parameters()).report(path),
    "DeepSpeed": initialize,
    "HybridAdam": lambda path: HybridAdam(
        net().parameters(), nvme_offload_fraction=1.0, nvme_offload_dir=path
    ),
    "TensorNVMe": DiskOffloader,
}
READERS: dict[str, Callable[[str], object]] = {
    "weights=": lambda path: stow(net(), AdamW, plan=Plan(), weights=path),
    "weights= to read": lambda path: stow(net(), None, plan=Plan(), weights=path),
    "load": lambda path: AdamW(net().parameters()).load_safetensors(path),
    "save": lambda path: AdamW(net().parameters()).save_safetensors(path),
}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("weights").mkdir()
    tensorstow.save_safetensors(net(), "weights")


@pytest.mark.parametrize("url", ["s3://bucket/run", "hf://a/b", "file:///tmp/run"])
@pytest.mark.parametrize("use", [*WRITERS.items(), *READERS.items()], ids=lambda use: use[0])
def test_a_url_is_no_path(use: tuple[str, Callable[[str], object]], url: str) -> None:
    with pytest.raises(DirectoryError, match="it is a URL, and only files of this machine"):
        use[1](url)
    assert {path.name for path in Path().iterdir()} <= {"weights", "run"}


@pytest.mark.parametrize("use", WRITERS.items(), ids=lambda use: use[0])
def test_a_mount_point_without_its_disk_takes_no_files(
    use: tuple[str, Callable[[str], object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = tmp_path / "with space"
    point.mkdir()
    table = tmp_path / "fstab"
    escaped = str(point).replace(" ", r"\040")
    table.write_text(f"# a comment\nUUID=1 {escaped} ext4 defaults 0 2\nnone none swap sw 0 0\n")
    monkeypatch.setattr(
        directories, "unmounted_point", partial(mounts.unmounted_point, fstab=table)
    )
    with pytest.raises(DirectoryError, match=r"nothing is mounted on .*with space, a mount point"):
        use[1](str(point / "run"))
    assert not list(point.iterdir())


def test_a_mounted_one_and_others_do(tmp_path: Path) -> None:
    table, mounted = tmp_path / "fstab", tmp_path / "mountinfo"
    table.write_text("/dev/a / ext4\n/dev/b /data ext4\n/dev/c /data/deep ext4 noauto\nbroken\n")
    mounted.write_text("1 0 8:0 / / rw - ext4 /dev/a rw\n2 1 8:1 / /data rw - ext4 /dev/b rw\n")
    point = partial(mounts.unmounted_point, fstab=table, mountinfo=mounted)
    assert point(Path("/data/deep/run")) == Path("/data/deep")
    for path in ("/data/run", "/data", "/", "/home/run", "/data/deeper"):
        assert point(Path(path)) is None
    mounted.write_text("1 0 8:0 / / rw - ext4 /dev/a rw\n")
    assert point(Path("/data")) == Path("/data")
    assert mounts.unmounted_point(Path("/data"), fstab=tmp_path / "missing") is None


@pytest.mark.parametrize("use", WRITERS.items(), ids=lambda use: use[0])
def test_no_directory_of_the_root_is_made(use: tuple[str, Callable[[str], object]]) -> None:
    """A name there is a disk that is not mounted more often than a new folder."""
    for path in ("/no-such-mount", "/no-such-mount/run"):
        with pytest.raises(DirectoryError, match="/no-such-mount does not exist"):
            use[1](path)
    assert not Path("/no-such-mount").exists()
