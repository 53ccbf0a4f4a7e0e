"""Parameters that are in the groups and not trained: of any kind, and those of lazy modules."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import nn

from compare import all_equal
from remote import make_remote
from tensorstow import AdamW, StowedOptimizer
from tensorstow.base.errors import DTypeError, OptionError
from tensorstow.base.update_on import Overlap
from tensorstow.colossalai import CPUAdam, HybridAdam


class Params4bit(nn.Parameter):
    """As bitsandbytes has it: packed bytes, and what unpacks them beside."""

    def __new__(cls, data: torch.Tensor) -> Self:
        self = torch.Tensor._make_subclass(cls, data, False)  # noqa: FBT003
        self.quant_state = {"scale": 0.5}
        return self


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


KINDS: dict[str, Callable[[], nn.Parameter]] = {
    "int8": lambda: frozen(torch.arange(4, dtype=torch.int8)),
    "uint8": lambda: frozen(torch.arange(4, dtype=torch.uint8)),
    "bool": lambda: frozen(torch.tensor([True, False])),
    "float8": lambda: frozen(torch.arange(4.0).to(torch.float8_e4m3fn)),
    "float64": lambda: frozen(torch.arange(4.0, dtype=torch.float64)),
    "complex": lambda: frozen(torch.arange(4.0) * 1j),
    "meta": lambda: frozen(torch.zeros(4, device="meta")),
    "not contiguous": lambda: frozen(torch.arange(16.0).view(4, 4).t()[:, ::2]),
    "expanded": lambda: frozen(torch.ones(1, 4).expand(3, 4)),
    "sparse": lambda: frozen(torch.eye(3).to_sparse()),
    "4 bit": lambda: Params4bit(torch.arange(4, dtype=torch.uint8)),
}
NO_BYTES = {"meta", "sparse", "expanded"}
DOORS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": AdamW,
    "StowedOptimizer": lambda ps: StowedOptimizer(
        torch.optim.SGD, ps, lr=0.1, momentum=0.9, states="host"
    ),
    "CPUAdam": CPUAdam,
    "HybridAdam": HybridAdam,
}


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.ones(4))
        self.base = KINDS[kind]()


def give_gradient(model: Model) -> None:
    model.trained.grad = torch.arange(4.0) + 1


def values(parameter: torch.Tensor) -> torch.Tensor:
    dense = parameter.detach().to_dense() if parameter.is_sparse else parameter.detach()
    return dense.to(torch.complex128) if not dense.is_meta else torch.zeros(())


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parameters_of_any_kind_are_left_alone(kind: str, door: str) -> None:
    model = Model(kind)
    before = values(model.base).clone()
    optimizer = DOORS[door](list(model.parameters()))
    for _ in range(2):
        give_gradient(model)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(values(model.base), before)
    assert not torch.equal(model.trained, torch.ones(4))
    assert list(optimizer.state_dict()["state"]) == [0]
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("kind", "overlap"), [*((k, "none") for k in KINDS), ("int8", "forward"), ("4 bit", "backward")]
)
def test_they_are_committed_where_they_have_bytes(
    kind: str, overlap: Overlap, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(kind)

    def run() -> AdamW:
        return AdamW(model.parameters(), states="disk", dir=tmp_path, module=model, overlap=overlap)

    before = values(model.base).clone()
    optimizer = run()
    for _ in range(2):
        (model.trained * torch.arange(4.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.commit()
    optimizer.commit()
    optimizer.close()
    told = [r for r in caplog.records if "Commits do not keep base" in r.getMessage()]
    assert len(told) == (kind in NO_BYTES)
    after = model.trained.detach().clone()
    with torch.no_grad():
        model.trained.zero_()
        if kind not in NO_BYTES:
            model.base.copy_(torch.zeros(model.base.shape).to(model.base.dtype))
    optimizer = run()
    assert optimizer.resume() == 2
    assert torch.equal(model.trained, after)
    assert torch.equal(values(model.base), before)
    optimizer.close()


@pytest.mark.parametrize("door", ["AdamW", "CPUAdam", "HybridAdam"])
def test_one_that_is_unfrozen_later_is_refused_at_its_gradient(door: str) -> None:
    model = Model("float64")
    optimizer = DOORS[door](list(model.parameters()))
    model.base.requires_grad_()
    give_gradient(model)
    model.base.grad = torch.ones_like(model.base)
    with pytest.raises(DTypeError, match=r"Parameter 1 of group 0 has dtype torch\.float64"):
        optimizer.step()
    assert torch.equal(model.trained, torch.ones(4))


def test_sixteen_bit_gradients_are_asked_of_those_that_are_trained() -> None:
    for kind in KINDS:
        model = Model(kind)
        AdamW(model.parameters(), grad_dtype=torch.bfloat16)
        assert model.trained.grad_dtype == torch.bfloat16


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_hybrid_adam_refuses_what_has_no_values(fraction: float, tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "nvme_offload_fraction": fraction,
        "nvme_offload_dir": tmp_path,
    }
    with pytest.raises(
        DTypeError, match=r"Parameter 0 of group 0 is on meta and has no .*to_empty"
    ):
        HybridAdam([nn.Parameter(torch.ones(3, device="meta"))], **given)
    later = frozen(torch.ones(3, device="meta"))
    optimizer = HybridAdam([nn.Parameter(torch.ones(3)), later], **given)
    later.requires_grad_()
    later.grad = torch.ones_like(later)
    with pytest.raises(DTypeError, match="is on meta and has no values"):
        optimizer.step()


# --- lazy modules ---


def lazy() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 8), nn.LazyLinear(2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("states", ["host", "disk"])
@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_lazy_modules_are_trained_from_their_first_step(overlap: Overlap, states: str) -> None:
    eager, model = lazy(), lazy()
    eager(torch.zeros(1, 5))
    torch.manual_seed(0)
    optimizer = AdamW(model.parameters(), module=model, overlap=overlap, states=states)
    assert optimizer.clip_grad_norm_(1.0) == 0 if overlap != "backward" else True
    model(torch.zeros(1, 5))
    model.load_state_dict(eager.state_dict())
    plain = AdamW(eager.parameters())
    train(model, optimizer)
    train(eager, plain)
    optimizer.wait()
    assert all_equal(model.parameters(), eager.parameters())
    optimizer.close()


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_what_lazy_modules_need_values_for_is_told(tmp_path: Path) -> None:
    model = lazy()
    with pytest.raises(OptionError, match="Run a forward of the model before it is made"):
        StowedOptimizer(torch.optim.AdamW, model.parameters(), states="ram")
    with pytest.raises(DTypeError, match="Run a forward of the model"):
        AdamW(model.parameters(), grad_dtype=torch.bfloat16)
    given: dict[str, Any] = {"states": "disk", "dir": tmp_path, "module": model}
    optimizer = AdamW(model.parameters(), **given)
    optimizer.commit()
    train(model, optimizer, 1)
    optimizer.commit()
    optimizer.close()
    model = lazy()
    optimizer = AdamW(model.parameters(), **{**given, "module": model})
    with pytest.raises(OptionError, match="run a forward of the model first"):
        optimizer.resume()
    model(torch.zeros(1, 5))
    assert optimizer.resume() == 1
    optimizer.close()


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_modules_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, model = lazy(), lazy()
    eager(torch.zeros(1, 5))
    plain = AdamW(eager.parameters())
    train(eager, plain)
    make_remote(monkeypatch)
    optimizer = AdamW(model.parameters(), states="disk")
    model(torch.zeros(1, 5))
    torch.manual_seed(0)
    fresh = lazy()
    fresh(torch.zeros(1, 5))
    model.load_state_dict(fresh.state_dict())
    train(model, optimizer)
    assert all_equal(model.parameters(), eager.parameters())
