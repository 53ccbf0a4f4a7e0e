import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
)

from compare import all_equal
from ranks.boosted import batch, model_of
from tensorstow import Adam, AdamW, PipelinePolicy
from tensorstow.base.errors import OptionError, StowError
from tensorstow.colossalai.adam import CPUAdam, HybridAdam
from tensorstow.colossalai.booster import Booster
from tensorstow.colossalai.booster.plugin import (
    GeminiPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from tensorstow.colossalai.interface import ModelWrapper, OptimizerWrapper

Made = Callable[[nn.Module], torch.optim.Optimizer]


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Groups in another order than the model's."""
    biases = [p for p in model.parameters() if p.ndim == 1]
    weights = [p for p in model.parameters() if p.ndim > 1]
    return [
        {"params": biases, "weight_decay": 0.0, "lr": 3e-2},
        {"params": weights, "weight_decay": 0.1, "mine": "kept"},
    ]


def train_plainly(made: Made, steps: int = 4) -> list[torch.Tensor]:
    model = model_of()
    optimizer = made(model)
    for step in range(steps):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def train(booster: Booster, made: Made, steps: int = 4, **boosted: Any) -> list[torch.Tensor]:  # noqa: ANN401
    model = model_of()
    model, optimizer, *_ = booster.boost(model, made(model), **boosted)
    for step in range(steps):
        booster.backward(model(batch(step)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


MADE: dict[str, tuple[Made, Made]] = {
    "HybridAdam": (lambda m: HybridAdam(m.parameters(), lr=1e-2),) * 2,
    "CPUAdam, L2": (lambda m: CPUAdam(m.parameters(), weight_decay=0.1, adamw_mode=False),) * 2,
    "on disk": (
        lambda m: HybridAdam(m.parameters(), lr=1e-2, nvme_offload_fraction=0.5),
        lambda m: HybridAdam(m.parameters(), lr=1e-2),
    ),
    "uncorrected": (lambda m: HybridAdam(m.parameters(), bias_correction=False),) * 2,
    "groups": (lambda m: HybridAdam(grouped(m), lr=1e-2, betas=(0.8, 0.9), eps=1e-6),) * 2,
    "tensorstow's AdamW": (lambda m: AdamW(m.parameters(), amsgrad=True),) * 2,
    "tensorstow's Adam": (lambda m: Adam(m.parameters(), weight_decay=0.1, maximize=True),) * 2,
    "torch's AdamW": (
        lambda m: torch.optim.AdamW(grouped(m), lr=1e-2),
        lambda m: AdamW(grouped(m), lr=1e-2),
    ),
    "torch's Adam": (
        lambda m: torch.optim.Adam(m.named_parameters(), weight_decay=0.1, foreach=True),
        lambda m: Adam(m.named_parameters(), weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_the_optimizer_is_made_anew_as_it_was(name: str) -> None:
    given, same = MADE[name]
    assert all_equal(train(Booster(plugin=GeminiPlugin()), given), train_plainly(same))


def test_groups_come_along_whole() -> None:
    model = model_of()
    given = HybridAdam(grouped(model), lr=1e-2)
    before = [{k: v for k, v in g.items() if k != "params"} for g in given.param_groups]
    _, optimizer, *_ = Booster(plugin=GeminiPlugin()).boost(model, given)
    kept = [{k: g[k] for k in b} for g, b in zip(optimizer.param_groups, before, strict=True)]
    assert kept == before
    assert [len(g["params"]) for g in optimizer.param_groups] == [4, 4]
    assert [g["params"] for g in given.param_groups] == [[], []]


def test_the_share_on_disk_and_its_directory_come_along(tmp_path: Path) -> None:
    model = model_of()
    given = HybridAdam(
        model.parameters(), nvme_offload_fraction=0.25, nvme_offload_dir=str(tmp_path)
    )
    _, optimizer, *_ = Booster(plugin=GeminiPlugin()).boost(model, given)
    numel = sum(p.numel() for p in model.parameters())
    assert optimizer._memory().disk_bytes == 8 * round(0.25 * numel)
    assert optimizer.offload_policy.placement.directories == (tmp_path,)
    with pytest.raises(StowError, match="closed"):
        given.step()
    optimizer.close()


def test_sizes_and_threads_come_along() -> None:
    policy = PipelinePolicy(chunk_elements=1024, threads=1)
    model = model_of()
    given = HybridAdam(
        model.parameters(), nvme_offload_fraction=1.0, ram_budget="200KiB", policy=policy
    )
    _, optimizer, *_ = Booster(plugin=GeminiPlugin()).boost(model, given)
    assert optimizer.offload_policy.policy == policy
    assert optimizer.offload_policy.placement.ram_budget == 200 << 10
    optimizer.close()


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "cosine": lambda o: CosineAnnealingLR(o, T_max=4),
    "one cycle": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=6),
    "sequential": lambda o: SequentialLR(
        o, [ConstantLR(o, 0.5), CosineAnnealingLR(o, T_max=4)], milestones=[2]
    ),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scheduler_goes_on_with_the_new_optimizer(name: str) -> None:
    plain = model_of()
    theirs = HybridAdam(plain.parameters(), lr=1e-2)
    schedule = SCHEDULES[name](theirs)
    model = model_of()
    given = HybridAdam(model.parameters(), lr=1e-2)
    booster = Booster(plugin=GeminiPlugin())
    placed, optimizer, _, _, ours = booster.boost(model, given, lr_scheduler=SCHEDULES[name](given))
    for step in range(4):
        for each, m, s in ((theirs, plain, schedule), (optimizer, placed, ours)):
            m(batch(step)).square().mean().backward()
            each.step()
            s.step()
            each.zero_grad()
        assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in theirs.param_groups]
    assert all_equal(list(placed.parameters()), list(plain.parameters()))


def test_a_scheduler_of_the_new_optimizer() -> None:
    model = model_of()
    _, optimizer, *_ = Booster(plugin=GeminiPlugin()).boost(model, HybridAdam(model.parameters()))
    schedule = CosineAnnealingLR(optimizer, T_max=2)
    optimizer.step()
    schedule.step()
    assert optimizer.optim.param_groups[0]["lr"] == pytest.approx(5e-4)


def test_five_are_returned_and_three_as_they_were() -> None:
    criterion, loader = nn.MSELoss(), [1, 2]
    model = model_of()
    boosted = Booster(GeminiPlugin()).boost(
        model,
        HybridAdam(model.parameters()),
        criterion,
        loader,  # type: ignore[arg-type]
    )
    assert len(boosted) == 5
    assert isinstance(boosted[0], ModelWrapper)
    assert boosted[0].unwrap() is boosted[0].module is model
    assert isinstance(boosted[1], OptimizerWrapper)
    assert boosted[2] is criterion
    assert boosted[3] is loader
    assert boosted[4] is None


@pytest.mark.parametrize(
    "plugin", [GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_without_an_optimizer_is_placed_too(
    precision: str, plugin: type[Plugin], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tensorstow")
    takes = plugin in {GeminiPlugin, LowLevelZeroPlugin}
    booster = Booster(plugin=plugin(**({"precision": precision} if takes else {})))
    scheduler = object()
    model, optimizer, *_, kept = booster.boost(model_of(), lr_scheduler=scheduler)
    assert optimizer is None
    assert kept is scheduler
    assert "0.00 MiB of its states there, 0.00 MiB on disk" in caplog.text or not takes
    want = model_of()
    booster.save_model(model, tmp_path / "m")
    for _ in range(2):
        for p in want.parameters():
            p.data.mul_(0.5)
        torch.save(want.state_dict(), tmp_path / "of torch")
        booster.load_model(model, tmp_path / "of torch")
        with torch.no_grad():
            found, expected = model(batch(0)), want(batch(0))
        if takes and precision == "bf16":
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found.float(), expected, rtol=0.1, atol=0.1)
        else:
            assert torch.equal(found, expected)
    model(batch(0)).float().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(OptionError, match=r"backward\(\) was given a NoneType"):
        booster.backward(model(batch(0)).float().sum(), optimizer)


def test_gradients_of_several_backwards_add_up() -> None:
    booster = Booster(plugin=GeminiPlugin(enable_gradient_accumulation=True))
    model = model_of()
    model, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters()))
    for part in range(2):
        booster.backward(model(batch(part)).square().mean(), optimizer)
    optimizer.step()
    plain = model_of()
    alone = HybridAdam(plain.parameters())
    for part in range(2):
        plain(batch(part)).square().mean().backward()
    alone.step()
    assert all_equal(list(model.parameters()), list(plain.parameters()))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (Booster, "Booster needs a plugin to place a model"),
        (lambda: Booster("cpu"), "Booster needs a plugin to place a model"),
        (lambda: Booster(GeminiPlugin(), plugin=GeminiPlugin()), "Two plugins"),
        (lambda: Booster(plugin=GeminiPlugin(), mixed_precision="fp16"), "mixed_precision='fp16'"),
        (lambda: Booster("meta", plugin=GeminiPlugin()), "device='meta' was given"),
    ],
)
def test_what_a_booster_refuses(call: Callable[[], Booster], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        call()


def stepped(model: nn.Module) -> HybridAdam:
    optimizer = HybridAdam(model.parameters())
    model(batch(0)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), "optimizer=SGD was given"),
        (stepped, "has taken steps"),
        (lambda _: HybridAdam(model_of().parameters()), "is not one of the model's"),
        (lambda m: AdamW(m.parameters(), module=m, overlap="forward"), "decides these itself"),
        (lambda m: AdamW(m.parameters(), states="disk", state_format="int8"), "states exactly"),
    ],
)
def test_optimizers_that_are_refused(made: Made, said: str) -> None:
    model = model_of()
    before = [p.detach().clone() for p in model.parameters()]
    given = made(model)
    now = [p.detach().clone() for p in model.parameters()] if said == "has taken steps" else before
    with pytest.raises(OptionError, match=said):
        Booster(plugin=GeminiPlugin()).boost(model, given)
    assert all_equal(list(model.parameters()), now)


def test_a_model_is_boosted_once() -> None:
    booster = Booster(plugin=GeminiPlugin())
    model, *_ = booster.boost(model_of())
    with pytest.raises(OptionError, match="boost a model once"):
        booster.boost(model)


def test_calls_that_are_refused_by_name() -> None:
    booster = Booster(plugin=GeminiPlugin())
    model, optimizer, *_ = booster.boost(model_of())
    with pytest.raises(OptionError, match=r"execute_pipeline\(\) was called"):
        booster.execute_pipeline(iter([]), model, nn.MSELoss(), optimizer)
    with pytest.raises(OptionError, match=r"no_sync\(\) was called with GeminiPlugin"):
        booster.no_sync(model, optimizer)
    with pytest.raises(OptionError, match=r"enable_lora\(\) was called"):
        booster.enable_lora(model)
    with pytest.raises(OptionError, match=r"backward\(\) was given a HybridAdam"):
        booster.backward(torch.ones(()), HybridAdam(model_of().parameters()))


@pytest.mark.parametrize("name", ["warmup_non_model_data_ratio", "steady_cuda_cap_ratio"])
@pytest.mark.parametrize("policy", ["auto", "static"])
def test_shares_of_a_device_are_told_where_no_copies_stay_on_one(
    name: str, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    Booster(plugin=GeminiPlugin(placement_policy=policy)).boost(model_of())
    assert "changes nothing" not in caplog.text
    Booster(plugin=GeminiPlugin(placement_policy=policy, **{name: 0.5})).boost(model_of())
    assert f"GeminiPlugin: {name}=0.5 changes nothing" in caplog.text


def test_keywords_of_loading_that_change_nothing_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    booster = Booster(plugin=GeminiPlugin())
    model, *_ = booster.boost(model_of())
    booster.save_model(model, tmp_path / "model.pt")
    booster.load_model(model, tmp_path / "model.pt")
    assert "changes nothing" not in caplog.text
    booster.load_model(model, tmp_path / "model.pt", num_threads=4)
    assert "Booster: num_threads=4 changes nothing" in caplog.text
