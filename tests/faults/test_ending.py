"""A run that ends commits what was trained, or says how many steps no commit has."""

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import children
from tensorstow import AdamW
from tensorstow.base.errors import TransferError

OVERLAPS = ("none", "forward", "backward", "speculative")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def make(net: nn.Module, directory: Path, **given: Any) -> AdamW:  # noqa: ANN401  # passed on
    return AdamW(net.parameters(), lr=1e-2, states="disk", dir=directory, module=net, **given)


def train(net: nn.Module, optimizer: AdamW, steps: int = 3) -> None:
    for _ in range(steps):
        torch.autograd.backward(net(torch.ones(2, 8)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in net.state_dict().items()}


def resumed(directory: Path) -> tuple[int | None, dict[str, Tensor]]:
    net = model()
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    optimizer = make(net, directory)
    step = optimizer.resume()
    found = weights(net)
    optimizer.close()
    return step, found


def check(directory: Path, step: int, want: dict[str, Tensor]) -> None:
    found, have = resumed(directory)
    assert found == step
    assert all(torch.equal(have[name], want[name]) for name in want)


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("way", ["close", "with", "drop", "cycle"])
def test_an_end_commits(overlap: str, way: str, tmp_path: Path) -> None:
    net = model()
    optimizer = make(net, tmp_path, overlap=overlap)
    if way == "with":
        with optimizer as entered:
            assert entered is optimizer
            train(net, optimizer)
    else:
        train(net, optimizer)
    want = weights(net)
    if way == "close":
        optimizer.close()
        optimizer.close()
    if way == "cycle":
        optimizer.me = optimizer  # type: ignore[attr-defined]
    del optimizer
    if way == "with":
        del entered
    gc.collect()
    check(tmp_path, 3, want)


def test_what_is_committed_is_not_committed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = model()
    optimizer = make(net, tmp_path, commit_every=3)
    train(net, optimizer)
    optimizer.synchronize()
    before = optimizer._runtime.commits.generation
    optimizer.close()
    assert optimizer._runtime.commits.generation == before
    make(net, tmp_path / "fresh").close()
    assert not caplog.records
    assert resumed(tmp_path / "fresh")[0] is None


def test_commits_by_hand_are_left_to_hands(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = model()
    with make(net, tmp_path, commit_every=None) as optimizer:
        train(net, optimizer)
        optimizer.commit()
        want = weights(net)
        train(net, optimizer, 2)
    assert f"2 steps since the last commit of {tmp_path} are not committed" in caplog.text
    assert "commit_every=None" in caplog.text
    check(tmp_path, 3, want)


def save_state_dict(optimizer: AdamW, directory: Path) -> None:
    torch.save(optimizer.state_dict(), directory / "optimizer.pt")


def save_safetensors(optimizer: AdamW, directory: Path) -> None:
    optimizer.save_safetensors(directory / "optimizer.safetensors")


@pytest.mark.parametrize("save", [save_state_dict, save_safetensors])
def test_steps_that_are_saved_are_not_lost(
    save: Callable[[AdamW, Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = model()
    with make(net, tmp_path / "run", commit_every=None) as optimizer:
        train(net, optimizer)
        save(optimizer, tmp_path)
    assert not caplog.records


def train_on(net: nn.Module, optimizer: AdamW) -> None:
    train(net, optimizer, 1)


def go_back(net: nn.Module, optimizer: AdamW) -> None:
    optimizer.resume()
    train(net, optimizer, 2)


def load(_: nn.Module, optimizer: AdamW) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("after", [train_on, go_back, load])
def test_steps_after_those_that_are_saved_are_lost(
    after: Callable[[nn.Module, AdamW], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = model()
    with make(net, tmp_path, commit_every=None) as optimizer:
        train(net, optimizer, 1)
        optimizer.commit()
        train(net, optimizer, 2)
        optimizer.state_dict()
        after(net, optimizer)
    assert "since the last commit" in caplog.text


def test_what_extra_returns_is_not_saved(tmp_path: Path) -> None:
    """A state dict that ``extra`` takes at the end of each step is in commits alone."""
    net, made = model(), list[AdamW]()

    def extra() -> dict[str, Any]:
        return {"groups": made[0].state_dict()["param_groups"]} if made else {}

    optimizer = make(net, tmp_path, commit_every=5, extra=extra)
    made.append(optimizer)
    train(net, optimizer, 1)
    optimizer.commit()
    train(net, optimizer, 2)
    assert optimizer._runtime.commits.saved is None


def test_a_run_of_references_ends_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Trainers go on from the newest reference; nothing was to keep the steps after it."""
    caplog.set_level(logging.INFO, "tensorstow")
    net = model()
    with make(net, tmp_path, commit_every=None, checkpoints="reference") as optimizer:
        train(net, optimizer)
        optimizer.state_dict()
        train(net, optimizer, 2)
    records = [r for r in caplog.records if "2 steps since the last commit" in r.getMessage()]
    assert [r.levelname for r in records] == ["INFO"]


def test_a_failure_of_a_run_of_references_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = model()
    optimizer = make(net, tmp_path, commit_every=None, checkpoints="reference")
    train(net, optimizer)
    optimizer.request_commit()
    optimizer._states().pipeline.handle.poison(RuntimeError("no more"))
    optimizer.close()
    assert "the optimizer failed" in caplog.text


def test_no_commit_replaces_one_that_got_extra(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = model()
    with make(net, tmp_path) as optimizer:
        train(net, optimizer)
        optimizer.commit(extra={"epoch": 1})
        train(net, optimizer, 2)
    assert "2 steps" in caplog.text
    assert "extra" in caplog.text
    caplog.clear()
    with make(net, tmp_path) as optimizer:
        assert optimizer.resume() == 3
        assert optimizer.extra == {"epoch": 1}
        train(net, optimizer, 1)
    assert "1 step since" in caplog.text


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_an_exception_commits_the_last_whole_step(
    overlap: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = model()
    want: dict[str, Tensor] = {}

    def run() -> None:
        with make(net, tmp_path, overlap=overlap) as optimizer:
            train(net, optimizer)
            want.update(weights(net))
            torch.autograd.backward(net(torch.ones(2, 8)).square().mean())
            message = "mine"
            raise ValueError(message)

    with pytest.raises(ValueError, match="mine"):
        run()
    if overlap == "backward":  # updates of a step have begun that will not end
        assert "3 steps" in caplog.text
        assert "a backward has begun" in caplog.text
        assert resumed(tmp_path)[0] is None
    else:
        check(tmp_path, 3, want)


def test_a_commit_that_fails_is_raised_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = model()
    optimizer = make(net, tmp_path)
    train(net, optimizer)
    optimizer.synchronize()
    engine = optimizer._states().engine
    assert engine is not None
    engine.inject_fault("write", times=-1, error=5)
    with pytest.raises(TransferError):
        optimizer.close()
    assert "3 steps since the last commit" in caplog.text
    optimizer.close()
    assert resumed(tmp_path)[0] is None


def test_an_optimizer_that_failed_says_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = model()
    optimizer = make(net, tmp_path)
    train(net, optimizer)
    optimizer._states().pipeline.handle.poison(RuntimeError("no more"))
    optimizer.close()
    assert "3 steps" in caplog.text
    assert "the optimizer failed" in caplog.text


SCRIPT = """
import sys
sys.path[:0] = [sys.argv[2]]
from pathlib import Path
from test_ending import make, model, train
net = model()
optimizer = make(net, Path(sys.argv[1]), overlap=sys.argv[3], extra=lambda: {"epoch": 7})
train(net, optimizer)
if sys.argv[4] == "raises":
    raise SystemExit(3)
"""


@pytest.mark.parametrize(("overlap", "end"), [("none", "raises"), ("forward", "ends")])
def test_the_interpreter_s_end_commits(overlap: str, end: str, tmp_path: Path) -> None:
    words = (tmp_path, Path(__file__).parent, overlap, end)
    done = children.run("-c", SCRIPT, *words, teardown=True, check=False)
    assert (done.returncode, done.stderr) == (3 if end == "raises" else 0, "")
    net = model()
    optimizer = make(net, tmp_path)
    train(net, other := make(net, tmp_path / "other"))
    want = weights(net)
    other.close()
    assert optimizer.resume() == 3
    assert optimizer.extra == {"epoch": 7}
    assert all(torch.equal(w, want[name]) for name, w in net.state_dict().items())
    optimizer.close()
