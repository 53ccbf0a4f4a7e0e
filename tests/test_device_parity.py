"""Parameters on an accelerator give the bits of the anchor, as those on the CPU do.

DEVICE is the CPU here, over a link whose copies are as late as they may be; tests/gpu has the rest.
"""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from parity.anchor import anchor
from parity.axes import AXES, Case, allowed, case_of
from parity.candidate import run
from parity.cover import Value, all_pairs
from parity.problem import differences
from remote import LateLink, every, make_remote
from tensorstow.optim.accelerator.device import PlainLink

# Those of other projects keep to the CPU.
OURS = {**AXES, "optimizer": ("AdamW", "Adam"), "scaling": ("none", "GradScaler")}
PAIRWISE = [case_of(row) for row in all_pairs(OURS, allowed)]
PRODUCTS = (
    ("overlap", "dtype", "format", "poison"),
    ("overlap", "dtype", "grad_dtype"),
    ("overlap", "accumulation", "clipping", "scaling"),
    ("overlap", "final", "accumulation", "ring", "schedule"),
    ("overlap", "durability", "resume"),
    ("chunk", "placement", "overlap"),
)


def product(*names: str) -> list[Case]:
    rows: list[dict[str, Value]] = [
        {"optimizer": "AdamW", **dict(zip(names, values, strict=True))}
        for values in itertools.product(*(OURS[name] for name in names))
    ]
    cases = [case_of(row) for row in rows]
    return [case for case in cases if allowed(case.row())]


def some(parameter: torch.Tensor) -> bool:
    """Leave the blocks' matrices on the CPU; chunks hold parameters of both then."""
    return parameter.numel() not in {48 * 48, 48 * 96}


CASES = {
    str(case): case for case in (*PAIRWISE, *(c for names in PRODUCTS for c in product(*names)))
}


@pytest.mark.parametrize("is_remote", [every, some])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_any_route_gives_the_anchor(
    case: Case,
    is_remote: Callable[[torch.Tensor], bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = make_remote(monkeypatch, is_remote)
    assert differences(run(case, tmp_path), anchor(case.recipe)) == []
    assert any(isinstance(link, LateLink) and link.copies_up for link in opened)


AT_ONCE = {"overlap": ("none",), "poison": (False,), "final": ("counted",)}
ON_DEVICE = [
    case_of(row)
    for row in all_pairs(
        {**OURS, **AT_ONCE, "update_on": ("device", 0.4, "hybrid", "auto")}, allowed
    )
]


@pytest.mark.parametrize("case", ON_DEVICE, ids=map(str, ON_DEVICE))
def test_updates_on_the_device_give_the_anchor(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule in torch operations, its states through a link that is late: the kernels' bits."""
    opened = make_remote(monkeypatch)
    assert differences(run(case, tmp_path), anchor(case.recipe)) == []
    assert any(
        isinstance(link, LateLink) and link.bytes_up > link.bytes_down / 4 for link in opened
    )


@pytest.mark.parametrize("overlap", OURS["overlap"])
def test_a_link_that_is_never_late_gives_the_anchor(
    overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_remote(monkeypatch, link=PlainLink)
    case = case_of({"overlap": overlap, "dtype": "bf16"})
    assert differences(run(case, tmp_path), anchor(case.recipe)) == []
