"""What the environment says of other ranks is believed: they are joined, or it is an error."""

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ports import free_port
from tensorstow import Adam, AdamW, Plan, StowedOptimizer, stow
from tensorstow.base.errors import OptionError, RankError
from tensorstow.base.launch import Launch
from tensorstow.fsdp.sharding import join_ranks

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")


@pytest.fixture
def unjoined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be rank 1 of 2, as a launcher says that tells nothing else, without a process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.mark.usefixtures("unjoined")
@pytest.mark.parametrize(
    "plan", [Plan(), Plan(parameters="disk"), "auto"], ids=["whole", "disk", "auto"]
)
def test_ranks_that_cannot_meet_do_not_train_alone(plan: Any) -> None:  # noqa: ANN401
    model = nn.Linear(4, 4)
    before = model.weight
    with pytest.raises(OptionError, match=r"MASTER_ADDR and MASTER_PORT, by which they meet"):
        stow(model, AdamW, plan=plan)
    assert model.weight is before
    assert not dist.is_initialized()


@pytest.mark.usefixtures("unjoined")
def test_a_model_that_is_only_read_needs_no_other_rank() -> None:
    model, _ = stow(nn.Linear(4, 4), None, plan=Plan())
    assert model(torch.ones(1, 4)).shape == (1, 4)
    assert not dist.is_initialized()


OPTIMIZERS: dict[str, Any] = {
    "adam": Adam,
    "forward": partial(AdamW, overlap="forward"),
    "backward": partial(AdamW, overlap="backward"),
    "generic": lambda p, module: StowedOptimizer(torch.optim.SGD, p, lr=0.1, states="host"),  # noqa: ARG005
}


@pytest.mark.usefixtures("unjoined")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_takes_no_step_before_the_ranks_have_met(name: str) -> None:
    model = nn.Linear(4, 4)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = OPTIMIZERS[name](model.parameters(), module=model)  # the group may come later

    def step() -> None:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    with pytest.raises(OptionError, match="there are 2 ranks, which have not met"):
        step()
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.usefixtures("unjoined")
def test_a_run_takes_no_directory_before_the_ranks_have_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(OptionError, match=r"dir= was given .* set WORLD_SIZE=1"):
        AdamW(model.parameters(), dir=tmp_path / "run")
    monkeypatch.setenv("WORLD_SIZE", "1")  # as the error says
    with AdamW(model.parameters(), dir=tmp_path / "run") as optimizer:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


def test_ranks_that_do_not_come_are_an_error_with_the_variables() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    port = str(free_port())
    here = Launch(2, 1, source="RANK=1 and WORLD_SIZE=2", host="127.0.0.1", port=port)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", port)
        with pytest.raises(RankError, match=rf"2 ranks were to meet at 127.0.0.1:{port}, and did"):
            join_ranks(here, "gloo", timedelta(seconds=1))
