"""Adapters of peft over a base in int8 or NF4, in trainers and by hand, and their files."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import tensorstow
import trainers
from tensorstow import AdamW, Plan
from tensorstow.base.errors import OptionError
from tensorstow.checkpoint.pretrained import PretrainedFiles
from tensorstow.checkpoint.quantized_folder import quantize_folder
from tensorstow.checkpoint.weight_encoders import ENCODERS
from tensorstow.fsdp.report import parameter_bytes
from tensorstow.integrations.transformers import Stowed, adamw

KINDS = ["int8", "nf4"]
PLANS = [Plan(parameters="disk", activations="recompute"), Plan(parameters="host")]
pytestmark = [
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing`:FutureWarning"),  # TRL's
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # peft's
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what TRL imports
]


@pytest.fixture(autouse=True, scope="module")
def _loaded() -> None:
    import peft  # noqa: F401, PLC0415  # seconds
    import trl.trainer.sft_trainer  # noqa: F401, PLC0415

    gc.freeze()


@pytest.fixture(autouse=True)
def _drawn_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give adapters the same first values wherever they are made."""

    def fill(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        with torch.no_grad():
            values = torch.linspace(-0.3, 0.4, tensor.numel(), device="cpu")
            return tensor.copy_(values.sin().view(tensor.shape))

    monkeypatch.setattr(torch.nn.init, "kaiming_uniform_", fill)


def config() -> Any:  # noqa: ANN401
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "use_cache": False}
    return transformers.LlamaConfig(vocab_size=trainers.WORDS, **sizes, **heads)


def on_meta() -> Any:  # noqa: ANN401
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)


def base_of(tmp_path: Path, kind: str) -> Path:
    """Write a base as codes, once."""
    if not (tmp_path / kind).exists():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
        model.save_pretrained(tmp_path / "base")
        quantize_folder(tmp_path / "base", tmp_path / kind, on_meta(), ENCODERS[kind])
    return tmp_path / kind


def decoded(folder: Path) -> Any:  # noqa: ANN401
    """Return the model in memory whose values the codes stand for."""
    model = transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
    files = PretrainedFiles(folder, model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(files.reader([name], parameter)(0, parameter.shape[0]))
    return model


def lora() -> Any:  # noqa: ANN401
    import peft  # noqa: PLC0415

    kinds = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(r=2, lora_dropout=0.0, **kinds)


def adapted(model: Any) -> Any:  # noqa: ANN401
    import peft  # noqa: PLC0415

    return peft.get_peft_model(model, lora())


def adapters_in(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file  # noqa: PLC0415

    return load_file(folder / "adapter_model.safetensors")


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def arguments(place: Path, **given: Any) -> Any:  # noqa: ANN401
    given = {**trainers.OF_A_TRAINER, "max_grad_norm": 0, **given}  # norms are summed otherwise
    return transformers.TrainingArguments(str(place), **given)


@pytest.mark.parametrize("kind", KINDS)
def test_the_trainer_trains_and_saves_as_over_the_values_in_memory(
    tmp_path: Path, kind: str
) -> None:
    import peft  # noqa: PLC0415

    folder, data = base_of(tmp_path, kind), trainers.examples(3)
    plain = transformers.Trainer(
        adapted(decoded(folder)),
        args := arguments(tmp_path / "plain"),
        train_dataset=data,
        optimizer_cls_and_kwargs=adamw(args),
    )
    plain.train()
    plain.save_model(str(tmp_path / "theirs"))
    for number, plan in enumerate(PLANS):
        out = tmp_path / f"ours{number}"
        stow = {"plan": plan, "weights": folder}
        saves = {"save_strategy": "steps", "save_steps": 2}
        ours = Stowed(adapted(on_meta()), arguments(out, **saves), train_dataset=data, stow=stow)
        ours.train()
        ours.save_model(str(out / "model"))
        assert same(adapters_in(out / "model"), adapters_in(tmp_path / "theirs"))
        ours._optimizer().close()
        again = Stowed(adapted(on_meta()), arguments(out), train_dataset=data, stow=stow)
        again.train(resume_from_checkpoint=str(out / "checkpoint-2"))
        again.save_model(str(out / "again"))
        assert same(adapters_in(out / "again"), adapters_in(tmp_path / "theirs"))
        again._optimizer().close()
    merged = peft.PeftModel.from_pretrained(decoded(folder), tmp_path / "ours0" / "model")
    merged = merged.merge_and_unload()
    plain_merged = plain.model.merge_and_unload()
    for mine, theirs in zip(merged.parameters(), plain_merged.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_trls_trainer_makes_the_adapters(tmp_path: Path, kind: str) -> None:
    import datasets  # noqa: PLC0415
    from test_trl import WHOLE, tokenizer  # noqa: PLC0415
    from trl import SFTConfig, SFTTrainer  # noqa: PLC0415

    class StowedSFT(Stowed, SFTTrainer):  # as in the guide
        pass

    rows = [row["input_ids"].tolist() for row in trainers.examples(3)]
    data = datasets.Dataset.from_dict({"input_ids": rows, "labels": rows})
    folder, saved = base_of(tmp_path, kind), []
    for way in ("plain", "stowed"):
        options = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_grad_norm": 0, **WHOLE}
        args = SFTConfig(str(tmp_path / way), **{**trainers.OF_A_TRAINER, **options})
        named = {"train_dataset": data, "processing_class": tokenizer(), "peft_config": lora()}
        if way == "stowed":
            stow = {"plan": PLANS[0], "weights": folder}
            trainer = StowedSFT(on_meta(), args, **named, stow=stow)
        else:
            kwargs = adamw(args)
            trainer = SFTTrainer(decoded(folder), args, **named, optimizer_cls_and_kwargs=kwargs)
        trainer.train()
        trainer.save_model(str(tmp_path / way / "model"))
        saved.append(adapters_in(tmp_path / way / "model"))
    assert same(*saved)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_loop_goes_on_after_a_commit(tmp_path: Path, kind: str, plan: Plan) -> None:
    folder = base_of(tmp_path, kind)
    batches = [row["input_ids"][None] for row in trainers.examples(4)]

    def train(model: Any, optimizer: Any, rows: list[torch.Tensor]) -> list[float]:  # noqa: ANN401
        losses = []
        for row in rows:
            loss = model(input_ids=row, labels=row).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    wanted = adapted(decoded(folder))
    want = train(wanted, AdamW(wanted.named_parameters(), lr=1e-2), batches)
    found = []
    for part in (batches[:2], batches[2:]):
        model, optimizer = tensorstow.stow(
            adapted(on_meta()), AdamW, lr=1e-2, plan=plan, weights=folder, dir=tmp_path / "run"
        )
        assert (optimizer.resume() or 0) == len(found)
        held = parameter_bytes(model)
        assert held.disk_bytes - held.file_bytes < held.file_bytes + held.host_bytes
        with optimizer:
            found += train(model, optimizer, part)
            options = StateDictOptions(
                full_state_dict=True, cpu_offload=True, ignore_frozen_params=True
            )
            state = get_model_state_dict(model, options=options)
            model.save_pretrained(tmp_path / "adapters", state_dict=state)
    assert found == want
    wanted.save_pretrained(tmp_path / "wanted")
    assert same(adapters_in(tmp_path / "adapters"), adapters_in(tmp_path / "wanted"))


def test_a_base_that_bitsandbytes_holds_is_refused_with_advice(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    folder = base_of(tmp_path, "nf4")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with pytest.raises(OptionError, match=r"is a Params4bit.*pass weights= with the folder"):
        tensorstow.stow(adapted(base), AdamW, plan=PLANS[0])
