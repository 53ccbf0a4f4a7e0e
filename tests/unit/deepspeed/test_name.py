"""``import deepspeed`` of libraries that import it themselves."""

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import children
import tensorstow.deepspeed
from tensorstow.base.errors import AbsentAttributeError, AbsentError, OptionError


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for late in ("accelerate", "transformers.integrations.deepspeed", "lightning.fabric"):
        monkeypatch.delitem(sys.modules, late, raising=False)
    tensorstow.deepspeed.take_name()
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]


@pytest.mark.usefixtures("named")
def test_modules_are_this_packages_own() -> None:
    tensorstow.deepspeed.take_name()  # a second time changes nothing
    assert importlib.import_module("deepspeed") is tensorstow.deepspeed
    deeper = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    assert deeper.__name__ == "tensorstow.deepspeed.runtime.zero.partition_parameters"
    assert deeper.__spec__.name == deeper.__name__
    assert importlib.util.find_spec("deepspeed") is not None
    assert importlib.util.find_spec("deepspeed.no_such") is None
    for name in ("no_such", "nebula", "runtime.hybrid_engine"):
        with pytest.raises(AbsentError, match=rf"{name} .*(is|are) not here: "):
            importlib.import_module(f"deepspeed.{name}")
    with pytest.raises(AbsentError, match="sections tensorboard"):
        exec("from deepspeed.monitor.monitor import MonitorMaster")  # noqa: S102
    with pytest.raises(AbsentAttributeError, match="stow"):
        importlib.import_module("deepspeed").init_inference  # noqa: B018
    assert not hasattr(importlib.import_module("deepspeed"), "init_inference")


@pytest.mark.usefixtures("named")
def test_libraries_find_the_version() -> None:
    assert importlib.metadata.version("deepspeed") == tensorstow.deepspeed.__version__
    assert "torch" in {d.name for d in importlib.metadata.distributions()}
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("no-such-package")


def test_what_has_looked_already_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", sys)
    before = list(sys.meta_path)
    with pytest.raises(OptionError, match="when accelerate"):
        tensorstow.deepspeed.take_name()
    assert sys.meta_path == before


IN_A_TRAINER = """
import tensorstow.deepspeed

tensorstow.deepspeed.take_name()
import sys
from pathlib import Path

import trainers
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

folder = Path(sys.argv[1])
trainers.model().save_pretrained(folder / "given")


def run(**resumed):
    config = {
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
    }
    args = {**trainers.OF_A_TRAINER, "save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    args = TrainingArguments(str(folder / "out"), deepspeed=config, **args)
    model = AutoModelForCausalLM.from_pretrained(folder / "given")  # inside of zero.Init
    model.loss_type = "ForCausalLM"
    trainer = Trainer(model, args, train_dataset=trainers.examples(3))
    trainer.train(**resumed)
    trainer.save_model(str(folder / "saved"))
    return trainers.bits(AutoModelForCausalLM.from_pretrained(folder / "saved"))


wanted = trainers.plain_loop(trainers.windows(3, 1), inside=True)
assert run() == wanted
assert run(resume_from_checkpoint=str(folder / "out" / "checkpoint-2")) == wanted
"""


def test_a_trainer_trains_saves_and_resumes_with_the_bits_of_a_plain_loop(tmp_path: Path) -> None:
    """Without a launcher: transformers asks for a process group, which it has of itself."""
    children.run("-c", IN_A_TRAINER, tmp_path)
