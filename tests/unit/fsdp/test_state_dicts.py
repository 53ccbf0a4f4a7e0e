"""State dicts of a stowed model: plain tensors that others save, and loading that updates see."""

import copy
import io
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_model, save, save_model
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

from models import TiedModel
from ranks.pool import Pool
from ranks.stowed import loss_of, twins
from ranks.twin import FETCHED, FETCHED_BESIDE, whole
from tensorstow import AdamW, Plan, stow
from tensorstow.base.errors import OptionError

PLANS = [
    Plan(),
    Plan(overlap="forward", states="disk"),
    Plan(overlap="backward"),
    Plan(parameters="device"),
    Plan(stage=2),
    FETCHED,
    FETCHED_BESIDE,
]


def saved(plan: Plan) -> None:
    """Take a state dict of newest weights, by the model and by torch's functions."""
    both = twins(plan)
    both.train()
    with torch.no_grad():
        loss_of(both.stowed, 0, 9)
    state = both.stowed.state_dict()
    assert list(state) == list(both.alone.state_dict())
    for name, value in both.alone.state_dict().items():
        mine = state[name]
        assert isinstance(mine, DTensor) == (dist.get_world_size() > 1 and plan.stage == 3)
        assert type(mine.to_local() if isinstance(mine, DTensor) else mine) is torch.Tensor
        assert torch.equal(whole(mine), value)
    full = get_model_state_dict(
        both.stowed, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if both.rank == 0:
        for name, value in both.alone.state_dict().items():
            assert type(full[name]) is torch.Tensor
            assert torch.equal(full[name], value)
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    back: dict[str, Any] = torch.load(stream, weights_only=False)
    for name, value in both.alone.state_dict().items():
        assert torch.equal(whole(back[name]), value)
    part = both.stowed.blocks[1].state_dict()["up.weight"]
    assert type(part.to_local() if isinstance(part, DTensor) else part) is torch.Tensor
    both.close()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("plan", PLANS, ids=lambda p: f"z{p.stage}-{p.overlap}-{p.parameters}")
def test_a_state_dict_has_plain_tensors_of_the_newest_weights(
    ranks: Pool, plan: Plan, world: int
) -> None:
    ranks(world).run(saved, plan)


def loaded(plan: Plan, dtype: torch.dtype, way: str) -> None:
    """Go back to weights of before, and on from them: masters of 16-bit weights too."""
    both = twins(plan, dtype)
    both.train(range(1))
    kept: dict[str, Any] = {n: t.detach().clone() for n, t in both.alone.state_dict().items()}
    sharded = {n: t.detach().clone() for n, t in both.stowed.state_dict().items()}
    both.train(range(1, 3))
    both.alone.load_state_dict(kept)
    if way == "sharded":
        both.stowed.load_state_dict(sharded)
    elif way == "whole":
        both.stowed.load_state_dict(kept)
    else:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(both.stowed, kept if both.rank == 0 else {}, options=options)
    both.compare()
    both.train(range(3, 9))  # what a master lost shows where sums of updates round
    both.close()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("plan", "way"),
    [*((plan, "sharded") for plan in PLANS), (Plan(), "broadcast"), (FETCHED, "whole")],
    ids=lambda p: p if isinstance(p, str) else f"z{p.stage}-{p.overlap}-{p.parameters}",
)
def test_what_is_loaded_is_what_updates_go_on_from(
    ranks: Pool, plan: Plan, way: str, world: int
) -> None:
    ranks(world).run(loaded, plan, torch.bfloat16, way)


def through_checkpoint() -> None:
    """Save and load by torch.distributed.checkpoint."""
    folder: list[str | None] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    both = twins(Plan())
    both.train(range(1))
    dcp.save(both.stowed.state_dict(), checkpoint_id=folder[0])
    wanted = [whole(p) for p in both.alone.parameters()]
    both.train(range(1, 2))
    state = both.stowed.state_dict()
    dcp.load(state, checkpoint_id=folder[0])
    both.stowed.load_state_dict(state)
    assert all(map(torch.equal, map(whole, both.stowed.parameters()), wanted))
    both.ours.close()
    if both.rank == 0:
        for file in Path(str(folder[0])).rglob("*.distcp"):
            file.unlink()


@pytest.mark.parametrize("world", [1, 2])
def test_torchs_checkpoints_take_them(ranks: Pool, world: int) -> None:
    ranks(world).run(through_checkpoint)


def written_in_place(plan: Plan) -> None:
    """Write 16-bit weights by hand, as averaging does; the next update begins with them."""
    both = twins(plan, torch.bfloat16)
    both.train(range(3))
    managed = both.ours._params().all()
    assert not any(param.written_by_others for param in managed)
    for model in (both.stowed, both.alone):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    assert all(param.written_by_others for param in managed)
    both.compare()
    both.train(range(3, 4))
    with torch.no_grad():
        for ours, theirs in zip(both.stowed.parameters(), both.alone.parameters(), strict=True):
            ours.to_local().mul_(2.0)
            theirs.mul_(2.0)
    assert all(param.written_by_others for param in managed)
    both.compare()
    both.train(range(4, 8))
    both.close()


@pytest.mark.parametrize("plan", [Plan(), Plan(parameters="device"), FETCHED], ids=str)
def test_updates_see_what_others_write(ranks: Pool, plan: Plan) -> None:
    ranks(2).run(written_in_place, plan)


def refused() -> list[str]:
    both = twins(Plan())
    state = {n: t.clone() for n, t in both.alone.state_dict().items()}
    messages = []
    try:
        both.stowed.load_state_dict(state, assign=True)
    except OptionError as error:
        messages.append(str(error))
    state["embedding.weight"] = torch.zeros(5, 5)
    try:
        both.stowed.load_state_dict(state)
    except RuntimeError as error:
        messages.append(str(error))
    both.ours.close()
    return messages


def test_what_cannot_be_loaded_is_refused_by_name(ranks: Pool) -> None:
    ((assigned, misshapen),) = ranks(1).run(refused)
    assert "assign=True" in assigned
    assert "leave assign out" in assigned
    assert "size mismatch for embedding.weight" in misshapen


def tied() -> TiedModel:
    """Return a model with a large weight under two names, and small ones."""
    torch.manual_seed(0)
    return TiedModel(1 << 13, 64)


def test_one_rank_saves_a_weight_on_disk_by_anybody_s_means(tmp_path: Path) -> None:
    wanted = tied().state_dict()
    plan = Plan(parameters="disk", states="disk")
    model, optimizer = stow(tied(), partial(AdamW, lr=1e-2), plan=plan, dir=tmp_path / "run")
    for _ in range(2):
        state = model.state_dict()
        assert all(type(value) is torch.Tensor for value in state.values())
        assert state["head.weight"] is state["embedding.weight"]  # as of a model that is not stowed
        place = state["head.weight"].data_ptr()
        assert any(
            int(low, 16) <= place < int(high, 16) and str(tmp_path) in file
            for low, high, file in map(mapping, Path("/proc/self/maps").read_text().splitlines())
        )  # memory that is a file
    save_model(model, tmp_path / "model.safetensors")
    torch.save(state, tmp_path / "model.pt")
    optimizer.close()
    back = tied()
    load_model(back, tmp_path / "model.safetensors")
    for found in (back.state_dict(), torch.load(tmp_path / "model.pt")):
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


def mapping(line: str) -> tuple[str, str, str]:
    """Return the begin, the end and the file of what a line of /proc/self/maps is about."""
    addresses, *_ = line.split(maxsplit=1)
    return (*addresses.split("-"), line)


def saved_as_if_whole() -> list[str]:
    """Write a rank's shards by what writes whole tensors; return what was said."""
    both = twins(Plan())
    state = both.stowed.state_dict()
    said = []
    for write in (save, lambda given: save_model(both.stowed, "nowhere") or given):
        with pytest.raises(OptionError) as caught:
            write(state)
        said.append(str(caught.value))
    copied = copy.deepcopy(state)
    assert all(type(value) is DTensor for value in copied.values())
    assert all(torch.equal(whole(v), whole(state[name])) for name, v in copied.items())
    both.close()
    return said


def test_shards_are_not_written_as_if_they_were_whole(ranks: Pool) -> None:
    for said in ranks(2).run(saved_as_if_whole):
        assert all("tensorstow.save_safetensors(model" in text for text in said)
