"""torchtitan's Trainer with our override: against a plain loop, and between checkpoints."""

import gc
import inspect
import json
import re
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from largest_tensor import LargestTensor
from ranks.pool import Ranks
from tensorstow import AdamW
from tensorstow.base.errors import OptionError
from tree import ROOT

Pool = Callable[[int], Ranks]
SAVES: dict[str, Any] = {}
"""Of a checkpoint in every second step."""
pytestmark = [
    # torchtitan's, of DTensors on the CPU and of schedules.
    pytest.mark.filterwarnings("ignore:DTensor random operators may not:UserWarning"),
    pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning"),
]


@pytest.fixture(scope="module")
def titan() -> Iterator[ModuleType]:
    """Load torchtitan in the one process that tests it, and hide it from the collector too."""
    pytest.importorskip("torchtitan", reason="set-up could not install it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's, in torch's compiler
        import titan as loaded  # noqa: PLC0415  # seconds

    gc.freeze()
    with loaded.on_the_cpu():
        yield loaded


def given(**where: Any) -> str:  # noqa: ANN401
    return f"={json.dumps({name: str(v) if name == 'dir' else v for name, v in where.items()})}"


def test_lines_of_the_guide_name_the_override(titan: Any) -> None:  # noqa: ANN401, ARG001
    page = (ROOT / "docs/guides/trainers.md").read_text("utf-8")
    found = re.findall(r"--override\.imports '(\S+?)=(\{.*?\})'", page)
    assert found
    for name, options in found:
        module, _, function = name.rpartition(".")
        assert callable(getattr(import_module(module), function))
        assert json.loads(options).keys() <= inspect.signature(AdamW).parameters.keys()


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_weights_are_those_of_the_plain_loop(titan: Any, overlap: str, tmp_path: Path) -> None:  # noqa: ANN401
    """Clipping changes weights as it does there."""
    override = given(states="disk", overlap=overlap)
    made = titan.trainer(tmp_path, override, max_norm=0.1)
    assert made.optimizers.optimizers[0].placement_of_states == "disk"
    plain = titan.by_hand(tmp_path, clip=0.1)
    assert titan.train(made) == plain != titan.by_hand(tmp_path)


def test_a_run_goes_on_from_a_reference(titan: Any, tmp_path: Path) -> None:  # noqa: ANN401
    """A checkpoint has no states; the one that a kill left behind without metadata is not read."""
    override = given(states="disk", dir=tmp_path / "run")
    first = titan.train(titan.trainer(tmp_path, override, checkpoint=SAVES))
    complete = tmp_path / "checkpoint" / "step-2"
    saved = FileSystemReader(complete).read_metadata().state_dict_metadata
    assert [key for key in saved if key.startswith("optimizer")] == ["optimizer.ticket.0"]
    (tmp_path / "checkpoint" / "step-4" / ".metadata").unlink()
    made = titan.trainer(tmp_path, override, checkpoint={"load_only": True})
    made.checkpointer.load(step=2)
    with LargestTensor() as seen:  # no states are in memory while a reference is made and loaded
        made.optimizers.load_state_dict(made.optimizers.state_dict())
    assert seen.nbytes < 1000
    second = titan.train(made)
    assert made.step == 4
    assert first == second == titan.by_hand(tmp_path)


def test_a_run_goes_on_from_states(titan: Any, tmp_path: Path) -> None:  # noqa: ANN401
    override = given(states="disk")
    titan.train(titan.trainer(tmp_path, override, steps=2, checkpoint=SAVES))
    second = titan.train(titan.trainer(tmp_path, override, checkpoint={"load_only": True}))
    assert second == titan.by_hand(tmp_path)


@pytest.mark.parametrize("keep_latest_k", [0, 2])
def test_no_snapshot_is_dropped(
    titan: Any,  # noqa: ANN401
    keep_latest_k: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Which of its checkpoints torchtitan keeps is not known, nor which saves have failed."""
    override = given(states="disk", dir=tmp_path / "run")
    saves = {"interval": 1, "keep_latest_k": keep_latest_k}
    made = titan.trainer(tmp_path, override, steps=8, checkpoint=saves)
    made.train()
    made.close()
    (optimizer,) = made.optimizers
    for _ in range(4):
        made.optimizers.state_dict()  # as of saves that fail later
    assert [summary.step for summary in optimizer.snapshots()] == list(range(1, 9))
    assert caplog.text.count("stays if torchtitan removes the checkpoint") == 1
    optimizer.close()


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "backward": ({"overlap": "backward"}, {}, "norm of all gradients"),
    "states": ({}, {"implementation": "fused_opt_states_bf16"}, "torch's own optimizers alone"),
    "directory": ({"dir": "/nvme"}, {"model_parts": 2}, "for 2 optimizers"),
    "foreach": ({}, {"implementation": "foreach"}, "foreach"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_go_wrong_is_refused(titan: Any, name: str) -> None:  # noqa: ANN401
    import torch  # noqa: PLC0415

    from tensorstow.integrations.torchtitan import stowed  # noqa: PLC0415

    where, options, message = REFUSED[name]
    parts = [torch.nn.Linear(2, 2) for _ in range(options.pop("model_parts", 1))]
    config = titan.default_adamw(lr=1e-2)
    for option, value in options.items():
        setattr(config, option, value)
    with pytest.raises(OptionError, match=message):
        stowed(config, **where).build(model_parts=parts)


def test_graphs_that_run_no_hooks_are_refused(titan: Any, tmp_path: Path) -> None:  # noqa: ANN401
    made = titan.trainer(tmp_path, given(states="disk", overlap="forward"))
    with pytest.raises(OptionError, match=r"--training\.disable_cuda_graphs"):
        made.optimizers.zero_grad(set_to_none=False)
    made.close()


def numbered(place: Path) -> list[list[bytes]]:
    """Train with checkpoints, then from the first of them, on two ranks."""
    import titan  # noqa: PLC0415

    override = given(states="disk", dir=place / "run")
    with titan.on_the_cpu(dist.get_rank()):
        first = titan.train(titan.trainer(place, override, checkpoint=SAVES, max_norm=1e9))
        again = {"load_only": True, "load_step": 2}
        second = titan.trainer(place, override, checkpoint=again, max_norm=1e9)
        return [first, titan.train(second)]


def test_two_ranks_share_a_directory(titan: Any, ranks: Pool, tmp_path: Path) -> None:  # noqa: ANN401
    """Two ranks with a micro-batch each are one with two."""
    plain = titan.by_hand(tmp_path, accumulation=2, clip=1e9)
    assert ranks(2).run(numbered, tmp_path) == [[plain, plain]] * 2
