"""Ways of using an optimizer that once broke this one."""

import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import nn

from tensorstow import Adam, AdamW, PipelinePolicy, StowError
from tensorstow.base.errors import DTypeError, OptionError, PoisonedError
from tensorstow.colossalai import HybridAdam

SMALL = PipelinePolicy(chunk_elements=1024)
TWO_SLOTS = 70_000


def weight(numel: int = 4, value: float = 0.0) -> nn.Parameter:
    return nn.Parameter(torch.full((numel,), value))


@pytest.mark.parametrize("late", [0, 3, 7])
def test_a_parameter_whose_first_gradient_comes_late(tmp_path: Path, late: int) -> None:
    """Every update moves a weight by one, so a chunk that was missed or repeated shows."""
    params = [weight(1024) for _ in range(8)]
    opt = AdamW(
        params, lr=1.0, betas=(0.0, 0.0), weight_decay=0.0, eps=0.0,
        states="disk", dir=tmp_path, durability="none", ram_budget=TWO_SLOTS, policy=SMALL,
    )  # fmt: skip
    for step in range(6):
        used = [p for i, p in enumerate(params) if i != late or step >= 3]
        torch.stack([p.sum() for p in used]).sum().backward()
        time.sleep(0.005)
        opt.step()
        opt.zero_grad()
    moved = [-p[0].item() for p in params]
    assert moved == [3.0 if i == late else 6.0 for i in range(8)]


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_loading_what_is_there_changes_nothing(tmp_path: Path, where: str) -> None:
    """Accelerate makes this very call."""
    p = weight(5000)
    place = {"dir": tmp_path} if where == "disk" else {}
    opt = AdamW([p], states=where, **place)  # type: ignore[arg-type]
    p.grad = torch.ones_like(p)
    opt.step()
    opt.load_state_dict(opt.state_dict())
    entry = opt.state_dict()["state"][0]
    assert torch.allclose(entry["exp_avg"], torch.tensor(0.1))
    assert entry["step"] == 1


@pytest.mark.parametrize("numel", [10, 5000])
def test_data_of_another_size_is_refused(numel: int) -> None:
    p = weight(2000)
    opt = AdamW([p])
    p.data = torch.zeros(numel)
    p.grad = torch.ones(numel)
    with pytest.raises(OptionError, match="its data was replaced"):
        opt.step()


def test_a_gradient_of_another_size_is_refused() -> None:
    p = weight(2000)
    opt = AdamW([p])
    p.grad = torch.ones(2000)
    p.data = torch.zeros(10)
    with pytest.raises(DTypeError, match="2000 elements"):
        opt.step()


def test_reading_states_in_another_thread_disturbs_nothing(tmp_path: Path) -> None:
    def run(*, watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(3000)) for _ in range(6)]
        opt = AdamW(
            params,
            states="disk",
            dir=tmp_path,
            durability="none",
            ram_budget=TWO_SLOTS,
            policy=SMALL,
        )
        stop = threading.Event()

        def look() -> None:
            while not stop.is_set():
                opt.state_dict()

        thread = threading.Thread(target=look)
        if watched:
            thread.start()
        for _ in range(20):
            torch.stack([(p * p).sum() for p in params]).sum().backward()
            opt.step()
            opt.zero_grad()
        stop.set()
        if watched:
            thread.join()
        return params

    for a, b in zip(run(watched=True), run(watched=False), strict=True):
        assert torch.equal(a, b)


def test_two_groups_of_as_many_parameters() -> None:
    opt = AdamW([{"params": [weight()]}, {"params": [weight()], "lr": 1.0}])
    opt.add_param_group({"params": [weight()]})
    for group in opt.param_groups:
        group["params"][0].grad = torch.ones(4)
    opt.step()
    bad = nn.Parameter(torch.ones(4, dtype=torch.float64))
    with pytest.raises(DTypeError, match="Parameter 0 of group 3"):
        opt.add_param_group({"params": [bad]})


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_the_default_dtype_and_device_do_not_reach_the_states(
    tmp_path: Path, fraction: float
) -> None:
    p = weight(100)
    opt = HybridAdam([p], nvme_offload_fraction=fraction, nvme_offload_dir=tmp_path)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            for _ in range(300):
                p.grad = torch.ones(100, dtype=torch.float32, device="cpu")
                opt.step()
            entry = opt.state_dict()["state"][0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert entry["step"] == 300
    assert {t.dtype for t in entry.values()} == {torch.float32}
    assert {t.device.type for t in entry.values()} == {"cpu"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"exp_avg": torch.zeros(100)}, r"\(100,\)"),
        ({"exp_avg": torch.zeros(1)}, r"\(1,\)"),
        ({"exp_avg_sq": 3.0}, "float"),
        ({"exp_avg": None}, "NoneType"),
    ],
)
def test_saved_states_that_do_not_fit_are_refused_untouched(
    change: dict[str, object], words: str
) -> None:
    p = weight()
    opt = AdamW([p])
    p.grad = torch.ones(4)
    opt.step()
    saved = opt.state_dict()
    saved["state"][0] = {**saved["state"][0], **change}
    with pytest.raises(OptionError, match=words):
        opt.load_state_dict(saved)
    assert torch.allclose(opt.state_dict()["state"][0]["exp_avg"], torch.tensor(0.1))


def test_a_saved_amsgrad_state_without_its_maximum_is_refused() -> None:
    p = weight()
    opt = AdamW([p], amsgrad=True)
    p.grad = torch.ones(4)
    opt.step()
    saved = opt.state_dict()
    saved["state"][0] = {k: v for k, v in saved["state"][0].items() if k != "max_exp_avg_sq"}
    with pytest.raises(OptionError, match="max_exp_avg_sq"):
        opt.load_state_dict(saved)


def test_another_optimizers_states_are_named() -> None:
    p, q = weight(), weight()
    theirs = torch.optim.SGD([q], momentum=0.9)
    q.grad = torch.ones(4)
    theirs.step()
    saved = AdamW([p]).state_dict()
    saved["state"] = theirs.state_dict()["state"]
    with pytest.raises(OptionError, match="momentum_buffer"):
        AdamW([p]).load_state_dict(saved)


def test_adamw_stays_adamw_whatever_is_loaded() -> None:
    p = weight()
    opt = AdamW([p])
    opt.load_state_dict(torch.optim.Adam([p]).state_dict())
    assert opt.param_groups[0]["decoupled_weight_decay"] is True
    adam = Adam([p])
    adam.load_state_dict(torch.optim.Adam([p]).state_dict())
    assert adam.param_groups[0]["decoupled_weight_decay"] is False


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_states_that_users_edit_are_taken_in(tmp_path: Path, where: str) -> None:
    ours, plain = weight(3000), weight(3000)
    place = {"dir": tmp_path} if where == "disk" else {}
    opt = AdamW([ours], states=where, policy=SMALL, **place)  # type: ignore[arg-type]
    theirs = torch.optim.AdamW([plain])
    for p, o in ((ours, opt), (plain, theirs)):
        p.grad = torch.ones_like(p)
        o.step()
        o.state[p]["exp_avg"] = torch.full((3000,), 0.7)
        o.state[p]["exp_avg_sq"] = torch.full((3000,), 0.2)
        o.step()
    torch.testing.assert_close(ours, plain)
    theirs.state.clear()
    opt.state.clear()  # the reset idiom
    opt.step()
    theirs.step()
    torch.testing.assert_close(ours, plain)
    assert torch.allclose(opt.state_dict()["state"][0]["exp_avg"], torch.tensor(0.1))


def test_states_move_to_another_parameter_with_their_group(tmp_path: Path) -> None:
    """What programs that grow their parameters do."""
    old, new = weight(10), weight(10)
    opt = AdamW([old], states="ram")
    old.grad = torch.ones(10)
    opt.step()
    state = opt.state.pop(old)
    opt.state[new] = {**state, "exp_avg": state["exp_avg"].clone()}
    opt.param_groups[0]["params"][0] = new
    new.grad = torch.ones(10)
    opt.step()
    assert torch.allclose(opt.state_dict()["state"][0]["exp_avg"], torch.tensor(0.19))
    assert opt.state[new]["step"] == 2
    del tmp_path


def test_weights_exchanged_through_data_are_seen() -> None:
    p = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    opt = AdamW([p], lr=1e-3)
    p.grad = torch.ones_like(p)
    opt.step()
    nn.utils.vector_to_parameters(torch.full((64,), 100.0, dtype=torch.bfloat16), [p])
    opt.step()
    assert p[0].item() == pytest.approx(100.0, rel=1e-2)


def test_a_step_that_is_refused_is_not_counted() -> None:
    p = weight()
    opt = AdamW([p])
    p.grad = torch.ones(4)
    opt.step()
    for key, value in (("betas", (0.9, 1.0)), ("lr", -1.0), ("foreach", True)):
        kept = opt.param_groups[0][key]
        opt.param_groups[0][key] = value
        with pytest.raises(OptionError, match=key):
            opt.step()
        opt.param_groups[0][key] = kept
    assert opt.state[p]["step"] == 1
    assert torch.allclose(opt.state[p]["exp_avg"], torch.tensor(0.1))


def test_clipping_by_a_norm_that_is_infinite_or_to_nothing() -> None:
    for max_norm, gradient in ((1.0, float("inf")), (0.0, 1.0)):
        p = weight()
        opt = HybridAdam([p])
        p.grad = torch.full((4,), gradient)
        opt.clip_grad_norm_(max_norm)
        opt.step()
        assert opt.state[p]["step"] == 1


def test_dropping_gradients_drops_their_clip_factor() -> None:
    p = weight()
    opt = AdamW([p])
    p.grad = torch.ones(4)
    opt.clip_grad_norm_(1e-3)
    opt.zero_grad()
    p.grad = torch.ones(4)
    opt.step()
    assert torch.allclose(opt.state[p]["exp_avg"], torch.tensor(0.1))


def test_a_parameter_twice_in_a_group_is_refused() -> None:
    p = weight()
    with pytest.raises(OptionError, match="twice"):
        AdamW([p, p])


def test_a_compiled_step_runs_uncompiled() -> None:
    p = weight()
    opt = AdamW([p], lr=1.0, betas=(0.0, 0.0), weight_decay=0.0)
    step = torch.compile(opt.step, backend="eager")
    p.grad = torch.ones(4)
    step()
    assert torch.allclose(p, torch.tensor(-1.0))
    assert opt.state[p]["step"] == 1


def test_closing_gives_states_in_ram_back_and_says_so_later() -> None:
    p = weight(1 << 20)
    opt = AdamW([p])
    p.grad = torch.ones_like(p)
    opt.step()
    opt.close()
    assert opt._memory().host_bytes == 0
    with pytest.raises(PoisonedError, match="closed"):
        opt.state_dict()


@pytest.mark.parametrize(
    "options",
    [
        {"betas": (0.9,)},
        {"betas": (0.9, 0.99, 0.999)},
        {"betas": None},
        {"lr": "1e-3"},
        {"lr": None},
        {"eps": "x"},
        {"states": "disk", "dir": ""},
    ],
)
def test_arguments_of_the_wrong_kind_are_named(options: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=r"was given"):
        AdamW([weight()], **options)  # type: ignore[arg-type]


def test_steps_in_two_threads_take_turns(tmp_path: Path) -> None:
    p = weight(3000)
    opt = AdamW(
        [p], lr=1.0, betas=(0.0, 0.0), weight_decay=0.0, eps=0.0, states="disk", dir=tmp_path,
        durability="none", policy=SMALL,
    )  # fmt: skip
    p.grad = torch.ones_like(p)
    threads = [threading.Thread(target=opt.step) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (p == -4.0).all()


def refuse(_: object) -> NoReturn:
    message = "no room"
    raise StowError(message)


def test_a_failed_group_leaves_no_trace_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = weight(3000)
    opt = AdamW([p], states=0.5, dir=tmp_path, durability="none", policy=SMALL)
    p.grad = torch.ones_like(p)
    opt.step()
    wide = nn.Parameter(torch.ones(3000, dtype=torch.bfloat16))
    with monkeypatch.context() as patch:
        patch.setattr(opt._states().storage, "reserve", refuse)
        with pytest.raises(StowError, match="no room"):
            opt.add_param_group({"params": [wide]})
    late = weight(2000)
    opt.add_param_group({"params": [late]})
    late.grad = torch.ones_like(late)
    opt.step()
    saved = opt.state_dict()["state"]
    assert torch.allclose(saved[1]["exp_avg"], torch.tensor(0.1))
    assert saved[0]["step"] == 2


def test_a_clip_factor_goes_with_the_gradients_that_it_was_made_of() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    other = torch.nn.Parameter(torch.zeros(3))
    optimizer = AdamW([parameter, other], lr=1.0)
    parameter.grad = torch.full((3,), torch.nan)
    other.grad = torch.ones(3)
    optimizer.clip_grad_norm_(1.0)
    parameter.grad, other.grad = torch.ones(3), torch.ones(3)  # model.zero_grad(), a better batch
    optimizer.step()
    assert torch.isfinite(parameter).all()
    optimizer.clip_grad_norm_(1e-3)
    parameter.grad = torch.ones(3)
    with pytest.raises(OptionError, match="1 of 2 gradients"):
        optimizer.step()
