"""``usage``: one count of what a model and an optimizer hold and have moved."""

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tensorstow
from tensorstow import AdamW, Plan, StowedOptimizer, offload_activations, stow, usage
from tensorstow.base.errors import OptionError
from tensorstow.fsdp.usage import Usage
from tensorstow.states.traffic import Traffic
from tensorstow.step.unpublished import Unpublished

WIDTH = 128
WEIGHTS = 2 * 4 * (WIDTH * WIDTH + WIDTH)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def train(model: nn.Module, optimizer: Any) -> None:  # noqa: ANN401
    model(torch.ones(64, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.synchronize()


def test_a_plain_model_is_in_memory() -> None:
    found = usage(net())
    assert (found.host_bytes, found.disk_bytes, found.device_bytes) == (WEIGHTS, 0, 0)
    assert (found.bytes_read, found.bytes_written) == (0, 0)
    assert (found.states, found.traffic, found.activations) == (None, None, None)


@pytest.mark.parametrize("wrapped", [False, True])
def test_states_are_counted_where_they_are(wrapped: bool) -> None:  # noqa: FBT001
    with AdamW(net().parameters()) as optimizer:
        given: Any = SimpleNamespace(optimizer=optimizer) if wrapped else optimizer
        found = usage(optimizer=given)
    assert found.parameters is None
    assert found.states is not None
    assert found.host_bytes == found.states.host_bytes >= 2 * WEIGHTS
    assert found.disk_bytes == 0


def test_parts_add_up(tmp_path: Path) -> None:
    plan = Plan(parameters="disk", states="disk", activations="disk")  # type: ignore[arg-type]
    model, optimizer = stow(net(), AdamW, plan=plan, dir=tmp_path / "run", durability="none")
    with closing(optimizer):
        before = usage(model, optimizer)
        loss = model(torch.ones(64, WIDTH)).sum()
        held = usage(model).activations
        assert held is not None
        assert held.host_bytes + held.disk_bytes > 0
        loss.backward()
        optimizer.step()
        train(model, optimizer)
        after = usage(model, optimizer)
    assert after.parameters is not None
    assert after.states is not None
    assert after.traffic is not None
    assert after.activations is not None
    assert after.disk_bytes == after.parameters.disk_bytes + after.states.file_bytes
    assert after.disk_bytes >= 3 * WEIGHTS
    read = after.parameters.bytes_read + after.traffic.bytes_read + after.activations.bytes_read
    assert after.bytes_read == read
    written = after.parameters.bytes_written + after.traffic.bytes_written
    assert after.bytes_written == written + after.activations.bytes_written
    assert after.bytes_written > before.bytes_written
    buffers = after.parameters.buffer_pool_bytes + after.activations.host_bytes
    assert after.host_bytes == after.parameters.host_bytes + buffers + after.states.host_bytes
    assert usage(model).activations is None  # closed


def test_offloaded_activations_of_a_wrapped_model_are_counted(tmp_path: Path) -> None:
    model = net()
    outer = nn.Sequential(model)
    with offload_activations(model, to="disk", dir=tmp_path):
        loss = outer(torch.ones(64, WIDTH)).sum()
        held = usage(outer).activations
        assert held is not None
        assert held.most_host_bytes >= 4 * 64 * WIDTH
        loss.backward()
    assert usage(outer).activations is None


def test_a_class_of_torch_that_is_stowed_has_states_too() -> None:
    weights = list(net().parameters())
    with closing(StowedOptimizer(torch.optim.SGD, weights, lr=0.1, momentum=0.9)) as optimizer:
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert usage(optimizer=optimizer).host_bytes >= WEIGHTS


def test_as_a_text_it_is_the_sums() -> None:
    found = Usage(traffic=Traffic(5 << 20, 3 << 20, 0, 0, 0.0))
    assert str(found) == "device 0 B, host 0 B, disk 0 B, read 5.0 MiB, written 3.0 MiB"


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(OptionError, match="neither a model nor an optimizer"):
        usage()
    with pytest.raises(OptionError, match="a SGD: it counts"):
        usage(optimizer=torch.optim.SGD(net().parameters()))


def test_the_counters_of_before_say_where_theirs_are(tmp_path: Path) -> None:
    model = net()
    with AdamW(model.parameters()) as optimizer:
        found = usage(model, optimizer)
        with pytest.warns(DeprecationWarning, match=r"^optimizer.memory\(\).*usage\(optimizer"):
            assert optimizer.memory() == found.states
        with pytest.warns(DeprecationWarning, match=r"^optimizer.traffic\(\).*\.traffic\.$"):
            assert optimizer.traffic() == found.traffic
    with pytest.warns(DeprecationWarning, match=r"^parameter_bytes\(model\)") as caught:
        assert tensorstow.parameter_bytes(model) == found.parameters
    assert caught[0].filename == __file__
    with (
        offload_activations(model, to="disk", dir=tmp_path) as offload,
        pytest.warns(DeprecationWarning, match=r"^offload.nbytes\(\)"),
    ):
        assert offload.nbytes() == usage(model).activations


def test_an_optimizer_in_the_place_of_the_model_is_told() -> None:
    given: Any = AdamW(net().parameters())
    with closing(given), pytest.raises(OptionError, match=r"a AdamW: .* second argument\.$"):
        usage(given)


def test_counting_waits_for_no_update_of_the_next_forward(tmp_path: Path) -> None:
    model, optimizer = stow(
        net(),
        AdamW,
        lr=1e-3,
        dir=tmp_path,
        durability="none",
        plan=Plan(parameters="disk", states="disk", overlap="forward"),
    )
    with closing(optimizer):
        for _ in range(2):
            model(torch.ones(64, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.synchronize()
        model(torch.ones(64, WIDTH)).sum().backward()
        engine = optimizer._states().engine
        engine.inject_fault("read", times=-1, delay_us=300_000)
        optimizer.step()
        usage(model, optimizer)
        unpublished = [isinstance(p, Unpublished) for p in model.parameters()]
        engine.clear_faults()
        assert any(unpublished)
