"""Reads of weights that no parameter sees: through views and arrays from before ``step()``."""

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from parity.beside import (
    PLAIN,
    blocks,
    in_ram,
    mean_square,
    optimizer_for,
    same,
    slow,
    train,
    weights,
)
from tensorstow import AdamW
from tensorstow.base.update_on import Overlap
from tensorstow.step.unpublished import Unpublished

ALIASES: dict[str, Callable[[Tensor], Any]] = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "view": lambda p: p.detach().view(-1),
    "row": lambda p: p[3].detach(),
    "array": lambda p: p.detach().numpy(),
    "dlpack": lambda p: np.from_dlpack(p.detach()),
    "parameter": lambda p: nn.Parameter(p.detach()),
}


def under_way(directory: Path, model: nn.Module) -> AdamW:
    optimizer = optimizer_for(model, directory, "forward")
    train(optimizer, model, range(2))
    slow(optimizer)
    return optimizer


@pytest.mark.parametrize("name", ALIASES)
def test_an_alias_from_before_the_step_sees_the_new_weight(name: str, tmp_path: Path) -> None:
    model = blocks()
    optimizer = under_way(tmp_path, model)
    alias = ALIASES[name](model[0].weight)
    train(optimizer, model, range(2, 3))
    with torch._C.DisableTorchFunctionSubclass():  # a read that waits for nobody
        seen = torch.as_tensor(alias).detach().clone()
    want = ALIASES[name](nn.Parameter(in_ram(blocks(), range(3))["0.weight"]))
    assert torch.equal(seen, torch.as_tensor(want).detach())
    optimizer.close()


def test_an_alias_sees_the_old_weight_until_a_step_is_confirmed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tensorstow")
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, "speculative")
    train(optimizer, model, range(2))
    optimizer.zero_grad()
    optimizer.wait()
    array = model[0].weight.detach().numpy()
    torch.autograd.backward(mean_square(model, 2))
    time.sleep(0.1)  # updates that have begun would be over
    assert torch.equal(torch.from_numpy(array), in_ram(blocks(), range(2))["0.weight"])
    optimizer.step()
    optimizer.wait()
    assert torch.equal(torch.from_numpy(array), in_ram(blocks(), range(3))["0.weight"])
    assert "a view or an array shares the memory of a weight" in caplog.text
    optimizer.close()


def test_memory_that_processes_share_has_the_new_weight(tmp_path: Path) -> None:
    model = blocks().share_memory()
    optimizer = under_way(tmp_path, model)
    memory = (ctypes.c_float * 1024).from_address(model[0].weight.data_ptr())
    train(optimizer, model, range(2, 3))
    seen = torch.from_numpy(np.frombuffer(memory, np.float32).reshape(32, 32).copy())
    assert torch.equal(seen, in_ram(blocks(), range(3))["0.weight"])
    optimizer.close()


def test_weights_that_were_loaded_from_files_are_no_aliases(tmp_path: Path) -> None:
    save_file({n: p.detach() for n, p in blocks().named_parameters()}, tmp_path / "a.safetensors")
    model = blocks()
    model.load_state_dict(load_file(tmp_path / "a.safetensors"), assign=True)
    optimizer = under_way(tmp_path, model)
    train(optimizer, model, range(2, 3))
    assert all(isinstance(p, Unpublished) for p in model.parameters())
    optimizer.close()


def test_a_step_waits_for_nothing_else(tmp_path: Path) -> None:
    model = blocks()
    optimizer = under_way(tmp_path, model)
    alias = model[1].bias.detach()
    train(optimizer, model, range(2, 3))
    waits = [name for name, p in model.named_parameters() if isinstance(p, Unpublished)]
    assert waits == [n for n, _ in model.named_parameters() if n != "1.bias"]
    del alias
    train(optimizer, model, range(3, 4))
    assert all(isinstance(p, Unpublished) for p in model.parameters())
    optimizer.close()


def test_parameters_of_one_storage_are_no_aliases(tmp_path: Path) -> None:
    def flat() -> nn.Sequential:
        model = blocks()
        whole = torch.cat([p.detach().flatten() for p in model.parameters()])
        parts = whole.split([p.numel() for p in model.parameters()])
        for p, part in zip(model.parameters(), parts, strict=True):
            p.data = part.view(p.shape)
        return model

    model = flat()
    optimizer = optimizer_for(model, tmp_path, "forward")
    train(optimizer, model, range(3))
    assert all(isinstance(p, Unpublished) for p in model.parameters())
    optimizer.close()
    assert same(weights(model), in_ram(flat(), range(3)))


def test_a_gradient_that_others_hold_is_used_before_step_returns(tmp_path: Path) -> None:
    model = blocks()
    optimizer = under_way(tmp_path, model)
    optimizer.zero_grad()
    torch.autograd.backward(mean_square(model, 2))
    gradient = model[2].weight.grad
    assert gradient is not None
    bucket = gradient.view(-1).numpy()
    optimizer.step()
    bucket[:] = np.nan
    optimizer.wait()
    assert same(weights(model), in_ram(blocks(), range(3)))
    optimizer.close()


Change = Callable[[nn.Module, AdamW], None]


def _zero(model: nn.Module, _: AdamW) -> None:
    model.zero_grad(set_to_none=False)


def _scale(model: nn.Module, _: AdamW) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.mul_(0.5)


def _scale_all(model: nn.Module, _: AdamW) -> None:
    torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], 0.5)


def _reset_states(_: nn.Module, optimizer: AdamW) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


def _average_states(_: nn.Module, optimizer: AdamW) -> None:
    states = list(optimizer.state.values())
    states[0]["exp_avg"].add_(sum(s["exp_avg_sq"].mean() for s in states))


@pytest.mark.parametrize(
    "change", [_zero, _scale, _scale_all, _reset_states, _average_states], ids=lambda c: c.__name__
)
def test_changes_of_gradients_and_states_wait_for_their_update(change: Change) -> None:
    """States in memory: on disk there are no tensors of them."""

    def trained(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
        for step in range(5):
            torch.autograd.backward(mean_square(model, step, 256))
            optimizer.step()
            change(model, optimizer)
            assert all(p.grad is not None for p in model.parameters())
        optimizer.close()
        assert not any(isinstance(p.grad, Unpublished) for p in model.parameters())
        return weights(model)

    model = blocks(256, 6)
    want = trained(model, AdamW(model.parameters(), lr=1e-2))
    model = blocks(256, 6)
    optimizer = AdamW(model.parameters(), lr=1e-2, overlap="forward", module=model)
    assert same(trained(model, optimizer), want)


def test_a_parameter_outside_of_the_module_may_have_a_view(tmp_path: Path) -> None:
    """Both are reasons for one wait."""
    temperature = nn.Parameter(torch.ones(1))
    view = temperature.detach()
    model = blocks()
    params = [temperature, *model.parameters()]
    optimizer = optimizer_for(model, tmp_path, "forward", params=params)

    def loss(model: nn.Module, step: int) -> Tensor:
        return mean_square(model, step) * temperature.exp()

    train(optimizer, model, range(3), loss)
    assert not view.isnan().any()
    assert view != 1
    optimizer.close()


@pytest.mark.parametrize("overlap", ["forward", "speculative"])
def test_weights_in_another_order_of_dimensions_are_no_aliases(
    overlap: Overlap, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tensorstow")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3)).to(
        memory_format=torch.channels_last  # type: ignore[call-overload]  # torch has no type for it
    )
    optimizer = optimizer_for(model, tmp_path, overlap)

    def loss(model: nn.Module, step: int) -> Tensor:
        x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(step))
        squares: Tensor = model(x).square()
        return squares.mean()

    train(optimizer, model, range(2), loss)
    if overlap == "forward":
        assert all(isinstance(p, Unpublished) for p in model.parameters())
    assert "shares the memory" not in caplog.text
    view = model[0].weight.detach()
    train(optimizer, model, range(2, 3), loss)
    waits = {name for name, p in model.named_parameters() if isinstance(p, Unpublished)}
    assert "0.weight" not in waits
    assert not view.isnan().any()
    assert ("shares the memory" in caplog.text) == (overlap == "speculative")
    optimizer.close()


def test_gradients_of_one_storage_are_no_aliases(tmp_path: Path) -> None:
    """Autograd cuts the gradient of ``torch.cat`` into them."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.parts = nn.ParameterList(torch.randn(16, 32) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.cat([*self.parts]).T

    model = Joined()
    optimizer = optimizer_for(model, tmp_path, "forward")
    train(optimizer, model, range(2))
    assert all(isinstance(p, Unpublished) for p in model.parameters())
    optimizer.close()
    assert same(weights(model), in_ram(Joined(), range(2)))


def test_parameters_of_the_same_elements_are_aliases(tmp_path: Path) -> None:
    model = blocks()
    model[1].weight = nn.Parameter(model[0].weight.data)
    optimizer = optimizer_for(model, tmp_path, "forward")
    train(optimizer, model, range(2))
    waits = {name for name, p in model.named_parameters() if isinstance(p, Unpublished)}
    assert waits == {"0.bias", "1.bias", "2.weight", "2.bias"}
    optimizer.close()


def test_threads_may_read_while_a_step_ends(tmp_path: Path) -> None:
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, "forward", policy=PLAIN)
    train(optimizer, model, range(1))
    is_over = threading.Event()
    errors: list[BaseException] = []

    def read() -> None:
        while not is_over.is_set():
            try:
                for p in model.parameters():
                    p.sum()
            except BaseException as error:  # noqa: BLE001  # whatever it is, the test shows it
                errors.append(error)
                return

    thread = threading.Thread(target=read)
    thread.start()
    train(optimizer, model, range(1, 60))
    is_over.set()
    thread.join()
    optimizer.close()
    assert errors == []
    assert same(weights(model), in_ram(blocks(), range(60)))
    assert not any(isinstance(p, Unpublished) for p in model.parameters())
