"""torchtune's recipe for one device, with the guide's configuration: it needs no module of ours."""

import importlib.util
import sys
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import trainers
from tensorstow import AdamW
from tensorstow.base.errors import OptionError

# torchdata calls a function of torch that is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")

_NOT_INSTALLED = {"torchao", "sentencepiece", "tiktoken"}
"""What torchtune imports for quantization and for tokenizers, which no test uses."""


class _Unused(MetaPathFinder, Loader):
    """Makes modules in which each name is an empty class or a decorator that changes nothing."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return (
            ModuleSpec(name, self, is_package=True)
            if name.split(".", maxsplit=1)[0] in _NOT_INSTALLED
            else None
        )

    def exec_module(self, module: ModuleType) -> None:
        def attribute(name: str) -> object:
            if name.startswith("__"):
                raise AttributeError(name)
            return (
                (lambda *_: lambda function: function) if name[0].islower() else type(name, (), {})
            )

        vars(module)["__getattr__"] = attribute


class Checkpointer:
    """Has a model's first weights, and keeps the last ones."""

    saved: dict[str, torch.Tensor]

    def __init__(self, *, should_load_recipe_state: bool, model_type: str) -> None:
        assert (should_load_recipe_state, model_type) == (False, "LLAMA2")

    def load_checkpoint(self) -> dict[str, Any]:
        torch.manual_seed(0)
        return {"model": _model().state_dict()}

    def save_checkpoint(self, state_dict: dict[str, Any], **_: object) -> None:
        Checkpointer.saved = {k: v.clone() for k, v in state_dict["model"].items()}


class Tokenizer:
    pad_id = 0


def _model() -> torch.nn.Module:
    from torchtune.models.llama2 import llama2  # noqa: PLC0415  # seconds

    sizes = {"vocab_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "embed_dim": 8}
    made: torch.nn.Module = llama2(**sizes, max_seq_len=8)
    return made


def _rows(_: Tokenizer) -> list[dict[str, list[int]]]:
    """Return rows with different numbers of labels, so that the scale of gradients matters."""
    words = torch.randint(1, 16, (8, 7), generator=torch.Generator().manual_seed(1)).tolist()
    counts = [3 + i % 4 for i in range(8)]
    return [
        {"tokens": row, "labels": row[:count] + [-100] * (7 - count)}
        for row, count in zip(words, counts, strict=True)
    ]


@pytest.fixture(scope="module")
def recipe() -> Iterator[ModuleType]:
    """The recipe's file: it is in no package."""
    package = importlib.util.find_spec("torchtune")
    if package is None or package.origin is None:
        pytest.skip("set-up could not install torchtune")
    import datasets  # noqa: F401, PLC0415  # looks for installed packages at its import

    before = set(sys.modules)
    unused = _Unused()
    sys.meta_path.append(unused)
    path = Path(package.origin).parents[1] / "recipes/full_finetune_single_device.py"
    spec = importlib.util.spec_from_file_location("recipe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.meta_path.remove(unused)
    for name in set(sys.modules) - before:
        if name.split(".")[0] in {"torchtune", *_NOT_INSTALLED}:
            del sys.modules[name]


def train(recipe: ModuleType, place: Path, optimizer: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Run the recipe's two steps of two micro-batches, clipped, and return the weights."""
    from omegaconf import OmegaConf  # noqa: PLC0415

    here = __name__
    config = {
        "device": "cpu",
        "dtype": "fp32",
        "seed": 0,
        "epochs": 1,
        "max_steps_per_epoch": None,
        "output_dir": str(place),
        "resume_from_checkpoint": False,
        "compile": False,
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "clip_grad_norm": 0.1,
        "optimizer_in_bwd": False,
        "shuffle": False,
        "model": {"_component_": f"{here}._model"},
        "checkpointer": {"_component_": f"{here}.Checkpointer", "model_type": "LLAMA2"},
        "tokenizer": {"_component_": f"{here}.Tokenizer"},
        "dataset": {"_component_": f"{here}._rows"},
        "loss": {"_component_": "torch.nn.CrossEntropyLoss"},
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": str(place),
        },
        "optimizer": optimizer,
    }
    made = recipe.FullFinetuneRecipeSingleDevice(cfg=OmegaConf.create(config))
    made.setup(cfg=OmegaConf.create(config))
    made.train()
    made.cleanup()
    if isinstance(made._optimizer, AdamW):
        assert made._optimizer.placement_of_states == optimizer.get("states", "host")
        made._optimizer.close()
    assert made.global_step == 2
    return Checkpointer.saved


def test_the_configuration_of_the_guide_accumulates_and_clips(
    recipe: ModuleType, tmp_path: Path
) -> None:
    optimizer = trainers.yaml_of_guide("torchtune", tmp_path)["optimizer"]
    assert optimizer["states"] == "disk"
    found = train(recipe, tmp_path, optimizer)
    in_memory = train(recipe, tmp_path, {"_component_": "tensorstow.AdamW", "lr": 1e-4})
    of_torch = train(recipe, tmp_path, {"_component_": "torch.optim.AdamW", "lr": 1e-4})
    for name, weight in found.items():
        assert torch.equal(weight, in_memory[name])
        torch.testing.assert_close(weight, of_torch[name], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap": "backward"}, "gradient that its update has used already"),
        ({"overlap": "backward", "accumulation_steps": 2}, 'needs overlap="none"'),
        ({"overlap": "forward"}, "without module="),
    ],
)
def test_an_overlap_raises_an_error(
    recipe: ModuleType, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    """The recipe divides gradients by the step's words after backward, also without clipping."""
    optimizer = trainers.yaml_of_guide("torchtune", tmp_path)["optimizer"]
    with pytest.raises(OptionError, match=message):
        train(recipe, tmp_path, {**optimizer, **options})
