"""Over one rank on the CPU nothing is gathered, nothing reduced, and no weight stays in memory."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.base.plan import Plan
from tensorstow.fsdp.module_hooks import param_groups_of
from tensorstow.fsdp.report import parameter_bytes
from tensorstow.fsdp.shard_storage import ShardStorage
from tensorstow.fsdp.stow import stow
from tensorstow.fsdp.stowed_parameter import InPlaceReduceScatter, UnshardedAlias
from tensorstow.optim.adam import AdamW
from torch_versions import RESETS_FSDP


class Counted(ShardStorage):
    """Counts who reads it."""

    readers = 0

    def pin(self) -> torch.Tensor:
        self.readers += 1
        return super().pin()

    def unpin(self, *, dirty: bool = False) -> None:
        assert not dirty
        self.readers -= 1


def test_an_alias_pins_its_shard_until_it_is_freed() -> None:
    shard = Counted(torch.ones(4), 4)
    alias = UnshardedAlias(shard)
    assert alias.untyped_storage().size() == 0
    for _ in range(2):  # what is begun twice ends once
        alias.pin()
        assert shard.readers == 1
    assert alias.untyped_storage().size() == alias.numel() * alias.itemsize
    for _ in range(2):
        alias.untyped_storage().resize_(0)
        assert shard.readers == 0
    with pytest.raises(OptionError):
        alias.add(1)


def test_input_and_output_of_a_reduction_are_one() -> None:
    comm = InPlaceReduceScatter()
    device = torch.device("cpu")

    def pair(size: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        return [comm.allocate(torch.Size([size]), dtype=dtype, device=device) for _ in "io"]

    first, second = pair(3)
    assert first is second
    assert pair(3)[0] is not first
    comm.allocate(torch.Size([5]), dtype=torch.float32, device=device)  # its output never comes
    comm.reset()
    first, second = pair(5)
    assert first is second
    with pytest.raises(RuntimeError, match="several ranks"):
        comm(output_tensor=first, input_tensor=second, group=None, op=None)


class Clamping(nn.Linear):
    """Keeps its weights small, whenever it runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("overlap", ["none", "backward"])
def test_a_weight_on_disk_that_its_forward_writes_is_written_there(
    tmp_path: Path, overlap: str
) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(Clamping(32, 32), nn.Tanh()) for _ in range(6)))

    plan = Plan(parameters="disk", overlap=overlap, prefetch=0)
    model, optimizer = stow(make(), partial(AdamW, lr=1e-2), plan=plan, dir=tmp_path)
    alone = make()
    theirs = AdamW(list(alone.named_parameters()), lr=1e-2)
    for _ in range(3):
        for each, its in ((model, optimizer), (alone, theirs)):
            each(torch.ones(2, 32)).sum().backward()
            its.step()
            its.zero_grad()
    for ours, plain in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), plain)
    optimizer.close()
    theirs.close()


def stowed(directory: Path, overlap: str, *, bias: bool = False) -> tuple[nn.Module, AdamW]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8, bias=bias), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*layers)
    plan = Plan(parameters="disk", states="disk", overlap=overlap)
    make = partial(AdamW, lr=1e-2, durability="none")
    model, optimizer = stow(model, make, plan=plan, dir=directory)
    return model, optimizer


def test_weights_are_computed_with_where_they_live(tmp_path: Path) -> None:
    model, optimizer = stowed(tmp_path, "backward")
    homes = {id(m): p.to_local().local_shard.data_ptr() for m in model for p in m.parameters()}
    used = {}

    def look(module: nn.Module, _: object) -> None:
        used[id(module)] = next(module.parameters()).data_ptr()

    for module in model:
        module.register_forward_pre_hook(look)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert used == homes
    pool = {s for m in model for p in m.parameters() if (s := p.to_local().pager)}
    assert len(pool) == 4
    assert [buffer.pins for buffer in pool] == [0] * 4
    assert parameter_bytes(model).bytes_read > 0
    optimizer.close()


@RESETS_FSDP
def test_gradients_are_not_mixed_behind_a_reduction_that_broke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = stowed(tmp_path, "none")
    whole = InPlaceReduceScatter.allocate
    calls = []

    def breaks(self: InPlaceReduceScatter, *args: object, **kwargs: object) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 4:  # the output of the second unit's
            raise KeyboardInterrupt
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(InPlaceReduceScatter, "allocate", breaks)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, 8)).sum().backward()
    monkeypatch.undo()
    model(torch.ones(2, 8))  # lets FSDP2 forget that backward
    comm = param_groups_of(model[0]._get_fsdp_state())[0]._reduce_scatter_comm
    size = {"size": torch.Size([64]), "dtype": torch.float32, "device": torch.device("cpu")}
    first, second = comm.allocate(**size), comm.allocate(**size)
    assert first is second
    assert comm.allocate(**size) is not first
    optimizer.close()


@pytest.mark.parametrize("way", ["to_unsharded", "to_sharded"])
@pytest.mark.parametrize("overlap", ["none", "backward"])
@RESETS_FSDP
def test_training_goes_on_behind_an_interrupt_between_two_weights_of_a_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: str, way: str
) -> None:
    model, optimizer = stowed(tmp_path, overlap, bias=True)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    sharded = param_groups_of(model[2]._get_fsdp_state())[0].fsdp_params[1]

    def breaks() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sharded, way, breaks)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, 8))
    monkeypatch.undo()
    loss = model(torch.ones(2, 8)).sum()
    loss.backward()
    optimizer.step()
    pool = {p.to_local().pager for p in model.parameters()}
    assert [buffer.pins for buffer in pool if buffer] == [0] * 4
    optimizer.close()
