"""What a torch.optim.Optimizer must do; the arithmetic is test_parity's."""

import copy
import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tensorstow import Adam, AdamW, PipelinePolicy
from tensorstow.base.errors import BudgetError, DirectoryError, DTypeError, OptionError

SMALL = PipelinePolicy(chunk_elements=4096)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32))


def on_disk(net: nn.Module, directory: Path, **options: object) -> AdamW:
    return AdamW(
        net.parameters(), states="disk", dir=directory, durability="none", policy=SMALL, **options
    )  # type: ignore[arg-type]


def backward(net: nn.Module, seed: int = 1) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
    net(x).square().mean().backward()


def train(net: nn.Module, opt: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        backward(net, step)
        opt.step()
        opt.zero_grad()


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_is_a_torch_optimizer_with_torchs_group_keys(tmp_path: Path) -> None:
    opt = on_disk(model(), tmp_path)
    assert isinstance(opt, torch.optim.Optimizer)
    theirs = torch.optim.AdamW(model().parameters())
    assert opt.param_groups[0].keys() == theirs.param_groups[0].keys()
    assert opt.defaults.keys() == theirs.defaults.keys()


@pytest.mark.parametrize(("ours", "theirs"), [(AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam)])
def test_defaults_are_torchs(ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    weights = list(model().parameters())
    assert ours(weights).defaults == theirs(weights).defaults


def test_state_dict_has_torchs_keys_and_full_shapes(tmp_path: Path) -> None:
    net = model()
    opt = on_disk(net, tmp_path)
    train(net, opt, 2)
    theirs = torch.optim.AdamW(net.parameters())
    train(net, theirs, 1)
    saved = opt.state_dict()
    wanted = theirs.state_dict()
    assert saved["state"].keys() == wanted["state"].keys()
    for index, entry in wanted["state"].items():
        assert saved["state"][index].keys() == entry.keys()
        for name, tensor in entry.items():
            assert saved["state"][index][name].shape == tensor.shape
            assert saved["state"][index][name].dtype == tensor.dtype


@pytest.mark.parametrize("target", ["ram", 0.5, "disk"])
def test_resume_in_another_place_is_bitwise(tmp_path: Path, target: float) -> None:
    whole, split = model(), model()
    opt = on_disk(whole, tmp_path)
    train(whole, opt, 6)
    first = on_disk(split, tmp_path)
    train(split, first, 3)
    saved = copy.deepcopy(first.state_dict())
    first.close()
    where = {} if target == "ram" else {"dir": tmp_path}
    second = AdamW(split.parameters(), states=target, policy=SMALL, **where)
    second.load_state_dict(saved)
    train(split, second, 3, first=3)
    assert same(whole, split)


def test_to_and_from_plain_torch_without_loss(tmp_path: Path) -> None:
    net = model()
    theirs = torch.optim.AdamW(net.parameters(), lr=3e-3)
    train(net, theirs, 3)
    ours = on_disk(net, tmp_path)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 3e-3
    back = torch.optim.AdamW(net.parameters())
    back.load_state_dict(ours.state_dict())
    for entry, wanted in zip(
        back.state_dict()["state"].values(), theirs.state_dict()["state"].values(), strict=True
    ):
        assert all(torch.equal(entry[name], wanted[name]) for name in wanted)


def test_16_bit_states_survive_a_round_trip_in_fp32(tmp_path: Path) -> None:
    net = model().to(torch.bfloat16)
    opt = on_disk(net, tmp_path)
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    opt.step()
    saved = opt.state_dict()
    again = on_disk(net, tmp_path)
    again.load_state_dict(saved)
    restored = again.state_dict()
    for index, entry in saved["state"].items():
        assert entry["exp_avg"].dtype == torch.float32
        assert entry["master"].to(torch.bfloat16).equal(list(net.parameters())[index])
        for name, tensor in entry.items():
            assert torch.equal(restored["state"][index][name], tensor)


def test_weights_loaded_after_the_states_keep_their_masters(tmp_path: Path) -> None:
    whole, half = model().to(torch.bfloat16), model().to(torch.bfloat16)

    def run(net: nn.Module, opt: AdamW, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for p in net.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(torch.bfloat16)
            opt.step()

    run(whole, on_disk(whole, tmp_path), range(6))
    first = on_disk(half, tmp_path)
    run(half, first, range(3))
    weights, states = copy.deepcopy(half.state_dict()), first.state_dict()
    fresh = model().to(torch.bfloat16)
    second = on_disk(fresh, tmp_path)
    second.load_state_dict(states)
    fresh.load_state_dict(weights)
    run(fresh, second, range(3, 6))
    assert same(whole, fresh)


def test_a_weight_written_by_someone_else_reseeds_the_master(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.zeros(100, dtype=torch.bfloat16))
    opt = AdamW([weight], lr=0.0, weight_decay=0.0, states="disk", dir=tmp_path, durability="none")
    weight.grad = torch.ones_like(weight)
    opt.step()
    with torch.no_grad():
        weight.fill_(3.0)
    opt.step()
    assert (weight == 3.0).all()
    assert (opt.state_dict()["state"][0]["master"] == 3.0).all()


def test_states_in_ram_are_views_that_users_may_read() -> None:
    net = model()
    opt = AdamW(net.parameters())
    train(net, opt, 2)
    weight = next(net.parameters())
    assert opt.state[weight]["exp_avg"].shape == weight.shape
    assert opt.state[weight]["exp_avg"].count_nonzero() > 0
    assert opt.state[weight]["step"] == 2


def test_groups_are_added_and_stepped_with_their_own_options(tmp_path: Path) -> None:
    net, late = model(), nn.Parameter(torch.ones(5000))
    opt = on_disk(net, tmp_path)
    train(net, opt, 1)
    before = opt.state_dict()["state"][0]["exp_avg"]
    opt.add_param_group({"params": [late], "lr": 0.5, "weight_decay": 0.0})
    after = opt.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(before, after)
    late.grad = torch.ones_like(late)
    opt.step()
    assert torch.allclose(late, torch.tensor(0.5))


def test_a_bad_group_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    net = model()
    opt = on_disk(net, tmp_path)
    bad = nn.Parameter(torch.ones(3, dtype=torch.float64))
    with pytest.raises(DTypeError):
        opt.add_param_group({"params": [bad]})
    assert len(opt.param_groups) == 1
    train(net, opt, 1)


def test_frozen_parameters_get_no_states_until_unfrozen(tmp_path: Path) -> None:
    net = model()
    net[0].weight.requires_grad_(requires_grad=False)
    opt = on_disk(net, tmp_path)
    numel = sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert opt._memory().logical_bytes == 8 * numel
    frozen = net[0].weight.clone()
    train(net, opt, 2)
    assert torch.equal(frozen, net[0].weight)
    net[0].weight.requires_grad_(requires_grad=True)
    train(net, opt, 1)
    assert not torch.equal(frozen, net[0].weight)
    assert opt._memory().logical_bytes == 8 * sum(p.numel() for p in net.parameters())


def test_exchanged_parameters_are_taken_up(tmp_path: Path) -> None:
    """Accelerate rewrites param_groups after construction."""
    net, other = model(), model()
    opt = on_disk(net, tmp_path)
    opt.param_groups[0]["params"] = list(other.parameters())
    train(other, opt, 2)
    plain = model()
    train(plain, AdamW(plain.parameters()), 2)
    assert same(other, plain)
    assert opt._memory().logical_bytes == 8 * sum(p.numel() for p in other.parameters())


def test_schedulers_and_tensor_lr_reach_the_kernel(tmp_path: Path) -> None:
    a, b = model(), model()
    ours = on_disk(a, tmp_path, lr=torch.tensor(1e-2))
    fixed = AdamW(b.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(ours, step_size=1, gamma=0.5)
    for step in range(3):
        fixed.param_groups[0]["lr"] = float(ours.param_groups[0]["lr"])
        train(a, ours, 1, first=step)
        train(b, fixed, 1, first=step)
        scheduler.step()
    assert float(ours.param_groups[0]["lr"]) == pytest.approx(1e-2 / 8)
    assert same(a, b)


def test_clipping_inside_the_update_is_clipping_before_it(tmp_path: Path) -> None:
    a, b = model(), model()
    ours, theirs = on_disk(a, tmp_path), AdamW(b.parameters())
    for step in range(3):
        backward(a, step)
        backward(b, step)
        norm = ours.clip_grad_norm_(1e-3)
        wanted = nn.utils.clip_grad_norm_(b.parameters(), 1e-3)
        assert norm.item() == pytest.approx(wanted.item(), rel=1e-6)
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    backward(a)
    backward(b)
    ours.step()
    theirs.step()
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)  # the factor holds for one step


def test_the_root_of_a_norm_is_rounded_right() -> None:
    weight = nn.Parameter(torch.zeros(2))
    drawn = torch.Generator().manual_seed(0)
    with AdamW([weight]) as optimizer:
        for _ in range(400):  # of which torch's own root is an ulp off for some, on some machines
            weight.grad = torch.rand(2, generator=drawn)
            first, second = weight.grad.tolist()
            wanted = math.sqrt(first * first + second * second)
            assert optimizer.clip_grad_norm_(math.inf).item() == wanted
            halved = optimizer.clip_grad_norm_(math.inf, loss_scale=2.0)
            assert halved.item() == wanted / 2.0


def test_a_norm_that_is_not_finite_can_raise() -> None:
    net = model()
    opt = AdamW(net.parameters())
    backward(net)
    weight = next(net.parameters())
    assert weight.grad is not None
    weight.grad[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="not finite"):
        opt.clip_grad_norm_(1.0, error_if_nonfinite=True)
    with pytest.raises(OptionError, match="max_norm"):
        opt.clip_grad_norm_(-1.0)


def test_a_scaler_hands_its_scale_over_and_skips_infinities(tmp_path: Path) -> None:
    a, b = model(), model()
    ours, plain = on_disk(a, tmp_path), AdamW(b.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for step in range(4):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        loss = a(x).square().mean()
        scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
        scaler.step(ours)
        scaler.update()
        ours.zero_grad()
        if step != 2:
            train(b, plain, 1, first=step)
    assert same(a, b)
    assert scaler.get_scale() == 2.0**11
    assert ours.state_dict()["state"][0]["step"] == 3


def test_expanded_gradients_are_read_right() -> None:
    weight, plain = nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(4, 3))
    weight.grad = torch.arange(3.0).expand(4, 3)
    plain.grad = torch.arange(3.0).repeat(4, 1)
    for p in (weight, plain):
        AdamW([p]).step()
    assert torch.equal(weight, plain)


def test_bad_gradients_stop_the_step_before_anything_moves(tmp_path: Path) -> None:
    good, bad = nn.Parameter(torch.ones(10)), nn.Embedding(10, 4, sparse=True)
    opt = AdamW([good, bad.weight], states="disk", dir=tmp_path, durability="none")
    good.grad = torch.ones_like(good)
    bad(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(DTypeError, match="sparse"):
        opt.step()
    assert (good == 1).all()
    assert not opt.state[good]


def test_a_cast_model_is_told_to_make_a_new_optimizer(tmp_path: Path) -> None:
    net = model()
    opt = on_disk(net, tmp_path)
    net.to(torch.bfloat16)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(OptionError, match="Cast the model first"):
        opt.step()


def test_amsgrad_cannot_be_switched_on_later() -> None:
    net = model()
    opt = AdamW(net.parameters())
    opt.param_groups[0]["amsgrad"] = True
    backward(net)
    with pytest.raises(OptionError, match="amsgrad"):
        opt.step()


def test_loading_amsgrad_states_makes_room_for_them(tmp_path: Path) -> None:
    net = model()
    saved_from = AdamW(net.parameters(), amsgrad=True)
    train(net, saved_from, 2)
    saved = copy.deepcopy(saved_from.state_dict())
    opt = on_disk(net, tmp_path)
    opt.load_state_dict(saved)
    restored = opt.state_dict()["state"][0]
    assert torch.equal(restored["max_exp_avg_sq"], saved["state"][0]["max_exp_avg_sq"])


def test_names_of_parameters_come_with_the_error() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    with pytest.raises(DTypeError, match=r"'head\.weight'"):
        AdamW([("head.weight", weight)])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"states": 1.5}, OptionError),
        ({"states": "disk", "dir": "/proc/nonexistent"}, DirectoryError),
        ({"states": "disk", "dir": "/dev/shm"}, DirectoryError),
        ({"states": "disk", "ram_budget": "1KiB"}, BudgetError),
        ({"states": "disk", "ram_budget": "much"}, OptionError),
        ({"foreach": True}, OptionError),
        ({"lr": -1.0}, OptionError),
        ({"grad_dtype": torch.float64}, DTypeError),
    ],
)
def test_bad_options_are_errors_at_construction(
    options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        AdamW(model().parameters(), **options)


def test_a_dropped_optimizer_frees_itself_and_its_hooks(tmp_path: Path) -> None:
    net = model()
    opt = on_disk(net, tmp_path)
    train(net, opt, 1)
    watcher = weakref.ref(opt)
    del opt
    gc.collect()
    assert watcher() is None
    backward(net)


def test_an_empty_step_changes_nothing(tmp_path: Path) -> None:
    net = model()
    opt = on_disk(net, tmp_path)
    opt.step()
    assert opt._traffic().chunks_updated == 0
    assert opt.state_dict()["state"] == {}


def test_parameters_of_size_zero_count_their_steps() -> None:
    empty, full = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.ones(3))
    opt = AdamW([empty, full])
    for p in (empty, full):
        p.grad = torch.ones_like(p)
    opt.step()
    assert [entry["step"] for entry in opt.state_dict()["state"].values()] == [1, 1]
