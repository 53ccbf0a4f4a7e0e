"""Meshes that a plan contradicts, or that FSDP2 cannot use: told before anything is placed."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tensorstow import Plan
from tensorstow.base.errors import OptionError
from tensorstow.fsdp.validation import check_asked, check_mesh

CPU = torch.device("cpu")


@dataclass
class Mesh:
    """As much of a mesh as is looked at."""

    shape: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None = None
    device_type: str = "cpu"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self) -> int:
        return torch.Size(self.shape).numel()


NAMES = ("replicate", "shard")


@pytest.mark.parametrize(
    ("mesh", "plan", "said"),
    [
        (Mesh((2, 2)), Plan(), r"shape \(2, 2\) with the names None"),
        (Mesh((2, 2, 2), ("a", "b", "c")), Plan(), "one row of ranks, or"),
        (Mesh((4,), device_type="cuda"), Plan(), "mesh of 'cuda'.*computes on cpu"),
        (Mesh((4,)), Plan(stage=0), r"cuts parameters in 4.*shape \(4, 1\)"),
        (Mesh((2, 2), NAMES), Plan(stage=0), "cuts parameters in 2"),
        (Mesh((2, 2), NAMES), Plan(replicas=4), "replicas=4 was given with a mesh of 2"),
        (Mesh((4,)), Plan(replicas=2), "replicas=2 was given with a mesh of 1"),
    ],
    ids=str,
)
def test_a_mesh_that_does_not_fit_is_refused(mesh: Mesh, plan: Plan, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        check_mesh(mesh, plan, CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mesh", "plan"),
    [
        (Mesh((4,)), Plan()),
        (Mesh((4,), ("ranks",)), Plan(stage=1)),
        (Mesh((2, 2), NAMES), Plan()),
        (Mesh((2, 2), NAMES), Plan(replicas=2, stage=2)),
        (Mesh((4, 1), NAMES), Plan(stage=0)),
    ],
    ids=str,
)
def test_a_mesh_that_fits_is_taken(mesh: Mesh, plan: Plan) -> None:
    check_mesh(mesh, plan, CPU)  # type: ignore[arg-type]


def test_what_is_right_is_taken() -> None:
    for dtype in (None, torch.float32, torch.bfloat16, torch.float16):
        check_asked(nn.Linear(1, 1), list, "auto", dtype, None)
        check_asked(nn.Linear(1, 1), list, Plan(), dtype, None)
