"""What a torch.optim.Optimizer must do, for any class that is stowed; bits are ..._parity's."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import ParamsT, register_optimizer_step_post_hook

from parity.piecewise import CHUNK, MATRICES, SMALL, assert_same_states, pair, parameters
from parity.scratch import scratch_files
from tensorstow import AdamW, PipelinePolicy, StowedOptimizer
from tensorstow.base.errors import (
    BudgetError,
    DirectoryError,
    DTypeError,
    ForkError,
    KeywordError,
    OptionError,
)
from tensorstow.optim.options import StatePlacement

LARGE = 40_000


def weight(numel: int = LARGE, value: float = 0.0) -> nn.Parameter:
    return nn.Parameter(torch.full((numel,), value))


def stowed(params: list[nn.Parameter], directory: Path, **options: object) -> StowedOptimizer:
    options = {"lr": 1.0, "momentum": 0.5, "policy": SMALL, **options}
    return StowedOptimizer(optim.SGD, params, states="disk", dir=directory, **options)  # type: ignore[arg-type]


def give(params: list[nn.Parameter], value: float = 1.0) -> None:
    for p in params:
        p.grad = torch.full_like(p, value)


# --- what scratch files cannot ---


@pytest.mark.parametrize("name", ["commit", "resume", "snapshot", "snapshots", "drop"])
def test_calls_that_need_commits_are_refused_by_name(name: str, tmp_path: Path) -> None:
    p = weight()
    opt = stowed([p], tmp_path)
    arguments = ["one"] if name in {"snapshot", "drop"} else []
    with pytest.raises(OptionError, match=rf"^{name}\(\) was .*scratch.*AdamW or Adam with dir="):
        getattr(opt, name)(*arguments)
    give([p])
    opt.step()
    assert p.detach().eq(-1).all()
    opt.close()


OF_ADAM = {
    "overlap": "forward",
    "accumulation_steps": 2,
    "durability": "commit",
    "commit_every": 5,
    "extra": dict,
    "grad_dtype": torch.bfloat16,
}


@pytest.mark.parametrize("name", OF_ADAM)
def test_what_only_our_adams_take_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=rf"^{name}= was given for SGD: .*tensorstow\.AdamW"):
        stowed([weight()], tmp_path, **{name: OF_ADAM[name]})


def test_a_class_s_own_option_of_such_a_name_is_its(tmp_path: Path) -> None:
    class Mine(optim.SGD):
        def __init__(self, params: ParamsT, lr: float = 1.0, extra: float = 0.0) -> None:
            super().__init__(params, lr=lr + extra)

    p = weight(10)
    opt = StowedOptimizer(Mine, [p], states="disk", dir=tmp_path, extra=1.0, per_parameter=True)
    give([p])
    opt.step()
    assert p.detach().eq(-2).all()
    opt.close()


# --- torch's interface ---


def test_is_a_torch_optimizer_with_the_classs_own_groups(tmp_path: Path) -> None:
    both = pair(tmp_path, optim.AdamW, {"lr": 0.1})
    assert isinstance(both.ours, optim.Optimizer)
    assert both.ours.param_groups[0].keys() == both.theirs.param_groups[0].keys()
    assert both.ours.defaults == both.theirs.defaults
    assert "AdamW, stowed" in repr(both.ours)


def test_step_hooks_are_called_once_a_step(tmp_path: Path) -> None:
    params = [weight(), weight(3)]
    opt = stowed(params, tmp_path)
    seen: list[str] = []
    opt.register_step_pre_hook(lambda *_: seen.append("before"))
    opt.register_step_post_hook(lambda *_: seen.append("after"))
    everyones = register_optimizer_step_post_hook(lambda o, *_: seen.append(o))
    try:
        give(params)
        opt.step()
    finally:
        everyones.remove()
    assert seen == ["before", "after", opt]


def test_zero_grad_and_a_step_without_gradients(tmp_path: Path) -> None:
    p = weight()
    opt = stowed([p], tmp_path)
    give([p])
    opt.zero_grad()
    assert p.grad is None
    opt.step()
    assert (p == 0).all()
    assert not opt.state


def test_a_scaler_skips_infinities_and_unscales(tmp_path: Path) -> None:
    p = weight()
    opt = stowed([p], tmp_path, momentum=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, float("inf"), 1.0):
        opt.zero_grad()
        scaler.scale((p * factor).sum()).backward()
        scaler.step(opt)
        scaler.update()
    assert (p == -2).all()


def test_gradient_clipping_is_torchs(tmp_path: Path) -> None:
    p = weight()
    opt = stowed([p], tmp_path, momentum=0.0)
    give([p])
    nn.utils.clip_grad_norm_([p], 1.0)
    opt.step()
    assert float(p.detach().norm()) == pytest.approx(1.0, rel=1e-4)


def test_numbers_are_visible_and_large_tensors_are_not(tmp_path: Path) -> None:
    both = pair(tmp_path, optim.NAdam)
    both.step(2)
    for mine, other in both.parameters():
        kept, wanted = both.ours.state[mine], both.theirs.state[other]
        assert kept["step"] == 2
        assert torch.equal(kept["mu_product"], wanted["mu_product"])
        assert ("exp_avg" in kept) == (mine.numel() < 4096)


def test_a_compiled_step_runs_uncompiled(tmp_path: Path) -> None:
    p = weight()
    opt = stowed([p], tmp_path)
    give([p])
    torch.compile(opt.step, backend="eager")()
    assert (p == -1).all()


# --- state dicts ---


@pytest.mark.parametrize("optimizer_class", [optim.SGD, optim.NAdam, optim.Adafactor, optim.Muon])
def test_to_the_class_and_back_through_a_file(
    tmp_path: Path, optimizer_class: type[optim.Optimizer]
) -> None:
    options = {"momentum": 0.9} if optimizer_class is optim.SGD else {}
    # torch itself loses NAdam's numbers in 16 bits: it casts them to the parameter's dtype.
    dtype = torch.float32 if optimizer_class is optim.NAdam else torch.bfloat16
    both = pair(tmp_path, optimizer_class, options, shapes=MATRICES[:3], dtype=dtype)
    both.step(2)
    torch.save(both.ours.state_dict(), tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    both.theirs.load_state_dict(saved)
    both.ours.load_state_dict(saved)
    both.step(2, first=2)
    both.assert_same()
    both.ours.load_state_dict(both.theirs.state_dict())
    both.step(1, first=4)
    both.assert_same()


@pytest.mark.parametrize("states", ["ram", 0.5])
def test_into_another_place(tmp_path: Path, states: StatePlacement) -> None:
    both = pair(tmp_path, optim.AdamW, shapes=MATRICES)
    both.step(2)
    place = {} if states == "ram" else {"dir": tmp_path}
    params = [p for p, _ in both.parameters()]
    other = StowedOptimizer(optim.AdamW, params, states=states, policy=SMALL, **place)
    other.load_state_dict(both.ours.state_dict())
    both.ours = other
    both.step(2, first=2)
    both.assert_same()


def test_states_come_in_as_the_class_keeps_them(tmp_path: Path) -> None:
    """As torch does, where the class keeps the parameter's dtype; not where it keeps another."""
    full, half = parameters(MATRICES[:1]), parameters(MATRICES[:1], torch.bfloat16)
    first = stowed(full, tmp_path)
    give(full)
    first.step()
    second = stowed(half, tmp_path)
    second.load_state_dict(first.state_dict())
    assert second.state_dict()["state"][0]["momentum_buffer"].dtype == torch.bfloat16
    third = StowedOptimizer(InDouble, half, states="disk", dir=tmp_path, lr=0.1, per_parameter=True)
    give(half, 1 / 3)
    third.step()
    saved = third.state_dict()
    assert saved["state"][0]["mean"].dtype == torch.float64
    third.load_state_dict(saved)
    assert_same_states(third.state_dict(), saved)


def test_loading_replaces_everything(tmp_path: Path) -> None:
    params = [weight(), weight()]
    opt = stowed(params, tmp_path)
    give(params[:1])
    opt.step()
    early = opt.state_dict()
    give(params)
    opt.step()
    opt.load_state_dict(early)
    assert_same_states(opt.state_dict(), early)
    assert params[1] not in opt.state


def test_saved_states_of_another_model_or_class_are_refused_untouched(tmp_path: Path) -> None:
    p, q, r = weight(), nn.Parameter(torch.zeros(LARGE + 1)), weight()
    opt = stowed([p], tmp_path)
    give([p])
    opt.step()
    kept = opt.state_dict()
    for other in (stowed([q], tmp_path), StowedOptimizer(optim.Adam, [r], states="ram")):
        give([q, r])
        other.step()
        with pytest.raises(OptionError, match="saved"):
            opt.load_state_dict(other.state_dict())
    assert_same_states(opt.state_dict(), kept)


# --- parameters that come, go and rest ---


def test_frozen_unused_and_empty_parameters(tmp_path: Path) -> None:
    frozen, unused, empty, used = weight(), weight(), weight(0), weight()
    frozen.requires_grad_(requires_grad=False)
    opt = stowed([frozen, unused, empty, used], tmp_path)
    give([empty, used])
    opt.step()
    assert opt._memory().disk_bytes == 4 * LARGE
    assert (frozen == 0).all()
    frozen.requires_grad_(requires_grad=True)
    give([frozen, unused])
    opt.step()
    opt.step()
    assert (frozen == -2.5).all()
    assert opt._memory().disk_bytes == 3 * 4 * LARGE


def test_groups_are_added(tmp_path: Path) -> None:
    p, q = weight(), weight()
    opt = stowed([p], tmp_path)
    give([p])
    opt.step()
    opt.add_param_group({"params": [q], "lr": 2.0})
    give([p, q])
    opt.step()
    assert (p == -2.5).all()
    assert (q == -2.0).all()
    with pytest.raises(DTypeError, match="group 2"):
        opt.add_param_group({"params": [nn.Parameter(torch.empty(3, device="meta"))]})
    assert len(opt.param_groups) == 2


def test_exchanged_parameters_are_taken_up(tmp_path: Path) -> None:
    old, new = weight(), weight()
    opt = stowed([old], tmp_path)
    opt.param_groups[0]["params"] = [new]
    give([new])
    opt.step()
    opt.step()
    assert (new == -2.5).all()
    assert (old == 0).all()


def test_emptied_and_edited_states_are_what_counts(tmp_path: Path) -> None:
    both = pair(tmp_path, optim.SGD, {"lr": 1.0, "momentum": 0.5}, shapes=((300, 400),))
    both.step(2)
    for optimizer in (both.ours, both.theirs):
        optimizer.state.clear()
    both.step(2, first=2)
    both.assert_same()
    for optimizer in (both.ours, both.theirs):
        for p in optimizer.param_groups[0]["params"]:
            optimizer.state[p]["momentum_buffer"] = torch.full((300, 400), 3.0)
    both.step(1, first=4)
    both.assert_same()
    assert not both.ours.state[both.parameters()[0][0]]


def test_a_whole_parameters_edited_state_is_what_counts(tmp_path: Path) -> None:
    both = pair(tmp_path, optim.Muon, shapes=((130, 200),))
    both.step(1)
    for optimizer in (both.ours, both.theirs):
        for p in optimizer.param_groups[0]["params"]:
            optimizer.state[p]["momentum_buffer"] = torch.full((130, 200), 3.0)
    both.step(1, first=1)
    both.assert_same()


def test_data_of_another_size_or_dtype_is_refused(tmp_path: Path) -> None:
    for data in (torch.zeros(10), torch.zeros(LARGE, dtype=torch.bfloat16)):
        p = weight()
        opt = stowed([p], tmp_path)
        p.data = data
        give([p])
        with pytest.raises(OptionError, match="taken up"):
            opt.step()


def test_two_optimizers_at_once(tmp_path: Path) -> None:
    a = pair(tmp_path, optim.AdamW, shapes=MATRICES)
    b = pair(tmp_path, optim.RMSprop, shapes=MATRICES)
    for step in range(3):
        a.step(1, first=step)
        b.step(1, first=step)
    a.assert_same()
    b.assert_same()


# --- refused by name ---


@pytest.mark.parametrize("optimizer_class", [optim.LBFGS, optim.SparseAdam])
def test_classes_that_cannot_go_piece_by_piece(optimizer_class: type[optim.Optimizer]) -> None:
    with pytest.raises(OptionError, match=optimizer_class.__name__):
        StowedOptimizer(optimizer_class, [weight()], states="ram")


def test_our_own_and_what_is_no_class_are_refused() -> None:
    with pytest.raises(OptionError, match="already"):
        StowedOptimizer(AdamW, [weight()], states="ram")
    with pytest.raises(OptionError, match="class"):
        StowedOptimizer(optim.SGD([weight()]), [weight()], states="ram")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["foreach", "fused", "capturable", "differentiable"])
def test_options_that_cannot_be_honoured(name: str) -> None:
    with pytest.raises(OptionError, match=name):
        StowedOptimizer(optim.Adam, [weight()], states="ram", **{name: True})
    p = weight()
    opt = StowedOptimizer(optim.Adam, [p], states="ram")
    opt.param_groups[0][name] = True
    give([p])
    with pytest.raises(OptionError, match=name):
        opt.step()
    assert (p == 0).all()


def test_what_the_class_finds_wrong_is_said_by_name() -> None:
    with pytest.raises(OptionError, match=r"SGD was constructed, and raised ValueError: .*rate"):
        StowedOptimizer(optim.SGD, [weight()], lr=-1.0, states="ram")
    with pytest.raises(OptionError, match=r"Muon was .*2D"):
        StowedOptimizer(optim.Muon, [weight()], states="ram")
    with pytest.raises(KeywordError, match=r"SGD\(\) was .*unheard.*momentum"):
        StowedOptimizer(optim.SGD, [weight()], unheard=1, states="ram")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"states": 1.5}, OptionError),
        ({"dir": "/var/tmp"}, OptionError),  # the states are in memory
        ({"states": "disk", "dir": "/proc/nonexistent"}, DirectoryError),
        ({"states": "disk", "dir": "/dev/shm"}, DirectoryError),
        ({"states": "disk", "ram_budget": "1KiB"}, BudgetError),
        ({"policy": PipelinePolicy(isa="scalar")}, OptionError),
        ({"policy": PipelinePolicy(threads=2)}, OptionError),
    ],
)
def test_bad_places_are_errors_at_construction(
    options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        StowedOptimizer(optim.Adam, [weight()], **options)


def test_bad_gradients_stop_the_step_before_anything_moves(tmp_path: Path) -> None:
    good, bad = weight(), nn.Embedding(500, 100, sparse=True)
    opt = stowed([good, bad.weight], tmp_path)
    give([good])
    bad(torch.tensor([1])).sum().backward()
    with pytest.raises(DTypeError, match="sparse"):
        opt.step()
    bad.weight.grad = torch.ones(100, 500).t()
    with pytest.raises(DTypeError, match="contiguous"):
        opt.step()
    assert (good == 0).all()
    assert not opt.state


def test_a_forked_child_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    p = weight()
    opt = stowed([p], tmp_path)
    give([p])
    opt.step()
    opt.synchronize()
    monkeypatch.setattr("os.getpid", lambda: -1)
    for use in (opt.step, opt.state_dict, opt.synchronize):
        with pytest.raises(ForkError):
            use()


def test_a_dropped_optimizer_frees_itself(tmp_path: Path) -> None:
    p = weight()
    opt = stowed([p], tmp_path)
    give([p])
    opt.step()
    kept = weakref.ref(opt._manager)
    del opt
    gc.collect()
    assert kept() is None
    assert not scratch_files(tmp_path)


# --- classes of one's own ---


class InDouble(optim.Optimizer):
    """Keeps a mean in binary64, beside a list that holds one more tensor and a number."""

    def __init__(self, params: ParamsT, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p, dtype=torch.float64)
                    state["more"] = [torch.zeros_like(p), 0]
                state["mean"] = 0.5 * state["mean"] + p.grad  # a new tensor every time
                state["more"][0].add_(1)
                state["more"][1] += 1
                p.sub_((group["lr"] * state["mean"] * state["more"][1]).to(p.dtype))


@pytest.mark.parametrize("elementwise", [False, True])
def test_a_class_of_ones_own(tmp_path: Path, *, elementwise: bool) -> None:
    if elementwise:
        with pytest.raises(OptionError, match="elementwise"):
            pair(tmp_path, InDouble, {"lr": 0.1}, elementwise=True)
        return
    both = pair(tmp_path, InDouble, {"lr": 0.1}, per_parameter=True)
    both.step(3)
    both.assert_same()
    assert both.ours._memory() == both.ours.predict()


def test_a_subclass_of_a_known_class_may_be_called_elementwise(tmp_path: Path) -> None:
    class Own(optim.Adam):
        pass

    plain = pair(tmp_path, Own, shapes=MATRICES, per_parameter=True)
    assert plain.ours.plan()[0].how == "whole"
    both = pair(tmp_path, Own, shapes=MATRICES, elementwise=True)
    assert both.ours.plan()[0].how == "chunks"
    both.step(3)
    both.assert_same()


def test_adafactor_cannot_be_called_elementwise() -> None:
    with pytest.raises(OptionError, match="Leave elementwise out"):
        StowedOptimizer(optim.Adafactor, [weight()], states="ram", elementwise=True)


def test_chunks_are_of_the_policys_size(tmp_path: Path) -> None:
    opt = stowed([weight(4 * CHUNK)], tmp_path)
    [plan] = opt.plan()
    assert (plan.how, plan.pieces, plan.piece_bytes) == ("chunks", 4, 4 * CHUNK)


def test_the_norm_of_gradients_of_a_scaled_loss_is_that_without_the_scale() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = StowedOptimizer(optim.SGD, [weight], lr=1.0)
    weight.grad = torch.tensor([6e-6, 8e-6])
    norm = optimizer.clip_grad_norm_(1e-6, loss_scale=2.0)
    assert norm.item() == pytest.approx(5e-6)
    assert weight.grad.tolist() == pytest.approx([1e-6, 8e-6 / 6.0], rel=1e-6)
    optimizer.close()
