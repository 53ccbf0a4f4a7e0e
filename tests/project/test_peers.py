"""Optimizer classes of other packages, where they are installed: on disk the bits of RAM.

    pip install --no-deps schedulefree torch-optimi pytorch-optimizer bitsandbytes

The tests that always run are test_handing_on.py's, over classes that keep values in these ways.
"""

import importlib
import io
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tensorstow import StowedOptimizer
from tensorstow.optim.generic.known_classes import PER_PARAMETER
from tensorstow.optim.generic.shared_values import same, same_bits

WHERE = {"bitsandbytes": "bitsandbytes.optim"}
OPTIONS: dict[str, dict[str, Any]] = {
    "bitsandbytes.SGD": {"momentum": 0.9},
    "bitsandbytes.SGD32bit": {"momentum": 0.9},
    "bitsandbytes.SGD8bit": {"momentum": 0.9},
    "bitsandbytes.LARS": {"momentum": 0.9},
    "bitsandbytes.LARS32bit": {"momentum": 0.9},
    "bitsandbytes.LARS8bit": {"momentum": 0.9},
}
MUONS = {"AdaGO", "AdaMuon", "Muon", "NorMuon"}
SHAPES = ((160, 130), (64, 64), (70,), (9, 8, 3, 3), (130, 160), (5000,))
MATRICES = ((160, 130), (64, 64), (130, 160))


def groups(shapes: tuple[tuple[int, ...], ...], **of_all: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
    return [{"params": weights[::2], **of_all}, {"params": weights[1::2], "lr": 3e-3, **of_all}]


def compare(package: str, name: str, directory: Path) -> None:
    optimizer_class = getattr(importlib.import_module(WHERE.get(package, package)), name)
    options = {"lr": 1e-3, **OPTIONS.get(f"{package}.{name}", {})}
    shapes, of_all = (MATRICES, {"use_muon": True}) if name in MUONS else (SHAPES, {})
    mine, others = groups(shapes, **of_all), groups(shapes, **of_all)
    ours = StowedOptimizer(optimizer_class, mine, states="disk", dir=directory, **options)
    theirs = optimizer_class(others, **options)
    for group in theirs.param_groups:
        group.update({flag: False for flag in ("foreach", "fused") if flag in group})
    pairs = [
        (p, q)
        for a, b in zip(ours.param_groups, theirs.param_groups, strict=True)
        for p, q in zip(a["params"], b["params"], strict=True)
    ]
    modes = hasattr(theirs, "train")
    for optimizer in (ours, theirs) if modes else ():
        optimizer.train()
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        for p, q in pairs:
            p.grad = torch.randn(p.shape, generator=generator) * 10.0 ** (step - 3)
            q.grad = p.grad.clone()
        for optimizer in (ours, theirs):
            optimizer.step()
            if modes and step == 2:
                optimizer.eval()
                optimizer.train()
        assert all(same_bits(p, q) for p, q in pairs), step
    mine, others = ours.state_dict(), theirs.state_dict()
    for group in (*mine["param_groups"], *others["param_groups"]):
        group.update(foreach=False, fused=False)
    assert same(mine["param_groups"], others["param_groups"])
    if package != "bitsandbytes":  # whose state_dict wraps its states once more
        a, b = ({k: v for k, v in d["state"].items() if v != {}} for d in (mine, others))
        assert same(a, b)
    ours.close()


@pytest.mark.parametrize(
    ("package", "name"), [(p, name) for p, names in PER_PARAMETER.items() for name in sorted(names)]
)
def test_on_disk_as_in_ram(package: str, name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        pytest.importorskip(package)
        compare(package, name, tmp_path)
