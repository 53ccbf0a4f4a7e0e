"""What ``overlap="auto"``, the default, means for an optimizer, and what the log says of it."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remote
from parity.beside import blocks, in_ram, mean_square, same, train, weights
from tensorstow import AdamW, Plan, stow
from tensorstow.base.errors import OptionError
from tensorstow.checkpoint.run import RunOptions
from tensorstow.optim import options
from tensorstow.states.offload_policy import OffloadPolicy
from tensorstow.states.state_store import Placement

AUTO = 'overlap="auto" means '


@pytest.fixture(autouse=True)
def small_ring(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(options, "DEFAULT_RING_BYTES", 1024)
    caplog.set_level(logging.INFO, logger="tensorstow")


def on_disk(model: nn.Module, directory: Path, **given: Any) -> AdamW:  # noqa: ANN401
    given = {"module": model, "states": "disk", "dir": directory, **given}
    return AdamW(model.parameters(), lr=1e-2, **given)


def overlap_of(optimizer: Any) -> object:  # noqa: ANN401
    return optimizer.offload_policy.overlap


def test_updates_run_in_the_next_forward_by_default(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = blocks()
    optimizer = on_disk(model, tmp_path)
    assert overlap_of(optimizer) == "forward"
    assert f'{AUTO}"forward"' in caplog.text
    train(optimizer, model, range(4))
    optimizer.close()
    assert same(weights(model), in_ram(blocks(), range(4)))


def _compiled(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "no module": ({"module": None}, "without module= nothing waits for new weights"),
    "rows": ({"defer_untouched": True}, "defer_untouched=True was given"),
    "memory": ({"ram_budget": "64MiB"}, "the ring holds half of the states"),
}


@pytest.mark.parametrize("name", REASONS)
def test_the_log_says_why_updates_run_in_step(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given, why = REASONS[name]
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32))
    optimizer = on_disk(model, tmp_path, **given)
    assert overlap_of(optimizer) == "none"
    assert f'{AUTO}"none": {why}' in caplog.text
    optimizer.close()


@pytest.mark.parametrize("compiled", [_compiled, partial(torch.compile, backend="eager")])
def test_updates_of_a_graph_run_in_step(
    compiled: Callable[[nn.Module], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = on_disk(compiled(blocks()), tmp_path)
    assert overlap_of(optimizer) == "none"
    assert f'{AUTO}"none": the module is compiled as one graph' in caplog.text
    optimizer.close()


def test_a_model_that_is_compiled_later_is_no_reason_to_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who has not asked for an overlap is told only at the level of what "auto" means."""
    model = blocks()
    optimizer = on_disk(model, tmp_path)
    graph = torch.compile(model, backend="eager")
    for step in range(3):
        torch.autograd.backward(mean_square(graph, step))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    assert same(weights(model), in_ram(blocks(), range(3)))
    levels = {r.levelno for r in caplog.records if "overlaps nothing" in r.getMessage()}
    assert levels == {logging.INFO}


def test_states_in_memory_are_updated_in_step(caplog: pytest.LogCaptureFixture) -> None:
    model = blocks()
    optimizer = AdamW(model.parameters(), lr=1e-2, module=model)
    assert overlap_of(optimizer) == "none"
    assert AUTO not in caplog.text  # nobody would expect an overlap


def test_weights_on_an_accelerator_are_updated_in_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    remote.make_remote(monkeypatch)
    optimizer = on_disk(blocks(), tmp_path)
    assert overlap_of(optimizer) == "none"
    assert f'{AUTO}"none": weights are on an accelerator' in caplog.text
    optimizer.close()


def test_processes_that_share_a_step_update_in_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model = blocks()
    policy = OffloadPolicy(Placement(1.0, (), None), overlap="auto")
    settled = options.settled(policy, RunOptions(module=model), list(model.parameters()))
    assert settled.overlap == "none"
    assert f'{AUTO}"none": there are several processes' in caplog.text


@pytest.mark.parametrize(
    ("plan", "made", "want"),
    [
        (Plan(states="disk"), partial(AdamW, lr=1e-2), "forward"),
        (Plan(states="disk"), partial(AdamW, lr=1e-2, overlap="auto"), "forward"),
        (Plan(states="disk"), partial(AdamW, lr=1e-2, overlap="backward"), "backward"),
        (Plan(states="disk", overlap="none"), partial(AdamW, lr=1e-2), "none"),
        (Plan(states="disk", overlap="backward"), partial(AdamW, overlap="auto"), "backward"),
        (Plan(parameters="disk", states="disk"), partial(AdamW, overlap="auto"), "forward"),
        (Plan(), partial(AdamW, lr=1e-2), "none"),
    ],
    ids=str,
)
def test_a_plan_leaves_it_to_its_optimizer(
    plan: Plan, made: Callable[..., AdamW], want: str, tmp_path: Path
) -> None:
    _, optimizer = stow(blocks(), made, plan=plan, dir=tmp_path)
    assert overlap_of(optimizer) == want
    optimizer.close()


def test_a_function_without_the_keyword_makes_what_a_plan_without_overlap_wants(
    tmp_path: Path,
) -> None:
    def make(params: Any, *, states: str, dir: Path, module: nn.Module) -> AdamW:  # noqa: A002, ANN401
        return AdamW(params, states=states, dir=dir, module=module, overlap="none")  # type: ignore[arg-type]

    plan = Plan(states="disk", overlap="none")
    _, optimizer = stow(blocks(), make, plan=plan, dir=tmp_path)
    assert overlap_of(optimizer) == "none"
    optimizer.close()


@pytest.mark.parametrize("takes_anything", [False, True])
def test_a_plan_without_overlap_needs_no_keyword_of_the_function(
    takes_anything: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    def named(params: Any, *, states: str, dir: Path, module: nn.Module) -> AdamW:  # noqa: A002, ANN401
        return AdamW(params, states=states, dir=dir, module=module)  # type: ignore[arg-type]

    def anything(params: Any, **given: Any) -> AdamW:  # noqa: ANN401
        return AdamW(params, lr=1e-2, **given)

    make: Any = anything if takes_anything else named
    plan = Plan(states="disk", overlap="none")
    _, optimizer = stow(blocks(), make, plan=plan, dir=tmp_path)
    assert overlap_of(optimizer) == "none"
    optimizer.close()
    _, optimizer = stow(blocks(), make, plan=plan.but(overlap="auto"), dir=tmp_path)
    assert overlap_of(optimizer) == "forward"
    optimizer.close()


def test_a_function_that_contradicts_the_plan_is_refused(tmp_path: Path) -> None:
    def chosen(params: Any, **given: Any) -> AdamW:  # noqa: ANN401
        return AdamW(params, lr=1e-2, **given | {"overlap": "backward"})

    for plan in (Plan(states="disk"), Plan(states="disk", overlap="none")):
        with pytest.raises(OptionError, match=r"did not pass on .* overlap='none'"):
            stow(blocks(), chosen, plan=plan, dir=tmp_path)


def test_frozen_weights_do_not_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = blocks()
    for p in model[:2].parameters():
        p.requires_grad_(requires_grad=False)
    on_disk(model, tmp_path / "trained").close()
    assert f'{AUTO}"forward"' in caplog.text
    for p in model.parameters():
        p.requires_grad_(requires_grad=False)
    on_disk(model, tmp_path / "frozen").close()
    assert f'{AUTO}"none": the ring holds half of the states' in caplog.text
