import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

import children
import tensorstow.colossalai as colossalai
from tensorstow.base.errors import OptionError
from tensorstow.colossalai.utils import get_current_device, set_seed

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()  # noqa: NPY002, S311


@pytest.mark.usefixtures("alone")
def test_one_process_needs_no_launcher_and_is_seeded() -> None:
    colossalai.launch_from_torch(seed=5)
    first = drawn()
    assert not dist.is_initialized()
    set_seed(5)
    assert drawn() == first


@pytest.mark.usefixtures("alone")
def test_half_of_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(OptionError, match="WORLD_SIZE is not"):
        colossalai.launch_from_torch()


def test_launchers_that_did_not_launch_are_told() -> None:
    with pytest.raises(OptionError, match="SLURM_PROCID"):
        colossalai.launch_from_slurm("localhost", 29500)
    with pytest.raises(OptionError, match="OMPI_COMM_WORLD_RANK"):
        colossalai.launch_from_openmpi("localhost", 29500)


LAUNCHED = """
import torch.distributed as dist
import tensorstow.colossalai as colossalai
colossalai.launch_from_torch()
assert dist.get_world_size() == 1
dist.destroy_process_group()
"""


def test_a_launched_process_joins_the_group() -> None:
    values = ("0", "0", "1", "127.0.0.1", "0")
    done = children.run("-c", LAUNCHED, environment=dict(zip(NAMES, values, strict=True)))
    assert done.stdout == "1 ranks\n"


def test_the_device_is_this_ranks() -> None:
    assert isinstance(get_current_device(), torch.device)
