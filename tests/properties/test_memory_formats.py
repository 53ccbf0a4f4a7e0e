"""Parameters that lie in memory in another order than their dimensions: the same bits."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compare import all_equal
from parity.cover import crossed
from remote import make_remote
from tensorstow import AdamW, PipelinePolicy
from tensorstow.base.errors import DTypeError, OptionError
from tensorstow.base.update_on import Overlap
from tensorstow.tensors.dtensor import in_order, order_of, out_of_order

SMALL = PipelinePolicy(chunk_elements=4096)
LAST = torch.channels_last


def model_in(memory_format: torch.memory_format, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(5, 24, 7), nn.Conv2d(24, 20, 3), nn.Conv2d(20, 4, 1))
    return model.to(dtype).to(memory_format=memory_format)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(3)) -> None:
    """Step by equal gradients: kernels of another memory format have other roundings."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        loss = torch.zeros(())
        for p in model.parameters():
            loss = loss + (p * torch.randn(p.shape, generator=generator).to(p.dtype)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(
    memory_format: torch.memory_format,
    dtype: torch.dtype,
    clip: float | None = None,
    **given: Any,  # noqa: ANN401
) -> tuple[nn.Module, dict[str, Any]]:
    model = model_in(memory_format, dtype)
    if given.get("overlap") == "forward":
        given["module"] = model
    optimizer = AdamW(model.parameters(), lr=0.05, policy=SMALL, **given)
    if clip is not None:
        optimizer.register_step_pre_hook(lambda *_: optimizer.clip_grad_norm_(clip) and None)
    train(model, optimizer)
    saved = optimizer.state_dict()
    optimizer.wait()
    optimizer.close()
    return model, saved


@crossed(
    states=("host", "disk", 0.5),
    overlap=("none", "forward", "backward"),
    dtype=(torch.float32, torch.bfloat16),
)
def test_channels_last_has_the_bits_of_contiguous(
    states: str, overlap: str, dtype: torch.dtype
) -> None:
    plain, saved = trained(torch.contiguous_format, dtype)
    ours, found = trained(LAST, dtype, states=states, overlap=overlap)
    assert not next(ours.parameters()).is_contiguous()
    assert all_equal(ours.parameters(), plain.parameters())
    for i, parameter in enumerate(ours.parameters()):
        for name in ("exp_avg", "exp_avg_sq"):
            state = found["state"][i][name]
            assert torch.equal(state, saved["state"][i][name])
            one_wide = state.is_contiguous()  # then both formats are one
            assert one_wide or state.stride() == parameter.stride()  # as torch's own has it


def test_clipping_is_by_the_same_norm() -> None:
    plain, _ = trained(torch.contiguous_format, torch.float32, 0.1)
    ours, _ = trained(LAST, torch.float32, 0.1, states="disk")
    assert all_equal(ours.parameters(), plain.parameters())


@pytest.mark.parametrize("where", [{}, {"update_on": "device"}], ids=["host", "device"])
@pytest.mark.parametrize("states", ["host", "disk"])
def test_on_an_accelerator(
    where: dict[str, Any], states: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = trained(torch.contiguous_format, torch.bfloat16)
    make_remote(monkeypatch)
    ours, _ = trained(LAST, torch.bfloat16, states=states, **where)
    assert all_equal(ours.parameters(), plain.parameters())


def test_torch_loads_what_is_saved_and_back() -> None:
    theirs = model_in(LAST)
    torchs = torch.optim.AdamW(theirs.parameters(), lr=0.05)
    train(theirs, torchs)
    plain, last = model_in(torch.contiguous_format), model_in(LAST)
    ours = []
    for model in (plain, last):
        model.load_state_dict(theirs.state_dict())
        optimizer = AdamW(model.parameters(), states="disk", policy=SMALL)
        optimizer.load_state_dict(torchs.state_dict())
        ours.append(optimizer)
        train(model, optimizer, range(3, 5))
    assert all_equal(plain.parameters(), last.parameters())
    saved = ours[1].state_dict()
    torchs.load_state_dict(saved)
    assert torch.equal(
        torchs.state[next(theirs.parameters())]["exp_avg"], saved["state"][0]["exp_avg"]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_run_goes_on_from_its_commit(tmp_path: Path, dtype: torch.dtype) -> None:
    def run(model: nn.Module) -> AdamW:
        return AdamW(model.parameters(), lr=0.05, states="disk", dir=tmp_path, policy=SMALL)

    whole = model_in(LAST, dtype)
    train(whole, AdamW(whole.parameters(), lr=0.05), range(5))
    first = model_in(LAST, dtype)
    optimizer = run(first)
    train(first, optimizer)
    optimizer.commit()
    optimizer.close()
    second = model_in(LAST, dtype)
    with torch.no_grad():
        for p in second.parameters():
            p.zero_()
    optimizer = run(second)
    assert optimizer.resume() == 3
    assert all_equal(second.parameters(), first.parameters())
    train(second, optimizer, range(3, 5))
    assert all_equal(second.parameters(), whole.parameters())
    optimizer.close()
    optimizer = run(model_in(torch.contiguous_format, dtype))
    with pytest.raises(OptionError, match=r"\[0, 2, 3, 1\] in memory and has them in their own"):
        optimizer.resume()
    optimizer.close()


def test_states_go_to_safetensors_and_back(tmp_path: Path) -> None:
    model, plain = model_in(LAST), model_in(torch.contiguous_format)
    optimizer = AdamW(model.parameters(), states="disk", policy=SMALL)
    train(model, optimizer)
    optimizer.save_safetensors(tmp_path / "states")
    other = AdamW(plain.parameters())
    other.load_safetensors(tmp_path / "states")
    for ours, theirs in zip(
        optimizer.state_dict()["state"].values(), other.state_dict()["state"].values(), strict=True
    ):
        assert torch.equal(ours["exp_avg_sq"], theirs["exp_avg_sq"])


@pytest.mark.parametrize("states", ["host", "disk"])
def test_states_that_users_put_in_are_taken(states: str) -> None:
    models = [model_in(torch.contiguous_format), model_in(LAST)]
    for model in models:
        optimizer = AdamW(model.parameters(), lr=0.05, states=states, policy=SMALL)
        train(model, optimizer)
        parameter = next(model.parameters())
        values = torch.arange(parameter.numel()).view(parameter.shape) / parameter.numel()
        optimizer.state[parameter]["exp_avg_sq"] = values
        train(model, optimizer, range(3, 5))
    assert all_equal(models[0].parameters(), models[1].parameters())


def test_data_that_is_exchanged_in_the_same_order_is_trained(tmp_path: Path) -> None:
    models = [model_in(torch.contiguous_format), model_in(LAST)]
    for model in models:
        optimizer = AdamW(
            model.parameters(), lr=0.05, states="disk", dir=tmp_path / str(model is models[0])
        )
        train(model, optimizer)
        for p in model.parameters():
            p.data = p.data.clone() + 1
        optimizer.commit()
        train(model, optimizer, range(3, 5))
        optimizer.resume()
        optimizer.close()
    assert all_equal(models[0].parameters(), models[1].parameters())


@pytest.mark.parametrize("overlap", ["none", "backward"])
@pytest.mark.parametrize(
    ("before", "after"), [(torch.contiguous_format, LAST), (LAST, torch.contiguous_format)]
)
def test_a_format_that_changes_after_the_optimizer_is_made_raises(
    before: torch.memory_format, after: torch.memory_format, overlap: Overlap
) -> None:
    model = model_in(before)
    optimizer = AdamW(model.parameters(), overlap=overlap)
    train(model, optimizer)
    model.to(memory_format=after)
    weights = [p.detach().clone() for p in model.parameters()]
    with pytest.raises((DTypeError, OptionError), match="its memory format has changed since"):
        train(model, optimizer)
    assert all_equal(model.parameters(), weights)


def test_what_fills_no_run_of_memory_is_refused() -> None:
    holes: list[Callable[[], torch.Tensor]] = [
        lambda: torch.zeros(4, 4).t()[:, ::2],
        lambda: torch.zeros(4, 1).expand(4, 3),
    ]
    for make in holes:
        with pytest.raises(DTypeError, match="does not fill one run of memory"):
            AdamW([nn.Parameter(make())])


def test_orders_are_undone() -> None:
    base = torch.arange(24).view(2, 3, 1, 4)
    for order in itertools.permutations(range(4)):
        turned = base.permute(order)
        found = order_of(turned)
        assert in_order(turned, found).is_contiguous()
        assert torch.equal(out_of_order(in_order(turned, found), found), turned)
