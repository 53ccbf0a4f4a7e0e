"""Parts of a stowed model that are called by themselves; copies, casts and resizes are refused."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import tensorstow
from ranks.pool import Ranks
from ranks.stowed import loss_of, model_of
from ranks.twin import FETCHED, Twins
from tensorstow import Plan
from tensorstow.base.errors import OptionError

Pool = Callable[[int], Ranks]


def loss(model: nn.Module, rank: int, batch: int) -> torch.Tensor:
    return loss_of(model, rank, batch, 0)


def called_alone(plan: Plan) -> None:
    """Call the head by itself, first of all and behind training."""
    both = Twins(lambda: model_of(torch.float32), loss, plan)
    width = both.alone.head.in_features
    for batches in (range(2), range(2, 3)):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                mine = both.stowed.head(torch.ones(2, width))
                assert torch.equal(mine, both.alone.head(torch.ones(2, width)))
        with pytest.raises(OptionError, match="head was called by itself"):
            both.stowed.head(torch.ones(2, width))
        with torch.no_grad(), pytest.raises(RuntimeError):
            both.stowed.head(torch.ones(2, width + 1))  # what fails leaves nothing gathered
        both.train(batches)
    both.close()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("plan", [Plan(), FETCHED, Plan(stage=2)], ids=["host", "disk", "stage 2"])
def test_a_part_is_called_by_itself(ranks: Pool, plan: Plan, world: int) -> None:
    ranks(world).run(called_alone, plan)


class Words(nn.Module):
    """Has embeddings, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.image = nn.Conv2d(2, 2, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        given: torch.Tensor = self.words(words)
        for block in self.blocks:
            given = block(given)
        return given

    def get_input_embeddings(self) -> nn.Embedding:
        return self.words

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.words = value

    def resize_token_embeddings(self, new_num_tokens: int | None = None) -> nn.Embedding:
        assert new_num_tokens in {None, 5}
        return self.words


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (copy.deepcopy, "full_tensor"),
        (AveragedModel, "full_tensor"),
        (lambda model: copy.deepcopy(model.blocks), "full_tensor"),
        (lambda model: model.resize_token_embeddings(6), r"Resize before\s+stow"),
        (lambda model: model.set_input_embeddings(nn.Embedding(5, 4)), r"Set it\s+before stow"),
        (lambda model: model.half(), "Cast before stow"),
        (lambda model: model.to(torch.bfloat16), "Cast before stow"),
        (lambda model: model.to("meta"), "Cast before stow"),
        (lambda model: model.blocks[0].double(), "Cast before stow"),
        (lambda model: model.share_memory(), "shared"),
        (lambda model: model.words.half(), "Cast before stow"),
        (lambda model: model.image.to("meta"), "Cast before stow"),
        (lambda model: copy.deepcopy(model.words), "full_tensor"),
        (lambda model: model.to(memory_format=torch.channels_last), "laid out"),
    ],
    ids=range(14),
)
def test_what_would_part_model_and_optimizer_is_refused(
    change: Callable[[nn.Module], object], words: str
) -> None:
    plan = Plan(parameters="disk", states="disk")
    model, optimizer = tensorstow.stow(Words(), partial(tensorstow.AdamW, lr=1e-2), plan=plan)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(OptionError, match=words):
        change(model)
    for same in (model.float(), model.to("cpu"), model.to(torch.float32), model.cpu()):
        assert same is model
    assert model.resize_token_embeddings(5) is model.resize_token_embeddings() is model.words
    model.set_input_embeddings(model.words)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    optimizer.close()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_unit_may_be_called_before_the_model(
    mode: Callable[[], AbstractContextManager[None]],
) -> None:
    plan = Plan(parameters="disk", states="disk")
    made = Words()
    given = partial(tensorstow.AdamW, lr=1e-2)
    model, optimizer = tensorstow.stow(made, given, plan=plan, units=list(made.blocks))
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with mode():
        alone = model.blocks[0](torch.ones(2, 4))
    wanted = nn.functional.linear(torch.ones(2, 4), kept["blocks.0.weight"], kept["blocks.0.bias"])
    assert torch.equal(alone, wanted)
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    after = model.state_dict()
    trained = {name for name, value in kept.items() if not torch.equal(value, after[name])}
    assert trained == {name for name in kept if not name.startswith("image")}
    optimizer.close()
