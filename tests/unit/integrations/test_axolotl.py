"""axolotl's plugin in its own plugin manager and schema, with a Trainer of transformers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

import trainers
from tensorstow.base.errors import OptionError

PLAIN: dict[str, Any] = {
    "base_model": "tiny",
    "datasets": [{"path": "rows", "type": "alpaca"}],
    "gradient_accumulation_steps": 1,
    "learning_rate": trainers.LEARNING_RATE,
    "micro_batch_size": trainers.BATCH,
    "num_epochs": 1,
}


@pytest.fixture(scope="module")
def axolotl() -> Any:  # noqa: ANN401
    """Return its plugins and its schema, with ours registered as the guide says."""
    pytest.importorskip("axolotl", reason="set-up could not install it")
    from axolotl.integrations.base import PluginManager  # noqa: PLC0415  # seconds
    from axolotl.integrations.config import merge_input_args  # noqa: PLC0415

    plugins = PluginManager.get_instance()
    (name,) = trainers.yaml_of_guide("axolotl", Path("/nvme"))["plugins"]
    plugins.register(name)
    assert list(plugins.plugins) == [name]  # an error of its import is only printed
    return SimpleNamespace(plugins=plugins, schema=merge_input_args()[1])


def trainer(place: Path, **given: Any) -> transformers.Trainer:  # noqa: ANN401
    args = trainers.arguments(place, **given)
    return transformers.Trainer(trainers.model(), args, train_dataset=trainers.examples(3))


def test_a_trainer_of_its_own_configuration(axolotl: Any, tmp_path: Path) -> None:  # noqa: ANN401
    found = trainers.yaml_of_guide("axolotl", tmp_path)
    cfg = axolotl.schema(**PLAIN, **found).model_dump()
    made = trainer(tmp_path)
    axolotl.plugins.post_trainer_create(cfg, made)
    made.train()
    optimizer: Any = made.optimizer.optimizer
    assert optimizer.placement_of_states == "disk"
    assert (tmp_path / "run").is_dir()
    optimizer.commit()
    assert trainers.bits(made.model) == trainers.plain_loop(trainers.windows(3, 1))
    optimizer.close()


def test_its_key_is_asked_for(axolotl: Any) -> None:  # noqa: ANN401
    with pytest.raises(ValueError, match=r"tensorstow\s+Field required"):
        axolotl.schema(**PLAIN)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optim", "adafactor", "optimizer: adafactor"),
        ("lr_groups", [{"name": "a", "modules": ["b"], "lr": 1.0}], "lr_groups was given"),
    ],
)
def test_keys_that_would_be_ignored_are_refused(
    axolotl: Any,  # noqa: ANN401
    key: str,
    value: object,
    message: str,
    tmp_path: Path,
) -> None:
    made = trainer(tmp_path)
    setattr(made.args, key, value)
    with pytest.raises(OptionError, match=message):
        axolotl.plugins.post_trainer_create({"tensorstow": {}}, made)


def test_an_optimizer_that_axolotl_made_is_not_replaced(axolotl: Any, tmp_path: Path) -> None:  # noqa: ANN401
    made = trainer(tmp_path)
    made.optimizer_cls_and_kwargs = (object, {})
    with pytest.raises(OptionError, match="optimizer: muon"):
        axolotl.plugins.post_trainer_create({"tensorstow": {}, "optimizer": "muon"}, made)
