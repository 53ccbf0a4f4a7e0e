"""A resumed run is bit for bit the run that was never stopped, however it is resumed."""

import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from compare import all_equal
from crash.world import Case, World, differing, digest, undisturbed
from tensorstow import AdamW, PipelinePolicy
from tensorstow.base.update_on import Overlap

STOP, END = 5, 8


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def wrong_with(world: World) -> list[str]:
    """Return what is not as in a run that nothing happened to."""
    kind = world.case.state_format or "split"
    return differing(world.facts(), undisturbed(kind)[world.step])


def stop_and_go(first: Case, second: Case, directory: Path) -> World:
    """Train, drop everything, resume as ``second``, train on; compare at both ends."""
    world = World(first, directory)
    assert world.resume() is None
    world.train(STOP)
    assert wrong_with(world) == []
    world.close()
    world = World(second, directory)
    with torch.no_grad():
        for tensor in (*world.model.parameters(), *world.model.buffers()):
            tensor.fill_(3)
    step = world.resume()
    assert step is not None
    assert wrong_with(world) == []
    world.train(END)
    assert wrong_with(world) == []
    return world


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
@pytest.mark.parametrize("state_format", ["fp32", "split", "bf16", "int8"])
def test_the_same_way(overlap: Overlap, state_format: str, tmp_path: Path) -> None:
    case = Case(overlap=overlap, state_format=state_format)
    stop_and_go(case, case, tmp_path).close()


@pytest.mark.parametrize(
    "other",
    [
        {"policy": {"chunk_elements": 1024}},
        {"policy": {"chunk_elements": 1 << 16}},
        {"policy": {"isa": "scalar"}},
        {"policy": {"isa": "avx2"}},
        {"policy": {"backend": "uring"}},
        {"policy": {"schedule": "naive"}},
        {"policy": {"nan_until_published": True}, "overlap": "forward"},
        {"overlap": "forward"},
        {"overlap": "backward"},
        {"ram_budget": "1100KiB"},
        {"ram_budget": "20MiB"},
        {"ram_budget": "300KiB"},
        {"commit_every": 1},
        {"commit_every": "0.01s"},
        {"states": 0.4},
        {"states": "ram"},
    ],
    ids=str,
)
def test_another_way(other: dict[str, Any], tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    plain = Case(state_format="split")
    stop_and_go(plain, replace(plain, **other), there).close()
    stop_and_go(replace(plain, **other), plain, back).close()


@pytest.mark.parametrize("threads", [2, 3])
def test_another_number_of_threads(threads: int, tmp_path: Path) -> None:
    first, second = (Case(state_format="int8", policy={"threads": n}) for n in (1, threads))
    stop_and_go(first, second, tmp_path).close()


def test_resuming_reads_weights_and_no_states(tmp_path: Path) -> None:
    case = Case(policy={"backend": "threads"})
    world = World(case, tmp_path)
    world.train(6)
    world.close()
    world = World(case, tmp_path)
    before = _bytes_read()
    assert world.resume() == 6
    manifest = (tmp_path / "manifest.sqlite").stat().st_size
    trained = sum(p.numel() * p.element_size() for p in world.model.parameters())
    rounding = 4096 * (len(world.optimizer._states().chunks) + 40)
    assert world.optimizer._traffic().bytes_read == 0
    assert _bytes_read() - before <= 2 * trained + 4 * manifest + rounding
    assert _bytes_read() - before < world.optimizer._memory().logical_bytes
    world.train(7)
    assert world.optimizer._traffic().bytes_read > 0
    world.close()


def _bytes_read() -> int:
    fields = Path(f"/proc/{os.getpid()}/io").read_text(encoding="ascii").split()
    return int(fields[fields.index("read_bytes:") + 1])


def test_a_fresh_directory_holds_nothing(tmp_path: Path) -> None:
    world = World(Case(), tmp_path / "new")
    assert world.optimizer.resume() is None
    assert world.optimizer.extra == {}
    world.close()


def test_parameters_in_another_order_are_found_by_name(tmp_path: Path) -> None:
    def make(*, backwards: bool) -> tuple[nn.Module, AdamW]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 9), nn.Linear(9, 33))
        parameters = list(model.parameters())
        optimizer = AdamW(
            parameters[::-1] if backwards else parameters,
            states="disk",
            dir=tmp_path,
            module=model,
            commit_every=1,
            policy=PipelinePolicy(chunk_elements=64),
        )
        return model, optimizer

    def train(model: nn.Module, optimizer: AdamW, steps: range) -> list[torch.Tensor]:
        for step in steps:
            x = torch.randn(4, 9, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    model = nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 9), nn.Linear(9, 33))
    model.load_state_dict(make(backwards=False)[0].state_dict())
    plain = AdamW(model.parameters())
    plain_end = train(model, plain, range(8))
    for backwards, steps in ((False, range(3)), (True, range(3, 6)), (False, range(6, 8))):
        model, optimizer = make(backwards=backwards)
        assert optimizer.resume() == (steps.start or None)
        end = train(model, optimizer, steps)
        optimizer.close()
    assert all_equal(end, plain_end)


def test_parameters_without_names_are_found_by_order(tmp_path: Path) -> None:
    def run(directory: Path | None, steps: range) -> list[torch.Tensor]:
        torch.manual_seed(1)
        weights = [nn.Parameter(torch.randn(n, dtype=torch.bfloat16)) for n in (70, 1, 33, 0)]
        optimizer = AdamW(weights, **_on_disk(directory))
        assert directory is None or optimizer.resume() == (steps.start or None)
        for step in steps:
            noise = torch.Generator().manual_seed(step)
            for weight in weights:
                weight.grad = torch.randn(len(weight), generator=noise).bfloat16()
            optimizer.step()
        return [*weights, *_states_of(optimizer)]

    run(tmp_path, range(4))
    end = run(tmp_path, range(4, 9))
    assert all_equal(end, run(None, range(9)))


def _on_disk(directory: Path | None) -> dict[str, Any]:
    return {"states": "disk", "dir": directory, "commit_every": 1} if directory else {}


def _states_of(optimizer: AdamW) -> list[torch.Tensor]:
    saved = optimizer.state_dict()["state"]
    return [tensor for entry in saved.values() for tensor in entry.values()]


def test_a_schedule_in_closed_form_needs_nothing_but_the_step(tmp_path: Path) -> None:
    def run(directory: Path | None, stop: int) -> tuple[list[float], list[torch.Tensor]]:
        weight = nn.Parameter(torch.linspace(-1, 1, 50))
        optimizer = AdamW([weight], lr=1e-2, **_on_disk(directory))
        start = (directory and optimizer.resume()) or 0
        schedule = LambdaLR(optimizer, lambda step: 0.9**step, last_epoch=start - 1)
        rates = []
        for step in range(start, stop):
            weight.grad = torch.cos(weight.detach() * step)
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return rates, [weight.detach(), *_states_of(optimizer)]

    rates, end = run(None, 9)
    assert run(tmp_path, 4)[0] == rates[:4]
    again, resumed_end = run(tmp_path, 9)
    assert again == rates[4:]
    assert all_equal(resumed_end, end)


@pytest.mark.parametrize("stop", range(1, 8))
def test_the_guides_recipe_for_a_schedule_that_goes_on_from_its_last_rate(
    stop: int, tmp_path: Path
) -> None:
    """It is resumed from commits made inside step(), and from those by hand behind both."""

    def run(directory: Path | None, end: int, *, by_hand: bool) -> list[torch.Tensor]:
        weight = nn.Parameter(torch.linspace(-1, 1, 50))
        given = _on_disk(directory)
        extra = {"extra": lambda: {"scheduler": scheduler.state_dict()}} if given else {}
        optimizer = AdamW([weight], lr=1e-2, **{**given, **extra})
        scheduler = CosineAnnealingLR(optimizer, T_max=5)
        start = optimizer.resume() if directory else None
        if start is not None:
            scheduler.load_state_dict(optimizer.extra["scheduler"])
            if scheduler.last_epoch < start:
                scheduler.step()
        for step in range(start or 0, end):
            weight.grad = torch.cos(weight.detach() * step)
            optimizer.step()
            scheduler.step()
        if by_hand:
            optimizer.commit()
        rate = torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64)
        facts = [weight.detach(), rate, *_states_of(optimizer)]
        optimizer.close()
        return facts

    want = run(None, 9, by_hand=False)
    for by_hand in (False, True):
        directory = tmp_path / str(by_hand)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler")
            run(directory, stop, by_hand=by_hand)
            ours = run(directory, 9, by_hand=False)
        assert all_equal(ours, want)


@pytest.mark.parametrize("stop", range(1, 8))
def test_the_guides_recipe_for_a_scaler(stop: int, tmp_path: Path) -> None:
    def run(directory: Path | None, end: int) -> list[Any]:
        weight = nn.Parameter(torch.linspace(-1, 1, 50))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        kept: dict[str, Any] = {}
        if directory is not None:
            kept = {**_on_disk(directory), "commit_every": None}
            kept["extra"] = lambda: {"of": [scaler.state_dict(), scheduler.state_dict()]}
        optimizer = AdamW([weight], lr=1e-2, **kept)
        scheduler = CosineAnnealingLR(optimizer, T_max=5)
        start = optimizer.resume() if directory else None
        if start is not None:
            scaler.load_state_dict(optimizer.extra["of"][0])
            scheduler.load_state_dict(optimizer.extra["of"][1])
        for step in range(start or 0, end):
            optimizer.zero_grad()
            loss = (weight * torch.cos(weight.detach() * step)).sum()
            scaler.scale(loss * (torch.inf if step == 4 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            if directory is not None:
                optimizer.commit()
        facts = [scaler.state_dict(), scheduler.state_dict(), weight, _states_of(optimizer)]
        optimizer.close()
        return facts

    want = run(None, 9)
    assert want[0]["scale"] != 8.0
    run(tmp_path, stop)
    assert digest(run(tmp_path, 9)) == digest(want)


def test_an_older_snapshot_becomes_the_run(tmp_path: Path) -> None:
    case = Case(commit_every=1, state_format="split")
    world = World(case, tmp_path)
    world.train(4)
    world.optimizer.snapshot("four")
    world.train(9)
    assert world.resume("four") == 4
    assert wrong_with(world) == []
    world.optimizer.snapshot("again")  # of the run as it is now, not of the run abandoned
    world.train(6)
    world.close()
    world = World(case, tmp_path)
    assert world.resume("again") == 4
    assert wrong_with(world) == []
    assert world.resume() == 6
    assert wrong_with(world) == []
    world.train(END)
    assert wrong_with(world) == []
    world.close()


def test_a_run_that_dies_behind_a_snapshot_has_lost_nothing(tmp_path: Path) -> None:
    world = World(Case(commit_every=1), tmp_path)
    world.train(3)
    world.optimizer.snapshot("three")
    world.train(8)
    assert world.resume("three") == 3
    world.close()
    world = World(Case(commit_every=1), tmp_path)
    assert world.resume() == 8
    world.close()


def test_resuming_twice_is_resuming_once(tmp_path: Path) -> None:
    world = World(Case(commit_every=1, state_format="split"), tmp_path)
    world.train(5)
    held = _held_bytes(world)
    for _ in range(3):
        assert world.resume() == 5
        assert wrong_with(world) == []
        world.train(6)
        assert world.resume() == 6
        world.optimizer.snapshot("six")
        assert world.resume("six") == 6
        world.train(9)
        world.optimizer.drop("six")
        world.close()
        for file in tmp_path.glob("*"):
            file.unlink()
        world = World(Case(commit_every=1, state_format="split"), tmp_path)
        world.train(5)
    world.train(END)
    assert wrong_with(world) == []
    assert _held_bytes(world) == held
    world.close()


def test_what_was_resumed_leaves_no_room_behind(tmp_path: Path) -> None:
    world = World(Case(commit_every=1), tmp_path)
    world.train(5)
    held = _held_bytes(world)
    for _ in range(4):
        world.resume()
        world.train(world.step + 1)
        assert _held_bytes(world) == held
    world.close()


def _held_bytes(world: World) -> int:
    """Return the bytes that the data files have and nobody can be given."""
    world.optimizer.synchronize()
    extents = world.optimizer._states().storage.store._space.extents
    return sum(extents.sizes) - sum(free.nbytes for free in extents.free)


def test_resuming_an_empty_start_forgets_the_steps_since(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.linspace(-1, 1, 50))
    optimizer = AdamW([weight], states="disk", dir=tmp_path, commit_every=None)
    assert optimizer.resume() is None
    optimizer.commit()
    ends = []
    for _ in range(2):
        for _ in range(3):
            weight.grad = torch.cos(weight.detach())
            optimizer.step()
        ends.append([weight.detach().clone(), *_states_of(optimizer)])
        assert optimizer.resume() == 0
        assert _states_of(optimizer) == []
    assert all_equal(*ends)
    optimizer.close()


def test_who_has_copies_of_weights_hears_before_they_change_and_behind_that(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = AdamW([weight], states="disk", dir=tmp_path)
    heard: list[float] = []
    optimizer._register_rewrite_hook(lambda _: heard.append(weight.detach()[0].item()))
    assert optimizer.resume() is None
    optimizer.commit()
    with torch.no_grad():
        weight.fill_(3)
    assert optimizer.resume() == 0
    assert heard == [1, 3, 1]
    optimizer.close()
