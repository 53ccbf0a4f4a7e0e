"""Weights whose memory comes and goes, as those on disk, without a sharded model."""

from typing import Any

import pytest
import torch

from tensorstow.step import param_table
from tensorstow.tensors import dtensor


def let_attributes_be_pagers(patch: pytest.MonkeyPatch) -> None:
    """Let the attribute ``pager`` of a plain tensor be its pager, where it has one."""

    def pager_of(parameter: torch.Tensor) -> Any:  # noqa: ANN401
        return getattr(parameter, "pager", None)

    for module in (dtensor, param_table):
        patch.setattr(module, "pager_of", pager_of)
