"""The parity matrix with parameters on an accelerator, all and some: the anchor's bits."""

from pathlib import Path

import pytest
import torch

from parity.anchor import anchor
from parity.axes import AXES, Case, allowed, case_of
from parity.candidate import run
from parity.cover import Row, all_pairs, feasible_pairs
from parity.problem import differences

# Those of other projects update what is on the device by torch's rule.
ON_DEVICE = {
    **AXES,
    "optimizer": ("AdamW", "Adam"),
    "scaling": ("none", "GradScaler"),
    "on_device": ("all", "some"),
    "update_on": ("host", "device", 0.4, "hybrid", "auto"),
}


def allowed_on_device(row: Row) -> bool:
    """Return whether a (partial) row can be asked for on an accelerator."""
    by_device = row.get("update_on", "host") != "host"
    both = row.get("on_device") == "some"
    looks = row.get("clipping", "none") != "none" or row.get("scaling", "none") != "none"
    return allowed(row) and not (
        (by_device and (both or row.get("overlap") in {"forward", "speculative"}))
        # So weights that nobody may read early are updated beside backward, which cannot look.
        or (by_device and row.get("nan_until_published") is True and looks)
        # torch's scaler does not wait for what it copies between them: refused by name.
        or (both and row.get("scaling") == "GradScaler")
    )


PAIRWISE = [case_of(row) for row in all_pairs(ON_DEVICE, allowed_on_device)]
TRIPLES = [
    case_of({"overlap": overlap, "on_device": part, "dtype": dtype})
    for overlap in AXES["overlap"]
    for part in ON_DEVICE["on_device"]
    for dtype in ("fp32", "mixed")
]
CASES = {str(case): case for case in (*PAIRWISE, *TRIPLES)}


def unscales(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether ``torch.amp.GradScaler`` takes gradients of ``dtype``; CUDA's does not all."""
    weight = torch.nn.Parameter(torch.ones(4, dtype=dtype, device=device))
    scaler = torch.amp.GradScaler(device.type)
    scaler.scale(weight.sum()).backward()
    try:
        scaler.unscale_(torch.optim.SGD([weight]))
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_any_way_of_training_gives_the_anchor(
    case: Case, tmp_path: Path, device: torch.device
) -> None:
    """The anchor's gradients are made on the device too; all else of it is on the host."""
    try:
        found = run(case, tmp_path)
    except NotImplementedError:
        if case.recipe.scaling != "GradScaler" or unscales(torch.bfloat16, device):
            raise
        return  # nothing to compare: torch's own scaler has raised
    assert differences(found, anchor(case.recipe)) == []


def test_the_matrix_is_as_large_as_it_says() -> None:
    # A change of these numbers is a change of what is proved: make it on purpose.
    assert len(feasible_pairs(ON_DEVICE, allowed_on_device)) == 2729
    assert len(PAIRWISE) == 62
