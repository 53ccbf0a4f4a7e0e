"""Which rank this is, and joining the others."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ports import free_port
from tensorstow.base.errors import OptionError
from tensorstow.deepspeed import initialize
from tensorstow.deepspeed.comm import get_local_rank, init_distributed
from tensorstow.deepspeed.zero import Init
from tensorstow.fsdp.sharding import rank_here


@pytest.fixture(autouse=True)
def _no_group() -> None:
    """Begin as a new process does, whatever other tests have joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("join", [init_distributed, Init])
def test_a_process_that_nobody_launched_has_a_group_of_its_own(
    join: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that scripts and trainers may ask torch.distributed, as under upstream."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    join()
    assert dist.get_world_size() == 1
    assert (rank_here(), get_local_rank()) == (0, 0)


def test_a_model_is_not_made_before_its_ranks_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(OptionError, match="MASTER_ADDR, by which they meet, is not set"):
        Init()


def test_the_environment_of_a_launcher_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "3")):
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        # Set, so that what init_distributed sets is taken back; deleted, so that it does.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    init_distributed(distributed_port=port)
    try:
        assert dist.get_world_size() == 1
        assert (rank_here(), get_local_rank()) == (0, 3)
        init_distributed()
    finally:
        dist.destroy_process_group()


def test_ranks_that_have_not_met_do_not_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}}
    with pytest.raises(OptionError, match="there is no process group"):
        initialize(model=torch.nn.Linear(1, 1), config=config, dist_init_required=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    initialize(model=torch.nn.Linear(1, 1), config=config, dist_init_required=False)[0].destroy()


def test_arguments_say_where_ranks_meet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "DEEPSPEED_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    meeting = f"file://{tmp_path / 'meeting'}"
    with pytest.raises(OptionError, match="pass rank= and world_size="):
        init_distributed("gloo", init_method=meeting)
    with pytest.raises(OptionError, match="pass rank= and world_size="):
        init_distributed("gloo", rank=0)
    with pytest.raises(OptionError, match="there is no process group"):
        init_distributed("gloo", dist_init_required=False)
    asked = {"rank": 0, "world_size": 1, "timeout": timedelta(seconds=77)}
    init_distributed("gloo", init_method=meeting, **asked)
    try:
        assert dist.get_world_size() == 1
        group = dist.distributed_c10d._get_default_group()
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
    finally:
        dist.destroy_process_group()
