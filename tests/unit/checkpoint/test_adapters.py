"""Models of peft: the base's files under other names, and adapters that begin as peft's do."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tensorstow
from tensorstow import Plan
from tensorstow.base.errors import OptionError, StoreFormatError
from tensorstow.checkpoint.adapters import Adapters

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
# peft asks for it.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "pad_token_id": 0,
}
DISK = Plan(parameters="disk", states="host")
ADAMW = partial(tensorstow.AdamW, lr=1e-2)


def base() -> Any:  # noqa: ANN401  # another library's
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).bfloat16()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    base().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def lora(**given: Any) -> Any:  # noqa: ANN401
    targets = given.pop("target_modules", ["q_proj", "v_proj"])
    return peft.LoraConfig(r=2, target_modules=targets, **given)


def on_meta(config: Any) -> nn.Module:  # noqa: ANN401
    with torch.device("meta"):
        model = base()
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def in_memory(config: Any) -> nn.Module:  # noqa: ANN401
    """Return what peft makes over the base in memory, after a seed."""
    model = base()
    torch.manual_seed(1)
    adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    got, right = values_of(ours), values_of(theirs)
    assert got.keys() == right.keys()
    for name, value in right.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name], value), name


CONFIGURATIONS = {
    "linear": {},
    "gaussian": {"init_lora_weights": "gaussian"},
    "as torch makes them": {"init_lora_weights": False},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "biases": {"lora_bias": True, "target_modules": ["q_proj"]},
    "saved modules": {"modules_to_save": ["lm_head"]},
}


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
@pytest.mark.parametrize("plan", [Plan(), DISK], ids=["host", "disk"])
@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_a_model_on_the_meta_device_is_what_peft_makes_in_memory(
    folder: Path, kind: str, plan: Plan
) -> None:
    config = CONFIGURATIONS[kind]
    theirs = in_memory(lora(**config))
    ours = on_meta(lora(**config))
    torch.manual_seed(1)
    ours, optimizer = tensorstow.stow(ours, ADAMW, plan=plan, weights=folder)
    assert_same(ours, theirs)
    drawn = [p for n, p in ours.named_parameters() if "lora_A" in n or "embedding_B" in n]
    assert drawn
    assert all(whole.std() > 0 for whole in drawn)
    optimizer.close()


def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Train three steps."""
    tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(2))
    found = []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item().hex())
    return found


def test_it_trains_to_the_bits_of_peft(folder: Path) -> None:
    theirs = in_memory(lora())
    right = losses(theirs, ADAMW(theirs.parameters()))
    ours = on_meta(lora())
    torch.manual_seed(1)
    ours, optimizer = tensorstow.stow(ours, ADAMW, plan=DISK, weights=folder)
    assert losses(ours, optimizer) == right
    optimizer.close()


def test_adapters_that_have_values_keep_them(folder: Path) -> None:
    """Also those that peft computes from the base, which it leaves as it is."""
    for config in (lora(use_dora=True), lora(init_lora_weights="orthogonal"), peft.IA3Config()):
        theirs = in_memory(config)
        ours = in_memory(config)
        ours, optimizer = tensorstow.stow(ours, ADAMW, plan=DISK, weights=folder)
        assert_same(ours, theirs)
        optimizer.close()


def test_adapters_of_transformers_own_door_are_known(folder: Path) -> None:
    """``add_adapter`` puts no model round the base."""
    with torch.device("meta"):
        ours = base()
    ours.add_adapter(lora())
    torch.manual_seed(1)
    ours, optimizer = tensorstow.stow(ours, ADAMW, plan=DISK, weights=folder)
    theirs = base()
    torch.manual_seed(1)
    theirs.add_adapter(lora())
    assert_same(ours, theirs)
    optimizer.close()


def test_a_base_of_plain_modules_is_known(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    kept = make()
    save_file(kept.state_dict(), tmp_path / "model.safetensors")
    config = peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["1"])
    with torch.device("meta"):
        ours = make()
    ours = peft.get_peft_model(ours, config)
    torch.manual_seed(1)
    ours, optimizer = tensorstow.stow(ours, ADAMW, plan=DISK, weights=tmp_path)
    torch.manual_seed(1)
    assert_same(ours, peft.get_peft_model(kept, config))
    optimizer.close()


def test_converted_tensors_are_found_below_adapters(tmp_path: Path) -> None:
    sizes = {**SIZES, "num_local_experts": 3, "num_key_value_heads": 1}
    torch.manual_seed(0)
    kept = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
    kept.save_pretrained(tmp_path)
    with torch.device("meta"):
        ours = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
    ours = peft.get_peft_model(ours, lora())
    torch.manual_seed(1)
    ours, optimizer = tensorstow.stow(ours, ADAMW, plan=DISK, weights=tmp_path)
    torch.manual_seed(1)
    assert_same(ours, peft.get_peft_model(kept, lora()))
    optimizer.close()


def test_what_was_saved_with_its_adapters_is_read_with_them(tmp_path: Path) -> None:
    theirs = in_memory(lora(init_lora_weights="pissa"))
    tensorstow.save_safetensors(theirs, tmp_path / "all")
    ours = on_meta(lora())
    ours, optimizer = tensorstow.stow(ours, ADAMW, plan=DISK, weights=tmp_path / "all")
    assert_same(ours, theirs)
    optimizer.close()


def test_adapters_on_the_meta_device_begin_as_pefts_without_files_too() -> None:
    """Not by the ``reset_parameters`` of their linear layers, which leaves no zeros in B."""
    with torch.device("meta"):
        ours = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    ours = peft.get_peft_model(ours, peft.LoraConfig(r=2, target_modules=["0"]))
    ours, optimizer = tensorstow.stow(ours, ADAMW, plan=DISK)
    values = values_of(ours)
    (below,) = [value for name, value in values.items() if "lora_B" in name]
    (above,) = [value for name, value in values.items() if "lora_A" in name]
    assert torch.equal(below, torch.zeros(4, 2))
    assert above.std() > 0
    optimizer.close()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_model_that_is_only_read_computes_with_its_adapters(folder: Path, tier: str) -> None:
    config = lora(target_modules=["embed_tokens", "q_proj"], init_lora_weights=False)
    theirs = in_memory(config).eval()
    tokens = torch.arange(8)[None]
    ours, _ = tensorstow.stow(
        in_memory(config).eval(), None, plan=Plan(parameters=tier), weights=folder
    )
    with torch.no_grad():
        assert torch.equal(ours(input_ids=tokens).logits, theirs(input_ids=tokens).logits)


REFUSED = {
    "eva": (
        lora(init_lora_weights="eva", eva_config=peft.EvaConfig()),
        "init_lora_weights='eva' computes it",
    ),
    "orthogonal": (lora(init_lora_weights="orthogonal"), "init_lora_weights='orthogonal'"),
    "dora": (lora(use_dora=True), "DoraLinearVariant"),
    "IA3": (peft.IA3Config(), "another kind than LoRA"),
}


@pytest.mark.filterwarnings("ignore:lora with eva initialization")
@pytest.mark.parametrize("kind", REFUSED)
def test_adapters_that_peft_computes_from_the_base_need_it(folder: Path, kind: str) -> None:
    config, reason = REFUSED[kind]
    ours = on_meta(config)
    with pytest.raises(OptionError, match=reason) as caught:
        tensorstow.stow(ours, ADAMW, plan=DISK, weights=folder)
    assert "from_pretrained" in str(caught.value)
    assert all(p.is_meta for p in ours.parameters())


@pytest.mark.parametrize("kind", ["pissa", "olora", "merge_adapter"])
def test_a_base_that_peft_has_changed_is_not_read_from_its_files(folder: Path, kind: str) -> None:
    merged = kind == "merge_adapter"
    ours = in_memory(lora(init_lora_weights=not merged and kind))
    if merged:
        ours.merge_adapter()
    with pytest.raises(OptionError, match=rf"{kind}.*Leave weights= out"):
        tensorstow.stow(ours, ADAMW, plan=DISK, weights=folder)
    right = values_of(ours)
    ours, optimizer = tensorstow.stow(ours, ADAMW, plan=DISK)
    assert all(torch.equal(value, right[name]) for name, value in values_of(ours).items())
    optimizer.close()


def test_a_tensor_of_the_base_that_the_files_lack_is_an_error(folder: Path) -> None:
    torch.manual_seed(0)
    deeper = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 3})
    ours = peft.get_peft_model(transformers.LlamaForCausalLM(deeper).bfloat16(), lora())
    with pytest.raises(StoreFormatError, match=r"layers\.2"):
        tensorstow.stow(ours, ADAMW, plan=DISK, weights=folder)


def test_a_model_without_adapters_has_the_names_of_its_base() -> None:
    model = base()
    adapters = Adapters(model)
    assert adapters.base is model
    assert not adapters.names
    known = dict(model.named_parameters(remove_duplicate=False))
    known |= dict(model.named_buffers(remove_duplicate=False))
    assert adapters.base_names == {name: name for name in known}
