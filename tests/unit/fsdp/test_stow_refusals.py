"""What users get wrong: told by name, with what to do, before anything is placed, and on all ranks.

Ranks that disagree would wait for each other for ever.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import tensorstow
from ranks.pool import Pool
from ranks.stowed import model_of
from ranks.twin import ADAMW, mesh_here
from tensorstow import Plan
from tensorstow.base.errors import OptionError, StowError


def model() -> nn.Module:
    return model_of(torch.float32)


def an_optimizer() -> object:
    return tensorstow.AdamW(model().parameters())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": "gpt2"}, ["a str for a model", "torch module"]),
        (
            {"optimizer": an_optimizer},
            ["a AdamW for an optimizer", "stow(model, tensorstow.AdamW, lr"],
        ),
        ({"plan": "host"}, ["plan='host'", '"auto"']),
        ({"plan": {"stage": 3}}, ["plan={'stage': 3}"]),
        ({"plan": None}, ["plan=None"]),
        ({"plan": "auto", "budget": {"host": "1GiB"}}, ["budget={'host'", "tensorstow.Budget"]),
        ({"init": "normal"}, ["init='normal'", "called with a module"]),
        ({"compute_dtype": "bf16"}, ["compute_dtype='bf16'", "torch.bfloat16"]),
        ({"compute_dtype": torch.int8}, ["compute_dtype=torch.int8"]),
        ({"mesh": "cpu"}, ["mesh='cpu'", "init_device_mesh"]),
    ],
    ids=lambda g: "-".join(g) if isinstance(g, dict) else "",
)
def test_what_is_of_a_wrong_kind_is_refused(given: dict[str, Any], words: list[str]) -> None:
    asked = {"model": model(), "optimizer": ADAMW, "plan": Plan(), **given}
    if callable(given.get("optimizer")):
        asked["optimizer"] = given["optimizer"]()
    with pytest.raises(OptionError) as caught:
        tensorstow.stow(asked.pop("model"), asked.pop("optimizer"), **asked)
    assert all(word in str(caught.value) for word in words), caught.value


def test_nothing_is_stowed_under_inference_mode() -> None:
    with torch.inference_mode(), pytest.raises(OptionError, match="under inference_mode"):
        tensorstow.stow(model(), ADAMW, plan=Plan())


def message_of(given: nn.Module, **options: Any) -> tuple[str, bool]:  # noqa: ANN401
    """Return what stow says, and whether it left the parameters alone."""
    before = list(given.parameters())
    try:
        tensorstow.stow(given, ADAMW, **{"plan": Plan(), "mesh": mesh_here(), **options})
    except StowError as error:
        same = all(a is b for a, b in zip(before, given.parameters(), strict=True))
        return f"{type(error).__name__}: {error}", same
    return "not refused", False


def again() -> tuple[str, bool]:
    stowed, optimizer = tensorstow.stow(model(), ADAMW, plan=Plan(), mesh=mesh_here())
    said = message_of(stowed)
    optimizer.close()
    return said


def half_a_dtensor() -> tuple[str, bool]:
    given = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shared = distribute_tensor(given.blocks[0].up.weight.detach(), mesh, [Shard(0)])
    given.blocks[0].up.weight = nn.Parameter(shared)
    assert isinstance(given.blocks[0].up.weight, DTensor)
    return message_of(given)


def with_mesh(
    shape: tuple[int, ...], names: tuple[str, ...] | None, plan: Plan
) -> tuple[str, bool]:
    return message_of(model(), mesh=init_device_mesh("cpu", shape, mesh_dim_names=names), plan=plan)


def with_weights(folder: str) -> tuple[str, bool]:
    return message_of(model(), weights=folder)


def without_initialiser() -> tuple[str, bool]:
    """Leave the last unit, the root, without an initialiser: those before are not placed."""
    with torch.device("meta"):
        given = model()
        given.gain = nn.Parameter(torch.ones(2))
    return message_of(given)


def test_models_that_cannot_be_stowed_are_left_alone(ranks: Pool, tmp_path: Path) -> None:
    state = {n: p.detach().clone() for n, p in model().named_parameters()}
    del state["embedding.weight"]  # of the unit that is placed last
    save_file(state, tmp_path / "model.safetensors")
    pool = ranks(2)
    for task, given, word in [
        (again, (), "was sharded before"),
        (half_a_dtensor, (), "blocks.0.up.weight is a DTensor"),
        (with_mesh, ((2, 1, 1), ("a", "b", "c"), Plan()), "(2, 1, 1)"),
        (with_mesh, ((1, 2), ("replicate", "shard"), Plan(replicas=2)), "replicas=2"),
        (with_weights, (str(tmp_path),), "no tensor 'embedding.weight'"),
        (without_initialiser, (), "The model (Model)"),
    ]:
        for said, untouched in pool.run(task, *given):
            assert word in said, said
            assert untouched


def disagreeing(what: str) -> tuple[str, bool]:
    """Let the second rank ask for something else."""
    second = dist.get_rank() == 1
    given = model()
    options: dict[str, Any] = {}
    if what == "plan":
        options["plan"] = Plan(stage=2 if second else 3)
    elif what == "compute_dtype":
        options["compute_dtype"] = torch.bfloat16 if second else None
    elif what == "frozen":
        given.blocks[1].up.bias.requires_grad_(not second)
    elif what == "meta" and second:
        given = given.to("meta")
    elif what == "units":
        options["units"] = list(given.blocks)[second:]
    return message_of(given, **options)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("plan", ["another plan", '"stage": 2', '"stage": 3']),
        ("compute_dtype", ["another compute_dtype", "torch.bfloat16"]),
        ("frozen", ["another unit 'blocks.1'", "frozen", "trained"]),
        ("meta", ["another unit", "in meta", "in memory"]),
        ("units", ["another units", "blocks.0"]),
    ],
)
def test_ranks_that_disagree_are_all_told(ranks: Pool, what: str, words: list[str]) -> None:
    for said, untouched in ranks(2).run(disagreeing, what):
        assert said.startswith("OptionError: Rank 1 called stow() with another")
        assert all(word in said for word in words), said
        assert untouched


def with_an_option_of_one_rank(stage: int) -> str:
    """Let the optimizer of the second rank be refused when it is made."""
    make = partial(tensorstow.AdamW, lr=-1.0 if dist.get_rank() == 1 else 1e-3)
    try:
        tensorstow.stow(model(), make, plan=Plan(stage=stage), mesh=mesh_here())
    except StowError as error:
        return f"{type(error).__name__}: {error}"
    return "placed"


@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_that_one_rank_cannot_make_is_told_on_all(ranks: Pool, stage: int) -> None:
    first, second = ranks(2).run(with_an_option_of_one_rank, stage)
    assert first.startswith("StowError: Rank 1 could not make the optimizer: OptionError(")
    assert second.startswith("OptionError: lr=-1.0")


def test_one_rank_is_counted_as_one() -> None:
    with pytest.raises(OptionError, match=r"replicas=2 was given for 1 rank: "):
        tensorstow.stow(nn.Linear(2, 2), ADAMW, plan=Plan(replicas=2))


def test_one_parameter_is_counted_as_one() -> None:
    mine, other = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    with pytest.raises(OptionError, match="a Linear with 1 parameter, and none"):
        tensorstow.AdamW(mine.parameters(), module=other)
