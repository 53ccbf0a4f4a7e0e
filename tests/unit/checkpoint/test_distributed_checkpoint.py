"""``torch.distributed.checkpoint`` in one process: its own ways to and from an optimizer."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from states_on_disk import printed
from tensorstow import AdamW, PipelinePolicy
from tensorstow.checkpoint import full_state

# In one process there is no group, which torch warns of.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SMALL = PipelinePolicy(chunk_elements=4096)
OVERLAPS = ["none", "forward", "backward"]


@pytest.fixture(autouse=True)
def _mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_state, "RAM_BYTES", -1)


def model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 20)).to(dtype)
    with torch.no_grad():
        net[2].bias[:3] = torch.tensor([-0.0, float("inf"), 1e-30])
        net[2].weight.requires_grad_(requires_grad=False)
    return net


def adamw(net: nn.Module, directory: Path, **options: object) -> AdamW:
    directory.mkdir()
    return AdamW(net.parameters(), states="disk", dir=directory, policy=SMALL, lr=0.01, **options)  # type: ignore[arg-type]


def train(net: nn.Module, opt: torch.optim.Optimizer, steps: range) -> None:
    dtype = next(net.parameters()).dtype
    for step in steps:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(dtype)
        opt.zero_grad()
        net(x)[:, 3:].square().mean().backward()
        opt.step()


def bits(net: nn.Module) -> dict[str, list[int]]:
    return {n: t.view(torch.uint8).flatten().tolist() for n, t in net.state_dict().items()}


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_format", [None, "int8"])
def test_making_states_leaves_the_weights_and_the_groups(
    tmp_path: Path, overlap: str, dtype: torch.dtype, state_format: str | None
) -> None:
    net = model(dtype)
    before = bits(net)
    opt = adamw(net, tmp_path / "a", module=net, overlap=overlap, state_format=state_format)
    saved = get_optimizer_state_dict(net, opt)
    assert bits(net) == before
    assert opt.param_groups[0]["lr"] == 0.01
    assert all(p.grad is None for p in net.parameters())
    assert saved["state"].keys() == {"0.weight", "0.bias", "2.bias"}
    for entry in saved["state"].values():
        assert not entry["exp_avg"].any()
        assert not entry["exp_avg_sq"].any()


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("durability", ["commit", "none"])
def test_a_run_goes_on_bitwise(
    tmp_path: Path,
    overlap: str,
    flat: bool,  # noqa: FBT001
    dtype: torch.dtype,
    durability: str,
) -> None:
    ways = StateDictOptions(flatten_optimizer_state_dict=flat)

    def make(name: str) -> tuple[nn.Module, AdamW]:
        net = model(dtype)
        opt = adamw(net, tmp_path / name, module=net, overlap=overlap, durability=durability)
        return net, opt

    net, opt = make("a")
    train(net, opt, range(3))
    weights, states = get_state_dict(net, opt, options=ways)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "cp", no_dist=True)
    train(net, opt, range(3, 6))
    opt.wait()

    fresh, second = make("b")
    weights, states = get_state_dict(fresh, second, options=ways)
    dcp.load({"model": weights, "optim": states}, checkpoint_id=tmp_path / "cp", no_dist=True)
    set_state_dict(fresh, second, model_state_dict=weights, optim_state_dict=states, options=ways)
    train(fresh, second, range(3, 6))
    second.wait()
    assert bits(fresh) == bits(net)


def test_states_are_set_on_a_fresh_optimizer(tmp_path: Path) -> None:
    net = model(torch.bfloat16)
    opt = adamw(net, tmp_path / "a")
    train(net, opt, range(2))
    saved = copy.deepcopy(get_optimizer_state_dict(net, opt))
    again = model(torch.bfloat16)
    again.load_state_dict(net.state_dict())
    new = adamw(again, tmp_path / "b")
    set_optimizer_state_dict(again, new, saved)
    wanted, found = opt.state_dict(), new.state_dict()
    for index, entry in wanted["state"].items():
        assert all(torch.equal(found["state"][index][name], t) for name, t in entry.items())


def test_a_plain_state_dict_is_loaded_in_place(tmp_path: Path) -> None:
    net = model(torch.float32)
    opt = adamw(net, tmp_path / "a")
    train(net, opt, range(2))
    saved = opt.state_dict()
    dcp.save({"optim": saved}, checkpoint_id=tmp_path / "cp", no_dist=True)
    kept = copy.deepcopy(saved)
    train(net, opt, range(2, 4))
    found = opt.state_dict()
    dcp.load({"optim": found}, checkpoint_id=tmp_path / "cp", no_dist=True)
    opt.load_state_dict(found)
    for index, entry in opt.state_dict()["state"].items():
        assert all(torch.equal(kept["state"][index][name], t) for name, t in entry.items())


CHILD = """
import torch.distributed.checkpoint as dcp

opt = trained(8, 1 << 18)
before = memory("RssAnon")
dcp.save({"optim": opt.state_dict()}, checkpoint_id=path + "/cp", no_dist=True)
saved = opt.state_dict()
dcp.load({"optim": saved}, checkpoint_id=path + "/cp", no_dist=True)
opt.load_state_dict(saved)
print(memory("RssAnon") - before)
"""


@pytest.mark.slow
def test_memory_grows_by_a_tensor_and_not_by_the_states(tmp_path: Path) -> None:
    """128 MiB of states in tensors of 8 MiB."""
    (grown,) = printed(CHILD, tmp_path)
    assert grown < 64
