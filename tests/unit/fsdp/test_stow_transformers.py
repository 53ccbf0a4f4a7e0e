"""Models of transformers: trained, generating, from the meta device, and back to the hub's form."""

import importlib.util
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tensorstow
from ranks.pool import Pool
from ranks.twin import ADAMW, FETCHED, FETCHED_BESIDE, Twins, mesh_here, whole
from tensorstow import Plan
from tensorstow.base.errors import OptionError
from tensorstow.fsdp.export import save_safetensors

WORDS, LENGTH = 32, 8
KINDS = ["gpt2", "llama"]
PLANS = [
    Plan(),
    Plan(overlap="forward", states="disk"),
    Plan(stage=2),
    FETCHED,
    FETCHED_BESIDE,
]


def config_of(kind: str) -> Any:  # noqa: ANN401  # another library's
    """Return a tiny configuration: GPT-2 has tied weights, Llama rotary buffers."""
    from transformers import GPT2Config, LlamaConfig  # noqa: PLC0415  # seconds, in ranks alone

    if kind == "gpt2":
        quiet = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16}
        return GPT2Config(vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **sizes, **quiet)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
    return LlamaConfig(vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **sizes, **heads)


def model_of(kind: str) -> Any:  # noqa: ANN401
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(kind))


def on_meta(kind: str) -> Any:  # noqa: ANN401
    with torch.device("meta"):
        return model_of(kind)


def loss(model: nn.Module, rank: int, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + batch)
    tokens = torch.randint(WORDS, (2, LENGTH), generator=generator)
    return model(input_ids=tokens, labels=tokens).loss


def trained(kind: str, plan: Plan) -> None:
    both = Twins(lambda: model_of(kind), loss, plan)
    both.train()
    ours, theirs = both.each(
        lambda model, _: model.generate(
            torch.tensor([[1, 2]]), max_new_tokens=4, do_sample=False, pad_token_id=0
        )
    )
    assert ours.tolist() == theirs.tolist()
    both.train(range(2, 3))
    both.close()


@pytest.mark.parametrize("kind", KINDS)
def test_they_train_and_generate_to_the_bit(ranks: Pool, kind: str) -> None:
    for plan in PLANS:
        ranks(2).run(trained, kind, plan)


def through_the_hubs_form(kind: str, folder: str, most: int) -> None:
    """Write, and load by transformers and from the meta device."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    both = Twins(lambda: model_of(kind), loss, Plan(overlap="forward"))
    both.train()
    save_safetensors(both.stowed, folder, max_shard_bytes=most)
    if both.rank == 0:
        both.stowed.config.save_pretrained(folder)
    dist.barrier()
    both.compare()
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    for mine, read in zip(both.alone.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, read)
    model = on_meta(kind)
    model, optimizer = tensorstow.stow(
        model, ADAMW, plan=FETCHED, mesh=mesh_here(), weights=folder, init=model._init_weights
    )
    for mine, read in zip(both.alone.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, whole(read))
    with torch.no_grad():
        assert torch.equal(loss(model, 0, 5), loss(both.alone, 0, 5))
    optimizer.close()
    both.close()


@pytest.mark.parametrize("kind", KINDS)
def test_from_pretrained_loads_what_was_trained(ranks: Pool, tmp_path: Path, kind: str) -> None:
    for most in (3000, 1 << 30):
        folder = str(tmp_path / str(most))
        ranks(2).run(through_the_hubs_form, kind, folder, most)
        assert os.path.exists(f"{folder}/model.safetensors") == (most > 3000)  # noqa: PTH110


def initialised(kind: str) -> tuple[float, float, list[str]]:
    """Return the spread of scaled and other weights, and messages of what was refused."""
    model = on_meta(kind)
    messages = []
    try:
        tensorstow.stow(on_meta(kind), ADAMW, plan=Plan(), mesh=mesh_here())
    except OptionError as error:
        messages.append(str(error))
    model, optimizer = tensorstow.stow(
        model, ADAMW, plan=Plan(), mesh=mesh_here(), init=model._init_weights
    )
    loss(model, 0, 0).backward()
    optimizer.step()
    spread = {n: p.full_tensor().std().item() for n, p in model.named_parameters() if p.ndim == 2}
    optimizer.close()
    proj = [s for n, s in spread.items() if "mlp.c_proj" in n or "mlp.down_proj" in n]
    other = [s for n, s in spread.items() if "c_fc" in n or "up_proj" in n]
    return sum(proj) / len(proj), sum(other) / len(other), messages


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_initialised_from_the_meta_device_by_their_own_function(
    ranks: Pool, kind: str
) -> None:
    (scaled, other, (message,)), again = ranks(2).run(initialised, kind)
    assert again[:2] == (scaled, other)
    assert 0.015 < other < 0.025
    assert (scaled / other < 0.7) == (kind == "gpt2")  # which scales by 1 / sqrt(2 * layers)
    assert "init=model._init_weights" in message


def adapted(plan: Plan) -> tuple[int, int]:
    """Train adapters in fp32 over a model that is frozen in bf16."""
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415

    def make() -> nn.Module:
        model = model_of("llama").bfloat16()
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        return model

    both = Twins(make, loss, plan)
    both.train()
    trained = sum(p.requires_grad for p in both.stowed.parameters())
    states = len(both.ours.state)
    both.close()
    return trained, states


def test_adapters_of_peft_train_over_a_frozen_model(ranks: Pool) -> None:
    if importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed")
    for plan in PLANS:
        for trained_, states in ranks(2).run(adapted, plan):
            assert trained_ == states == 8


def drawn(folder: str) -> float:
    """Place adapters that begin on the meta device, after another seed on each rank."""
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415

    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(on_meta("llama"), config)
    torch.manual_seed(dist.get_rank())
    model, optimizer = tensorstow.stow(model, ADAMW, plan=FETCHED, mesh=mesh_here(), weights=folder)
    values = {n: whole(p) for n, p in model.named_parameters()}
    base = model_of("llama")
    torch.manual_seed(0)  # the first rank's
    right = get_peft_model(base, config).state_dict()
    assert all(torch.equal(values[n], v) for n, v in right.items() if "lora_" in n)
    optimizer.close()
    return sum(v.sum().item() for n, v in values.items() if "lora_A" in n)


def test_all_ranks_begin_with_the_adapters_of_the_first(ranks: Pool, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model_of("llama").save_pretrained(tmp_path / "base")
    first, second = ranks(2).run(drawn, str(tmp_path / "base"))
    assert first == second != 0.0


def test_the_trainer_saves_and_goes_on(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    data = [{"input_ids": torch.arange(LENGTH), "labels": torch.arange(LENGTH)} for _ in range(4)]

    def trainer(steps: int) -> Any:  # noqa: ANN401
        plan = Plan(parameters="disk", states="disk")
        model, optimizer = tensorstow.stow(
            model_of("gpt2"), partial(tensorstow.AdamW, lr=1e-3), plan=plan
        )
        quiet = {
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "dataloader_num_workers": 0,
        }
        asked = transformers.TrainingArguments(
            tmp_path, max_steps=steps, save_steps=1, lr_scheduler_type="constant", **quiet
        )
        return transformers.Trainer(model, asked, train_dataset=data, optimizers=(optimizer, None))

    straight = trainer(2)
    straight.train()
    wanted = {name: value.clone() for name, value in straight.model.state_dict().items()}
    resumed = trainer(2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    resumed.save_model(tmp_path / "end")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "end").state_dict()
    for name, value in wanted.items():
        assert torch.equal(back[name], value)
    for each in (straight, resumed):
        each.optimizer.optimizer.close()
