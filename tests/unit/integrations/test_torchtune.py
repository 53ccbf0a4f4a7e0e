"""torchtune's configuration of an optimizer, which needs no module of ours."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import trainers
from tensorstow import AdamW


def test_the_configuration_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torchtune's own ``instantiate``; the package's first module would import torchao."""
    found = importlib.util.find_spec("torchtune")
    if found is None:
        pytest.skip("set-up could not install torchtune")
    package = ModuleType("torchtune")
    package.__path__ = list(found.submodule_search_locations or ())
    monkeypatch.setitem(sys.modules, "torchtune", package)
    from omegaconf import OmegaConf  # noqa: PLC0415
    from torchtune.config import instantiate  # noqa: PLC0415

    config = OmegaConf.create(trainers.yaml_of_guide("torchtune", tmp_path))
    weight = torch.nn.Parameter(torch.ones(3))
    made = instantiate(config.optimizer, [weight])
    assert type(made) is AdamW
    assert (made.placement_of_states, made.param_groups[0]["lr"]) == ("disk", 1e-4)
    made.close()
    for name in [name for name in sys.modules if name.startswith("torchtune.")]:
        monkeypatch.delitem(sys.modules, name)
