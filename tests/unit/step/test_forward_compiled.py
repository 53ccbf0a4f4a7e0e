"""``overlap="forward"`` under ``torch.compile``: whole graphs, and no weight read too early."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from models import ResidualLinear
from parity.beside import in_ram, mean_square, optimizer_for, same, slow, train, weights
from tensorstow.base.errors import OptionError
from torch_versions import CAN_RESET

DEPTH = 9  # more than torch._dynamo.config.recompile_limit


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(ResidualLinear(32) for _ in range(DEPTH)))


def wrapped(net: nn.Sequential) -> nn.Module:
    return torch.compile(net, backend="eager")  # type: ignore[return-value]


def in_place(net: nn.Sequential) -> nn.Module:
    net.compile(backend="eager", fullgraph=True)
    return net


def in_a_function(net: nn.Sequential) -> Callable[[Tensor], Tensor]:
    @torch.compile(backend="eager", fullgraph=True)
    def call(x: Tensor) -> Tensor:
        out: Tensor = net(x)
        return out

    return call


def blocks_wrapped(net: nn.Sequential) -> nn.Module:
    for i in range(DEPTH):
        net[i] = torch.compile(net[i], backend="eager", fullgraph=True)  # type: ignore[assignment]
    return net


def blocks_in_place(net: nn.Sequential) -> nn.Module:
    for block in net:
        block.compile(backend="eager", fullgraph=True)
    return net


pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo's
Way = Callable[[nn.Sequential], Any]
WAYS: list[Way] = [wrapped, in_place, in_a_function, blocks_wrapped, blocks_in_place]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


MOST_GRAPHS = 2 if CAN_RESET else 3
"""The first step's and the others'; before torch 2.13 the second step has one more."""


def graphs() -> int:
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


@pytest.fixture(scope="module")
def want() -> dict[str, Tensor]:
    return in_ram(model(), range(6))


def raw(net: nn.Module) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): w for name, w in weights(net).items()}


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_graphs_stay_whole_and_weights_are_new(
    way: Way, before: int, want: dict[str, Tensor], tmp_path: Path
) -> None:
    """``before``: steps that were taken uncompiled, so that every block was seen to wait."""
    net = model()
    optimizer = optimizer_for(net, tmp_path, "forward")
    slow(optimizer, seconds=0.001)
    train(optimizer, net, range(before))
    call = way(net)
    train(optimizer, call, range(before, before + 2))
    first = graphs()
    train(optimizer, call, range(before + 2, 6))
    optimizer.close()
    assert same(raw(net), want)
    assert first == graphs() <= MOST_GRAPHS


@pytest.mark.parametrize("way", [blocks_wrapped, blocks_in_place])
def test_blocks_that_were_compiled_first(way: Way, want: dict[str, Tensor], tmp_path: Path) -> None:
    net = model()
    way(net)
    optimizer = optimizer_for(net, tmp_path, "forward")
    slow(optimizer, seconds=0.001)
    train(optimizer, net, range(6))
    assert graphs() <= 2
    seen = len(optimizer._runtime.waits._seen)  # type: ignore[union-attr]
    assert seen == (DEPTH if way is blocks_wrapped else 0)  # each waits for its own weights
    optimizer.close()
    assert same(raw(net), want)


@pytest.mark.parametrize("way", [wrapped])
def test_a_model_that_is_one_graph_is_said_to_overlap_nothing(
    way: Way, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = model()
    optimizer = optimizer_for(net, tmp_path, "forward")
    train(optimizer, way(net), range(3))
    assert caplog.text.count("overlaps nothing") == 1
    optimizer.close()


def test_called_eagerly_and_compiled_by_turns(want: dict[str, Tensor], tmp_path: Path) -> None:
    net = model()
    optimizer = optimizer_for(net, tmp_path, "forward")
    slow(optimizer, seconds=0.001)
    call = wrapped(net)
    for step in range(6):
        train(optimizer, net if step % 2 else call, [step])
    optimizer.close()
    assert same(raw(net), want)


def test_a_compiled_block_that_is_called_without_its_model(tmp_path: Path) -> None:
    net = model()
    blocks_in_place(net)
    optimizer = optimizer_for(net, tmp_path, "forward")
    slow(optimizer)
    x = torch.ones(2, 32)
    for step in range(3):
        train(optimizer, net, [step])
        with torch.no_grad():
            assert not net[DEPTH - 1](x).isnan().any()
    optimizer.close()


def test_two_models_that_share_graphs(tmp_path: Path) -> None:
    for _ in range(2):
        net = model()
        optimizer = optimizer_for(net, tmp_path, "forward")
        slow(optimizer, seconds=0.001)
        train(optimizer, in_place(net), range(3))
        optimizer.close()
        assert not any(w.isnan().any() for w in weights(net).values())


def test_a_graph_that_reads_weights_and_runs_no_module(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    optimizer = optimizer_for(net, tmp_path, "forward")
    slow(optimizer)

    @torch.compile(backend="eager")
    def norm() -> Tensor:
        out: Tensor = sum(p.detach().square().sum() for p in net.parameters())  # type: ignore[assignment]
        return out

    for step in range(3):
        train(optimizer, net, [step])
        assert torch.equal(norm(), sum(w.square().sum() for w in weights(net).values()))  # type: ignore[arg-type]
    optimizer.close()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_beside_backward_a_graph_is_whole_and_refuses_half_new_weights(
    backend: str, tmp_path: Path
) -> None:
    net = model()
    optimizer = optimizer_for(net, tmp_path, "backward")
    net.compile(backend=backend, fullgraph=True)
    train(optimizer, net, range(2))
    assert graphs() <= MOST_GRAPHS
    optimizer.zero_grad()
    torch.autograd.backward(mean_square(net, 2))
    with pytest.raises(OptionError, match=r"backward has ended, and step\(\) was not called"):
        net(torch.ones(8, 32))
    optimizer.step()
    optimizer.close()
