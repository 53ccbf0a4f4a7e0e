"""Reads of weights behind ``step()`` by their own tensors wait: others are NaN here."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from parity.beside import (
    blocks,
    engine_of,
    in_ram,
    mean_square,
    optimizer_for,
    same,
    slow,
    train,
    weights,
)
from tensorstow import AdamW
from tensorstow.base.errors import PoisonedError, TransferError
from tensorstow.step.unpublished import Unpublished, mark_published, mark_unpublished


def _lerped(p: Tensor) -> Tensor:
    average = torch.zeros_like(p.detach())
    torch._foreach_lerp_([average], [p], 0.5)
    return average


READS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda p: p.norm(),
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "detach numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "row": lambda p: p[0],
    "clone": lambda p: p.clone(),
    "to": lambda p: p.to(torch.float64),
    "list": lambda p: torch.tensor(p.tolist()),
    "stack": lambda p: torch.stack([p, p]),
    "keyword": lambda p: torch.add(input=torch.ones_like(p.shape and p), other=p),
    "foreach": lambda p: torch._foreach_norm([p])[0],
    "foreach in place": _lerped,
    "functional": lambda p: nn.functional.linear(torch.ones(2, p.shape[-1]), p),
    "storage": lambda p: torch.tensor(p.untyped_storage().tolist()),
    "address": lambda p: p.data_ptr(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "text": repr,
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
}


def under_way(directory: Path) -> tuple[AdamW, nn.Sequential]:
    model = blocks()
    optimizer = optimizer_for(model, directory, "forward")
    slow(optimizer)
    train(optimizer, model, range(2))
    assert any(w.isnan().any() for w in weights(model).values())
    return optimizer, model


def published(model: nn.Module) -> bool:
    return all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.parametrize("name", READS)
def test_whoever_reads_a_weight_reads_the_new_one(name: str, tmp_path: Path) -> None:
    optimizer, model = under_way(tmp_path)
    weight = model[2].weight
    got = READS[name](weight)
    assert type(weight) is nn.Parameter
    want = in_ram(blocks(), range(2))["2.weight"]
    assert torch.equal(weights(model)["2.weight"], want)
    if isinstance(got, Tensor):
        assert not isinstance(got, Unpublished)
        assert torch.equal(got, READS[name](nn.Parameter(want)))
    optimizer.close()
    assert published(model)


def test_what_needs_no_bytes_does_not_wait(tmp_path: Path) -> None:
    optimizer, model = under_way(tmp_path)
    for p in model.parameters():
        assert isinstance(p, nn.Parameter)
        seen = (p.shape, p.dtype, p.device, p.grad, p.requires_grad, p.numel(), p.is_contiguous())
        assert len(seen) == len(p.size()) + 5 + (p.dim() == 1)
    optimizer.zero_grad()
    model.zero_grad()
    assert weights(model)["2.weight"].isnan().all()
    optimizer.close()


@pytest.mark.parametrize("foreach", [False, True])
def test_an_averaged_model_has_the_numbers_that_it_has_without_overlap(
    foreach: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    def averaged(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
        rule: Any = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)} if foreach else {}
        average = AveragedModel(model, **rule)
        for step in range(4):
            train(optimizer, model, [step])
            average.update_parameters(model)
        optimizer.close()
        assert published(average)
        return weights(average)

    model = blocks()
    want = averaged(model, AdamW(model.parameters(), lr=1e-2))
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, "forward")
    slow(optimizer, seconds=0.002)
    assert same(averaged(model, optimizer), want)


@pytest.mark.parametrize("change", ["data", "cast", "in place"])
def test_a_weight_that_is_changed_behind_step_gets_the_update_first(
    change: str, tmp_path: Path
) -> None:
    optimizer, model = under_way(tmp_path)
    if change == "data":
        for p in model.parameters():
            p.data = p.data.clone()
    elif change == "cast":
        model.double()
    else:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.0)
    want = in_ram(blocks(), range(2))
    assert all(torch.equal(w, want[n].to(w.dtype)) for n, w in weights(model).items())
    optimizer.close()


def test_threads_may_read(tmp_path: Path) -> None:
    optimizer, model = under_way(tmp_path)
    found: list[dict[str, Tensor]] = []

    def read() -> None:
        found.append({n: p.detach().clone() for n, p in model.named_parameters()})

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    optimizer.wait()
    for thread in threads:
        thread.join()
    want = in_ram(blocks(), range(2))
    assert len(found) == 4
    assert all(same(each, want) for each in found)
    optimizer.close()


def failing(directory: Path, *, delay_us: int = 0) -> tuple[nn.Module, AdamW]:
    """Return an optimizer whose last step fails after ``step()``, by its reads."""
    model = blocks()
    optimizer = optimizer_for(model, directory, "forward")
    train(optimizer, model, range(2))
    optimizer.synchronize()
    engine = engine_of(optimizer)
    torch.autograd.backward(mean_square(model, 2))
    optimizer.synchronize()
    engine.inject_fault("read", times=-1, error=5, delay_us=delay_us)
    optimizer.step()
    return model, optimizer


def test_a_failure_is_raised_by_each_read_until_the_optimizer_is_closed(tmp_path: Path) -> None:
    model, optimizer = failing(tmp_path)
    with pytest.raises(TransferError):
        nn.utils.parameters_to_vector(model.parameters())
    for _ in range(2):
        with pytest.raises(PoisonedError):
            nn.utils.parameters_to_vector(model.parameters())
    optimizer.close()
    assert published(model)


def test_weights_are_plain_after_a_close_that_finds_the_failure(tmp_path: Path) -> None:
    model, optimizer = failing(tmp_path, delay_us=100_000)
    with pytest.raises(TransferError):
        optimizer.close()
    assert published(model)
    AdamW(model.parameters(), module=model, overlap="forward").close()


def test_all_is_new_in_the_context(tmp_path: Path) -> None:
    optimizer, model = under_way(tmp_path)
    with optimizer.updated():
        assert published(model)
        assert same(weights(model), in_ram(blocks(), range(2)))
    optimizer.close()


def test_a_mark_that_another_thread_has_made_meanwhile_stays() -> None:
    parameter, called = nn.Parameter(torch.ones(3)), []

    def second(_: object) -> None:
        called.append("second")
        mark_published(parameter)

    def first(_: object) -> None:
        called.append("first")
        mark_unpublished(parameter, second)

    mark_unpublished(parameter, first)
    assert parameter.sum() == 3
    assert called == ["first", "second"]
    assert type(parameter) is nn.Parameter
