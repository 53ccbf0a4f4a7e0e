"""``release`` and ``wake`` of an optimizer alone: its own buffers, and what is refused."""

from pathlib import Path

import pytest
import torch
from torch import nn

import tensorstow
from tensorstow import PipelinePolicy
from tensorstow.base.errors import OptionError

SMALL = PipelinePolicy(chunk_elements=1024)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    dtype = next(model.parameters()).dtype
    model(torch.ones(2, 64, dtype=dtype)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(dtype)


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_the_same_after_it(overlap: str, dtype: torch.dtype) -> None:
    results = []
    for releases in (False, True):
        net = model(dtype)
        optimizer = tensorstow.AdamW(
            net.parameters(), lr=1e-2, states="disk", overlap=overlap, module=net, policy=SMALL
        )
        for _ in range(4):
            stepped(net, optimizer)
            if releases:
                optimizer.release(host=True)
                with pytest.raises(OptionError, match=r"step\(\) was called between"):
                    optimizer.step()
                optimizer.wake()
        state = optimizer.state_dict()["state"].values()
        moments = [t.clone() for entry in state for t in entry.values()]
        results.append([*moments, *(p.detach().clone() for p in net.parameters())])
        optimizer.close()
    assert all(map(torch.equal, *results))


def test_wake_without_release_changes_nothing() -> None:
    net = model()
    optimizer = tensorstow.AdamW(net.parameters(), lr=1e-2)
    optimizer.wake()
    stepped(net, optimizer)
    optimizer.release()
    optimizer.release()
    optimizer.wake()
    optimizer.wake()
    stepped(net, optimizer)
    optimizer.close()


def test_a_released_optimizer_commits_when_it_is_closed(tmp_path: Path) -> None:
    net = model()
    keywords = {"lr": 1e-2, "states": "disk", "dir": tmp_path, "commit_every": 100, "module": net}
    with tensorstow.AdamW(net.parameters(), **keywords) as optimizer:
        stepped(net, optimizer)
        optimizer.release(host=True)
    with tensorstow.AdamW(net.parameters(), **keywords) as optimizer:
        assert optimizer.resume() == 1


def test_states_in_cpu_memory_are_named() -> None:
    net = model()
    for keywords in ({}, {"states": "disk", "ram_budget": "1MiB"}):
        optimizer = tensorstow.AdamW(net.parameters(), lr=1e-2, policy=SMALL, **keywords)
        with pytest.raises(OptionError, match="of optimizer states and copies of weights stay"):
            optimizer.release(host=True)
        stepped(net, optimizer)  # nothing was released
        optimizer.close()


def test_gradients_are_used_or_dropped_first() -> None:
    net = model()
    optimizer = tensorstow.AdamW(net.parameters(), lr=1e-2)
    net(torch.ones(2, 64)).sum().backward()
    with pytest.raises(OptionError, match="while gradients wait for a step"):
        optimizer.release()
    optimizer.zero_grad()
    optimizer.release()
    optimizer.close()


def test_another_class_has_nothing_to_give_back() -> None:
    optimizer = tensorstow.StowedOptimizer(torch.optim.SGD, model().parameters(), lr=1e-2)
    with pytest.raises(OptionError, match=r"release\(\) was called on a \w*, whose states stay"):
        optimizer.release()
    optimizer.wake()


@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_updates_under_way_are_finished_first(overlap: str) -> None:
    """The weights themselves are new, also for those who cannot wait for them."""
    net = model()
    policy = PipelinePolicy(chunk_elements=1024, nan_until_published=overlap == "forward")
    optimizer = tensorstow.AdamW(
        net.parameters(), lr=1e-2, states="disk", overlap=overlap, module=net, policy=policy
    )
    before = [p.detach().clone() for p in net.parameters()]
    stepped(net, optimizer)
    optimizer.release()
    with torch._C.DisableTorchFunctionSubclass():
        for parameter, old in zip(net.parameters(), before, strict=True):
            assert not parameter.data.isnan().any()
            assert not torch.equal(parameter.data, old)
    optimizer.close()
