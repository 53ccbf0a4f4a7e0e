"""``stow(plan="auto", batch=)``: activations of a model as it is count, and are placed."""

import logging
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from models import FeedForward
from ranks.example_batch import chosen
from ranks.pool import Pool
from tensorstow import AdamW, Budget, Plan, plan_of, stow
from tensorstow.activations.offload import LEAST_BYTES
from tensorstow.base.activation_placement import ActivationPlacement
from tensorstow.base.errors import OptionError
from tensorstow.fsdp.traced_activations import Activations, Peaks
from tensorstow.fsdp.traced_model import ExampleBatch
from tensorstow.fsdp.traced_placement import KEPT, TracedPlacement
from tensorstow.fsdp.units import units_of

WIDTH, ROWS = 128, 960
ON_DISK = TracedPlacement(ActivationPlacement.DISK, device_is_host=True)


@pytest.fixture(autouse=True)
def _no_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(FeedForward(WIDTH) for _ in range(4)))


def batch() -> torch.Tensor:
    return torch.ones(ROWS, WIDTH)


def example(model: nn.Module, given: object) -> ExampleBatch:
    return ExampleBatch(model, units_of(model), given, None, None)


def traced(given: object, model: nn.Module | None = None) -> Activations | None:
    return example(model or net(), given).trace(KEPT)


def test_what_is_traced_is_what_the_model_itself_holds() -> None:
    model = net()
    found = traced(batch(), model)
    assert found is not None
    assert all(p.grad is None for p in model.parameters())
    x = batch()
    with Peaks(model) as peaks:
        outputs = model(x)  # which a loop has until its backward is over
        outputs.square().mean().backward()
    assert found.peak_bytes == peaks.seen.peak_bytes
    assert found.operations == peaks.seen.operations


def test_arguments_are_a_tuple_keywords_or_one() -> None:
    one = traced(batch())
    assert one == traced((batch(),)) == traced({"input": batch()})
    assert one == traced(batch(), net().to("meta"))  # which has no memory to be computed in


def test_a_batch_has_tokens_or_samples() -> None:
    ids = torch.zeros(3, 5, dtype=torch.long)
    assert example(net(), {"x": batch(), "ids": ids}).tokens == 15
    assert example(net(), batch()).tokens == ROWS
    assert ExampleBatch(net(), [], batch(), None, 7).tokens == 7


def test_a_narrow_dtype_takes_half() -> None:
    model = net()
    half = ExampleBatch(model, units_of(model), batch(), torch.bfloat16, None).trace(KEPT)
    whole = traced(batch(), model)
    assert half is not None
    assert whole is not None
    assert half.peak_bytes < 0.6 * whole.peak_bytes


def test_activations_are_placed_where_they_do_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    make = partial(AdamW, lr=1e-3)
    for host, placement in ((None, "keep"), ("24MiB", "recompute")):
        budget = None if host is None else Budget(host=host)
        with caplog.at_level(logging.INFO, "tensorstow"):
            model, optimizer = stow(net(), make, budget=budget, batch=batch())
        with optimizer:
            assert plan_of(model).activations == placement
            assert "activations" not in caplog.text or placement in caplog.text
            assert "not counted" not in caplog.text
            x = batch()
            with Peaks(model) as peaks:
                model(x).square().mean().backward()
            states = optimizer._memory().ram_bytes
            # Parameters, gradients and activations of any time, and the states.
            held = peaks.seen.held().beside_gradients + 2 * peaks._fixed + states
            assert budget is None or held <= budget.host


def test_a_model_that_cannot_be_traced_is_placed_without(caplog: pytest.LogCaptureFixture) -> None:
    class Reads(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum().item() > 0 else x

    with caplog.at_level(logging.INFO, "tensorstow"):
        model, optimizer = stow(Reads(*net()), partial(AdamW, lr=1e-3), batch=batch())
    optimizer.close()
    assert plan_of(model).activations == "keep"
    assert "batch= cannot be traced" in caplog.text
    assert "are not counted" in caplog.text


class Fails(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x)
        raise ZeroDivisionError


def test_a_block_that_fails_leaves_autograd_as_it_was() -> None:
    assert example(nn.Sequential(Fails(8), Fails(8)), torch.ones(2, 8)).trace(ON_DISK) is None
    x = torch.arange(float(LEAST_BYTES)).requires_grad_()
    torch.autograd.backward(x.sin().sum())
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().cos())


def test_the_largest_batch_of_ranks_counts(ranks: Pool) -> None:
    # Rank 0's alone would be kept.
    plans = [Plan.from_json(text) for text in ranks(2).run(chosen, "3500KiB")]
    assert plans[0] == plans[1]
    assert plans[0].activations == "recompute"
    # Rank 0's alone would fit when they are computed again.
    assert ranks(2).run(chosen, "2500KiB") == ["BudgetError", "BudgetError"]


@pytest.mark.parametrize("optimizer", [partial(AdamW, lr=1e-3), None])
def test_where_no_plan_is_searched_a_batch_is_refused(optimizer: partial[AdamW] | None) -> None:
    with pytest.raises(OptionError, match="batch="):
        stow(net(), optimizer, plan=Plan(), batch=batch())
