"""Parameters on the accelerator: the bits of the CPU path, whatever the route."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training import CPU, SMALL, STEPS, Net, make, same_states, same_weights, train

from parity.cover import crossed
from stopped import stop
from tensorstow import Adam, AdamW, DelayedUpdate
from tensorstow.base.errors import OptionError
from tensorstow.optim.stowed_adam import StowedAdam

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DURABLE = ("none", "forward", "backward")
OVERLAPS = (*DURABLE, "speculative")


@pytest.mark.parametrize(
    ("states", "overlap"),
    [
        *product(("ram", "disk", 0.5), (*DURABLE, DelayedUpdate(warmup_steps=1))),
        *product(("disk", 0.5), ("speculative",)),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_those_of_the_cpu(
    dtype: str,
    states: str | float,
    overlap: Any,  # noqa: ANN401  # a word, or a DelayedUpdate
    device: torch.device,
) -> None:
    """Also if updates are delayed: these gradients do not depend on the weights."""
    want, got = Net(DTYPES[dtype]), Net(DTYPES[dtype]).to(device)
    reference = make(want, states="ram")
    train(want, reference)
    optimizer = make(got, states=states, overlap=overlap)
    train(got, optimizer)
    assert same_weights(got, want)
    for entry in optimizer.state_dict()["state"].values():
        assert all(value.device == CPU for value in entry.values())
    assert same_states(optimizer, reference)


@pytest.mark.parametrize("state_format", ["fp32", "split", "bf16", "int8"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_formats(state_format: str, overlap: str, device: torch.device) -> None:
    """Inexact ones round alike too: what they draw hangs on the step and the element alone."""
    want, got = Net(torch.bfloat16), Net(torch.bfloat16).to(device)
    train(want, make(want, state_format=state_format))
    train(got, make(got, state_format=state_format, overlap=overlap))
    assert same_weights(got, want)


@crossed(states=("ram", "disk", 0.5), amsgrad=(False, True), dtype=tuple(DTYPES))
def test_updates_on_the_device_have_the_bits_of_the_host(
    dtype: str,
    amsgrad: bool,  # noqa: FBT001
    states: str | float,
    device: torch.device,
) -> None:
    want, got = Net(DTYPES[dtype]), Net(DTYPES[dtype]).to(device)
    reference = make(want, states="ram", amsgrad=amsgrad)
    train(want, reference)
    optimizer = make(got, states=states, amsgrad=amsgrad, update_on="device")
    train(got, optimizer)
    assert same_weights(got, want)
    assert same_states(optimizer, reference)


@pytest.mark.parametrize("options", [{"weight_decay": 0.0}, {"maximize": True}, {"eps": 1e-3}])
@pytest.mark.parametrize("kind", [AdamW, Adam])
def test_options_of_an_update_on_the_device(
    kind: type[StowedAdam], options: dict[str, Any], device: torch.device
) -> None:
    given = {"lr": 0.01, "policy": SMALL, "weight_decay": 0.1, **options}
    want, got = Net(torch.bfloat16), Net(torch.bfloat16).to(device)
    train(want, kind(want.parameters(), **given))
    train(got, kind(got.parameters(), update_on="device", **given))
    assert same_weights(got, want)


@pytest.mark.parametrize("state_format", ["fp32", "split", "bf16", "int8"])
def test_formats_of_updates_on_the_device(state_format: str, device: torch.device) -> None:
    want, got = Net(torch.bfloat16), Net(torch.bfloat16).to(device)
    reference = make(want, state_format=state_format)
    train(want, reference)
    optimizer = make(got, state_format=state_format, update_on="device")
    train(got, optimizer)
    assert same_weights(got, want)
    assert same_states(optimizer, reference)


@crossed(
    now=(None, "host", "device", "hybrid"),
    before=("host", "device", "auto"),
    dtype=("fp32", "bf16"),
)
def test_a_run_goes_on_where_updates_are_or_were(
    dtype: str, before: str, now: str | None, tmp_path: Path, device: torch.device
) -> None:
    want = Net(DTYPES[dtype])
    train(want, make(want))
    got = Net(DTYPES[dtype]).to(device)
    first = make(got, dir=tmp_path / "run", commit_every=2, update_on=before)
    train(got, first, 0, 3)
    stop(first)
    other = Net(DTYPES[dtype], seed=7).to(device)
    second = make(other, dir=tmp_path / "run", commit_every=2, update_on=now)
    assert second.resume() == 2
    train(other, second, 2, STEPS)
    assert bool(second._params().update_router.updaters) == ((now or before) != "host")
    assert same_weights(other, want)
    second.close()


@pytest.mark.parametrize("overlap", DURABLE)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_goes_on_from_its_commit(
    dtype: str, overlap: str, tmp_path: Path, device: torch.device
) -> None:
    want = Net(DTYPES[dtype])
    train(want, make(want))
    got = Net(DTYPES[dtype]).to(device)
    given = {"dir": tmp_path / "run", "overlap": overlap, "commit_every": 2}
    first = make(got, **given)
    train(got, first, 0, 3)
    stop(first)
    other = Net(DTYPES[dtype], seed=7).to(device)
    second = make(other, **given)
    assert second.resume() == 2
    train(other, second, 2, STEPS)
    assert same_weights(other, want)
    second.close()


def test_a_state_dict_goes_from_device_to_host_and_back(device: torch.device) -> None:
    want, got = Net(torch.bfloat16), Net(torch.bfloat16).to(device)
    train(want, make(want))
    first = make(got)
    train(got, first, 0, 2)
    host = Net(torch.bfloat16, seed=5)
    host.load_state_dict(got.state_dict())
    second = make(host, states="ram")
    second.load_state_dict(first.state_dict())
    train(host, second, 2, 3)
    back = Net(torch.bfloat16, seed=6).to(device)
    back.load_state_dict(host.state_dict())
    third = make(back, overlap="forward")
    third.load_state_dict(second.state_dict())
    train(back, third, 3, STEPS)
    assert same_weights(back, want)


@pytest.mark.parametrize(
    ("overlap", "update_on"), [("none", "host"), ("forward", "host"), ("none", "device")]
)
def test_clipping_is_that_of_the_cpu_but_for_the_norm_s_last_bits(
    overlap: str, update_on: str, device: torch.device
) -> None:
    def clipped(net: Net, optimizer: AdamW) -> list[float]:
        norms = []
        for step in range(STEPS):
            optimizer.zero_grad()
            torch.autograd.backward(net(step))
            norms.append(optimizer.clip_grad_norm_(0.5).item())
            optimizer.step()
        optimizer.wait()
        return norms

    want, got = Net(torch.float32), Net(torch.float32).to(device)
    norms = clipped(want, make(want))
    optimizer = make(got, overlap=overlap, update_on=update_on)
    assert clipped(got, optimizer) == pytest.approx(norms, rel=1e-12)
    for ours, theirs in zip(got.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach())


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_accumulation(overlap: str, device: torch.device) -> None:
    def accumulate(net: Net, optimizer: AdamW) -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            with optimizer.accumulate():
                torch.autograd.backward(net(10 * step))
            torch.autograd.backward(net(10 * step + 1))
            optimizer.step()
        optimizer.wait()

    want, got = Net(torch.float32), Net(torch.float32).to(device)
    accumulate(want, make(want))
    accumulate(got, make(got, overlap=overlap))
    assert same_weights(got, want)


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_a_grad_scaler_scales_and_skips(overlap: str, device: torch.device) -> None:
    def scaled(net: Net, optimizer: AdamW, kind: str) -> float:
        scaler = torch.amp.GradScaler(kind, init_scale=1024.0, growth_interval=2)
        for step in range(STEPS):
            optimizer.zero_grad()
            torch.autograd.backward(scaler.scale(net(step)))
            if step == 1:
                next(net.parameters()).grad.view(-1)[3] = torch.inf  # type: ignore[union-attr]
            scaler.step(optimizer)
            scaler.update()
        optimizer.wait()
        return scaler.get_scale()

    want, got = Net(torch.float32), Net(torch.float32).to(device)
    scale = scaled(want, make(want), "cpu")
    assert scaled(got, make(got, overlap=overlap), device.type) == scale
    assert same_weights(got, want)


@pytest.mark.parametrize("on_host", [True, False])
def test_a_grad_scaler_is_refused_where_not_all_gradients_are_with_its_scale(
    device: torch.device,
    on_host: bool,  # noqa: FBT001
) -> None:
    """Torch's own copies between them, and the host reads before the copies are over."""
    both = nn.ModuleList([Net(torch.float32), Net(torch.float32, seed=3).to(device)])
    optimizer = make(both)
    scaler = torch.amp.GradScaler("cpu" if on_host else device.type)
    loss = both[0](0).to(device) + both[1](0)
    torch.autograd.backward(scaler.scale(loss.cpu() if on_host else loss))
    with pytest.raises(OptionError, match="Scale a loss on the device of all gradients"):
        scaler.step(optimizer)


def test_host_and_device_in_one_optimizer(device: torch.device) -> None:
    class Two(nn.Module):
        def __init__(self, where: torch.device) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Net(torch.float32), Net(torch.float32, seed=3).to(where)])

        def forward(self, step: int) -> torch.Tensor:
            first: torch.Tensor = self.blocks[0](step)
            second: torch.Tensor = self.blocks[1](step)
            return first + second.cpu()

    for overlap in OVERLAPS:
        want, got = Two(CPU), Two(device)
        train(want, make(want))
        train(got, make(got, overlap=overlap))
        assert same_weights(got, want)


@pytest.mark.parametrize("update_on", ["host", "device"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_others_write_on_the_device_is_seen(
    dtype: str, update_on: str, device: torch.device
) -> None:
    def meddle(net: Net, optimizer: AdamW) -> None:
        train(net, optimizer, 0, 2)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(0.5)
        train(net, optimizer, 2, STEPS)

    want, got = Net(DTYPES[dtype]), Net(DTYPES[dtype]).to(device)
    meddle(want, make(want))
    meddle(got, make(got, update_on=update_on))
    assert same_weights(got, want)
