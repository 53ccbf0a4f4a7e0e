"""How much of the source one call runs through: what a reader has to open to follow it."""

import ast
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tensorstow
from cpp_source import cpp_methods
from handed import Parallel, modules_handed_a_gradient
from tensorstow import Plan
from tensorstow.fsdp.stow import stow
from tensorstow.optim.stowed_adam import StowedAdam
from tree import ROOT

SOURCE = Path(tensorstow.__file__).parent
MOST_OF_FSDP = 13
MOST_OF_STOW = 96


def modules_run(act: Callable[[], object], below: str = "") -> set[str]:
    """Return the modules below a folder of the source whose functions run in ``act``.

    Functions of other threads do not count.
    """
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    folder = SOURCE / below
    own = [Path(file) for file in files if Path(file).is_relative_to(folder)]
    return {str(file.relative_to(folder).with_suffix("")) for file in own}


@pytest.mark.parametrize("loads", [False, True])
def test_stow_runs_through_few_modules(loads: bool, tmp_path: Path) -> None:  # noqa: FBT001
    """With weights on disk, which takes everything that is sharded on the CPU."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    given: dict[str, Any] = {
        "plan": Plan(parameters="disk", states="disk"),
        "dir": tmp_path / "run",
    }
    if loads:
        save_file(model.state_dict(), tmp_path / "weights.safetensors")
        model.to("meta")
        given["weights"] = tmp_path / "weights.safetensors"
    make = partial(tensorstow.AdamW, lr=1e-3, durability="none")
    made: list[tensorstow.AdamW] = []
    ran = modules_run(lambda: made.append(stow(model, make, **given)[1]), "fsdp")
    made[0].close()
    assert {"stow", "sharding", "shard_storage"} <= ran
    assert len(ran) <= MOST_OF_FSDP, sorted(ran)


LONGEST = Plan(
    parameters="disk", states="disk", overlap="backward", micro_batches=2, activations="disk"
)


def test_the_longest_stow_runs_through_no_more_modules(tmp_path: Path) -> None:
    """It builds all that training uses: the store, the optimizer, its feeds and their files."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    make = partial(tensorstow.AdamW, lr=1e-3, durability="none")
    made: list[tensorstow.AdamW] = []
    ran = modules_run(lambda: made.append(stow(model, make, plan=LONGEST, dir=tmp_path / "run")[1]))
    made[0].close()
    assert {"fsdp/stow", "fsdp/vertical_order", "activations/pool", "states/state_store"} <= ran
    assert len(ran) <= MOST_OF_STOW, sorted(ran)


@pytest.mark.parametrize(
    ("overlap", "durability", "most"),
    [
        ("none", "none", 18),
        ("none", "commit", 32),
        ("forward", "none", 26),
        ("backward", "none", 22),
    ],
)
def test_a_step_with_states_on_disk_runs_through_few_modules(
    overlap: str, durability: str, most: int, tmp_path: Path
) -> None:
    """After the first: that one creates the states."""
    model = nn.Linear(4, 4)
    optimizer = tensorstow.AdamW(
        model.named_parameters(),
        lr=1e-3,
        states="disk",
        overlap=overlap,
        module=model,
        durability=durability,
        dir=tmp_path / "run",
    )
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        ran = modules_run(optimizer.step)
        optimizer.zero_grad()
    optimizer.close()
    module_of_rows = (
        "repeated_steps" if (overlap, durability) == ("none", "none") else "managed_param"
    )
    assert {"optim/placed", f"step/{module_of_rows}"} <= ran
    assert len(ran) <= most, sorted(ran)


# --- the way of a gradient ---

IN_HOST_MEMORY = [
    (Plan(parameters="host", states="disk"), 5),
    (
        Plan(parameters="host", states="disk", overlap="backward"),
        7,
    ),  # what is left waits as in forward, and so does what changes the gradient
    (Plan(parameters="disk", states="disk"), 7),
    (Plan(parameters="disk", states="disk", overlap="backward"), 7),
]
"""Plans, and how many modules a gradient is handed to at most; tests/gpu has those of a device."""


@pytest.mark.parametrize(("plan", "most"), IN_HOST_MEMORY, ids=str)
def test_a_gradient_crosses_few_modules(plan: Plan, most: int, tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, StowedAdam]:
        return stow(Parallel(), partial(tensorstow.AdamW, lr=1e-3), plan=plan, dir=tmp_path)

    crossed = modules_handed_a_gradient(make)
    assert {"states/native_pipeline"} <= crossed
    assert len(crossed) <= most, sorted(crossed)


# --- classes ---

MOST_METHODS = 20
OTHERS_INTERFACES = {
    "StowedAdam": "torch.optim.Optimizer's, and commits; OptimizerRuntime does the work",
    "PlacedOptimizer": "torch.optim.Optimizer's; its subclasses do the work",
    "StowedOptimizer": "torch.optim.Optimizer's; StateManager does the work",
    "DeepSpeedEngine": "DeepSpeed's",
    "OptimizerWrapper": "ColossalAI's",
}
"""Classes whose methods are another project's interface."""


def methods() -> dict[str, int]:
    """Return how many methods each class of the source defines; overloads are one."""
    return {
        node.name: len({part.name for part in node.body if isinstance(part, ast.FunctionDef)})
        for file in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    }


def test_classes_are_narrow() -> None:
    found = methods()
    own = {name: count for name, count in found.items() if name not in OTHERS_INTERFACES}
    assert not {n: c for n, c in own.items() if c > MOST_METHODS}
    assert OTHERS_INTERFACES.keys() <= found.keys()


NATIVE = sorted(path for kind in ("*.h", "*.cpp") for path in (ROOT / "csrc").rglob(kind))
MOST_NATIVE_METHODS = 25


def test_native_classes_are_narrow() -> None:
    found = {
        f"{path.name}: {name}": len(methods)
        for path in NATIVE
        for name, methods in cpp_methods(path.read_text()).items()
    }
    assert {"pipeline.h: Pipeline", "engine.h: Engine", "pool.h: Pool"} <= found.keys()
    assert not {n: c for n, c in found.items() if c > MOST_NATIVE_METHODS}


@pytest.mark.parametrize(
    ("source", "methods"),
    [
        ("class A { int b(); int b(int) const; A(int n) : n_(n), m_{f(n)} {} ~A(); };", "b A ~A"),
        ("struct A final : B { C c = d(); C* e{f()}; void (*g)(int); };", ""),
        ("class A { public: std::function<void(int)> b; std::vector<C<int>> d() const; };", "d"),
        ("class A { A(const A&) = delete; bool operator==(A) const = default; };", "operator=="),
        (
            "class A { virtual void b() = 0; template <class T> void c(T t) { if (t) d(); } };",
            "b c",
        ),
        ("struct A { struct B { void c(); }; alignas(64) int d; friend void e(A); };", ""),
        (
            'class A { // void b();\n const char* c() { return "}"; } void operator()(int); };',
            "c operator()",
        ),
    ],
)
def test_native_methods_are_counted(source: str, methods: str) -> None:
    assert cpp_methods(source)["A"] == set(methods.split())
