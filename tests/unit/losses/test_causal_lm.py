"""Models of transformers whose loss is computed in chunks."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import tensorstow
from tensorstow import Plan
from tensorstow.base.errors import OptionError
from tensorstow.losses import chunk_loss

CLASSES = 96


def llama(*, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=CLASSES, tie_word_embeddings=tied, **sizes, **heads)
    )


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=CLASSES, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    ).eval()


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(CLASSES, (3, 11), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def loss_and_gradients(model: nn.Module, batch: dict[str, Any]) -> Iterator[torch.Tensor]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    yield loss.detach()
    yield from (p.grad.clone() for p in model.parameters())


@pytest.mark.parametrize("make", [llama, partial(llama, tied=True), gpt2])
@pytest.mark.parametrize("items", [None, 20, torch.tensor(20)])
def test_the_loss_is_the_models(make: Any, batch: dict[str, Any], items: Any) -> None:  # noqa: ANN401
    model = make()
    given = batch if items is None else {**batch, "num_items_in_batch": items}
    wanted = list(loss_and_gradients(model, given))
    with chunk_loss(model, chunk_bytes=f"{5 * 4 * CLASSES}B"):
        found = list(loss_and_gradients(model, given))
        assert model(**given).logits is None
        (_, logits, *_) = model(**given, return_dict=False)
        assert logits is None
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)
    again = list(loss_and_gradients(model, given))
    assert all(torch.equal(a, b) for a, b in zip(again, wanted, strict=True))


def test_without_labels_there_are_logits(batch: dict[str, Any]) -> None:
    model = llama()
    ids = batch["input_ids"]
    wanted = model(ids).logits
    chunked = chunk_loss(model)
    assert torch.equal(model(ids).logits, wanted)
    assert model(ids, labels=ids).logits is None
    assert torch.equal(model(ids).logits, wanted)
    chunked.close()
    chunked.close()
    assert torch.equal(model(ids, labels=ids).logits, wanted)


def test_behind_a_forward_that_failed_the_output_layer_is_itself(
    batch: dict[str, torch.Tensor],
) -> None:
    model = llama()
    hidden = torch.ones(2, 16)
    wanted = model.lm_head(hidden)
    with chunk_loss(model):
        with pytest.raises(IndexError):  # a token that there is none of
            model(input_ids=batch["input_ids"] + CLASSES, labels=batch["labels"])
        assert torch.equal(model.lm_head(hidden), wanted)


def test_logits_that_are_changed_are_refused(batch: dict[str, Any]) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = Gemma2ForCausalLM(Gemma2Config(vocab_size=CLASSES, **sizes, **heads))
    with chunk_loss(model), pytest.raises(OptionError, match="logit_softcap"):
        model(**batch)
    assert model(**batch).logits is not None


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_model_with_parameters_on_disk(where: str, batch: dict[str, Any], tmp_path: Path) -> None:
    def trained(place: Path, *, chunked: bool) -> list[float]:
        model: Any = llama()
        if chunked and where == "before":
            chunk_loss(model)
        make = partial(tensorstow.AdamW, lr=1e-2)
        plan = Plan(parameters="disk", states="disk")
        model, optimizer = tensorstow.stow(model, make, plan=plan, dir=place)
        if chunked and where == "after":
            chunk_loss(model)
        losses = []
        for _ in range(2):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        optimizer.close()
        return losses

    found = trained(tmp_path / "chunked", chunked=True)
    assert found == pytest.approx(trained(tmp_path / "plain", chunked=False), rel=1e-5)
    assert found[1] < found[0]


def test_other_models_are_refused() -> None:
    with pytest.raises(OptionError, match="causal language model"):
        chunk_loss(nn.Linear(2, 2))
    model = llama()
    with chunk_loss(model), pytest.raises(OptionError, match="was not replaced"):
        chunk_loss(model)
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(OptionError, match="is a Sequential"):
        chunk_loss(model)
