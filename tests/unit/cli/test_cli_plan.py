"""`tensorstow plan`: a placement, its bytes beside the budget, what is short."""

import json
from functools import partial

import pytest
import torch
from torch import nn

import tensorstow
from tensorstow.cli.main import main

MODEL = f"{__name__}:build"


def build() -> nn.Module:
    """Return 20 blocks of 4 MiB, one of which is frozen."""
    blocks = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(20)))
    blocks[0].weight.requires_grad = False
    return blocks


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, object]:
    assert main(["plan", MODEL, "--json", *options]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_the_table_says_what_is_held(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", MODEL, "--device", "0", "--host", "1GiB", "--disk", "1GiB"]) == 0
    printed = capsys.readouterr().out
    assert (
        "20,971,520 parameters in float32, 1,048,576 frozen, 20 units of up to 4.0 MiB" in printed
    )
    assert "parameters on HOST, states on HOST" in printed
    for item in ("80.0 MiB", "76.0 MiB", "152.0 MiB", "308.0 MiB"):  # with gradients, states, all
        assert item in printed


def test_rejected_placements_say_what_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--host", "250MiB")
    assert found["plan"] == {"parameters": "host", "states": "disk"}
    tried = found["tried"]
    assert isinstance(tried, list)
    assert tried[0] == {
        "plan": {"parameters": "host", "states": "host"},
        "short": {"host": (308 - 250) << 20},
    }


def test_the_smallest_budget_that_is_named_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", MODEL, "--host", "1MiB", "--disk", "1MiB"]) == 2
    said = capsys.readouterr().err
    named = said.split("The smallest that fits: ")[1].split(";")[0].split()
    planned(capsys, *named)
    options = dict(zip(named[::2], named[1::2], strict=True))
    for short, least in options.items():
        less = {**options, short: str(int(least) - 1)}
        assert main(["plan", MODEL, *(word for pair in less.items() for word in pair)]) == 2
        capsys.readouterr()


def test_the_lines_that_are_printed_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--host", "250MiB")
    names: dict[str, object] = {"model": build()}
    code = found["code"]
    assert isinstance(code, list)
    exec("\n".join(code), names)  # noqa: S102  # it is what users copy
    optimizer = names["optimizer"]
    assert isinstance(optimizer, tensorstow.AdamW)
    optimizer.close()


@pytest.mark.parametrize("states", ["host", "disk"])
def test_a_real_run_holds_what_was_printed(states: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--host", "1GiB" if states == "host" else "250MiB")
    held = {item["what"]: item["bytes"] for item in found["held"]}  # type: ignore[attr-defined]
    model = build()
    plan = tensorstow.Plan(**found["plan"])  # type: ignore[arg-type]
    model, optimizer = tensorstow.stow(model, partial(tensorstow.AdamW, lr=1e-3), plan=plan)
    model(torch.randn(2, 1024)).square().mean().backward()
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    optimizer.step()
    memory = optimizer.memory()
    optimizer.close()
    assert plan.states == states
    assert held["parameters"] == sum(p.nbytes for p in model.parameters())
    assert held["gradients"] == gradients
    assert held["states"] == memory.ram_bytes + memory.file_bytes
    assert held.get("ring of states", 0) == memory.ring_bytes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--world-size", "0"], "at least 1"),
        (["--batch", "2"], "go together"),
        (["--batch", "2", "--seq", "8"], "inputs are not known"),
        (["--host", "12 parsecs"], "parsecs"),
    ],
)
def test_what_makes_no_sense_is_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", MODEL, *options]) == 2
    assert said in capsys.readouterr().err
