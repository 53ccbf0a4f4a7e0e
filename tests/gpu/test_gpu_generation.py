"""transformers' ways to generate with weights on their way to an accelerator."""

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CompileConfig, LlamaConfig, MixtralConfig
from transformers.cache_utils import Cache

import tensorstow
import tensorstow.deepspeed as deepspeed
from tensorstow import Plan
from tensorstow.base.errors import OptionError
from tensorstow.checkpoint.pretrained import PretrainedFiles
from tensorstow.checkpoint.quantized_folder import quantize_folder
from tensorstow.checkpoint.weight_encoders import ENCODERS
from tensorstow.fsdp.read_only import stream_of
from tensorstow.nn.routed_experts import is_of_experts, routed_experts

WORDS, NEW = 96, 4
PLANS = {
    "host": Plan(),
    "disk": Plan(parameters="disk"),
    "both": Plan(
        parameters="disk", parameter_units={"model.layers.1": "device", "lm_head": "host"}
    ),
}
WAYS: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "looked up": {"do_sample": False, "prompt_lookup_num_tokens": 2},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "no cache": {"do_sample": False, "use_cache": False},
}


def made() -> Any:  # noqa: ANN401  # another library's
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=WORDS,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(requires_grad=False)


def stowed(folder: Path, plan: Plan) -> Any:  # noqa: ANN401
    with torch.device("meta"):
        model = made()
    return tensorstow.stow(model, None, weights=folder, plan=plan)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    place = tmp_path_factory.mktemp("llama")
    made().save_pretrained(place)
    return place


def generated(model: Any, device: torch.device, **given: Any) -> torch.Tensor:  # noqa: ANN401
    tokens = (torch.arange(12).view(2, 6) % 5 + 1).to(device)
    torch.manual_seed(7)
    tokens = tokens[:1] if "prompt_lookup_num_tokens" in given else tokens
    found = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW, **given
    )
    return found.cpu()


def hazards() -> set[str]:
    """Return what the simulated accelerator has found to be in no order since the last call."""
    simulated = sys.modules.get("simulated")
    if simulated is None:
        return set()
    simulated.native.synchronize()
    return set(simulated.take_hazards())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("plan", ["disk", "both"])
def test_tokens_are_those_of_the_model_on_the_device(
    device: torch.device, folder: Path, way: str, plan: str
) -> None:
    want = generated(made().to(device), device, **WAYS[way], disable_compile=True)
    theirs = hazards()  # of beam search, which changes what it copies up before the copy is over
    assert way == "beams" or not theirs
    model = stowed(folder, PLANS[plan])
    for _ in range(2):
        assert torch.equal(generated(model, device, **WAYS[way]), want)
    assert stream_of(model) is not None
    assert hazards() <= theirs


def test_an_assistant_in_memory_helps_a_model_on_disk(device: torch.device, folder: Path) -> None:
    assistant = made().to(device)
    tokens = torch.ones(1, 4, dtype=torch.long, device=device)
    given = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": NEW, "do_sample": False}
    want = made().to(device).generate(tokens, **given, assistant_model=assistant)
    model = stowed(folder, PLANS["disk"])
    assert torch.equal(model.generate(tokens, **given, assistant_model=assistant), want)


@pytest.mark.parametrize("plan", PLANS)
def test_weights_in_int8_have_one_result_wherever_they_are(
    device: torch.device, folder: Path, tmp_path: Path, plan: str
) -> None:
    with torch.device("meta"):
        small = tensorstow.quantize_to_int8(made(), folder, tmp_path)
    want = generated(stowed(small, Plan(parameters="device")), device, do_sample=False)
    assert torch.equal(generated(stowed(small, PLANS[plan]), device, do_sample=False), want)


@pytest.mark.parametrize("to", ["none", "cpu", "nvme"])
def test_deepspeeds_engine_without_an_optimizer_generates(
    device: torch.device, tmp_path: Path, to: str
) -> None:
    want = generated(made().to(device), device, do_sample=False)
    place = {"device": to} | ({"nvme_path": str(tmp_path)} if to == "nvme" else {})
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "offload_param": place},
    }
    engine, optimizer, _, _ = deepspeed.initialize(model=made(), config=config)
    assert optimizer is None
    assert torch.equal(generated(engine.module, device, do_sample=False), want)
    engine.destroy()


def test_a_model_whose_weights_are_streamed_is_not_compiled(
    device: torch.device, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers compiles on its own, with a static cache on a GPU; here on all devices."""
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("it was compiled"))
    model = stowed(folder, PLANS["both"])
    static = {"do_sample": False, "cache_implementation": "static"}
    generated(model, device, **static)
    everywhere = CompileConfig()
    everywhere._compile_all_devices = True
    with pytest.raises(OptionError, match="compile_config"):
        generated(model, device, **static, compile_config=everywhere)
    with pytest.raises(pytest.fail.Exception, match="compiled"):  # of what is in memory, it is
        generated(made().to(device), device, **static, compile_config=everywhere)


@pytest.mark.parametrize("name", ["offloaded", "offloaded_static"])
def test_a_cache_that_calls_cuda_is_refused_elsewhere(
    device: torch.device, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stowed(folder, PLANS["disk"])
    if device.type == "cuda":
        prefetch = Cache.prefetch

        def ordered(*given: Any) -> None:  # noqa: ANN401
            """Until transformers 5 it did not wait for the copy down of what it copies up."""
            torch.accelerator.synchronize()
            prefetch(*given)

        monkeypatch.setattr(Cache, "prefetch", ordered)
        want = generated(made().to(device), device, do_sample=False)
        assert torch.equal(generated(model, device, cache_implementation=name), want)
        return
    with pytest.raises(OptionError, match="cache_implementation"):
        generated(model, device, cache_implementation=name)


@pytest.mark.parametrize(
    "plan",
    [Plan(), Plan(parameters="disk"), Plan(parameters="disk", weight_ram_budget="64MiB")],
    ids=["host", "disk", "room"],
)
@pytest.mark.parametrize("kind", ["plain", "nf4"])
def test_routed_experts_alone_go_to_the_device(
    tmp_path: Path, plan: Plan, kind: str, device: torch.device
) -> None:
    def mixtral() -> Any:  # noqa: ANN401
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8}
        config = MixtralConfig(vocab_size=WORDS, pad_token_id=0, **sizes, **heads)
        # Of the other ways one needs operations that the simulated accelerator lacks.
        model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
        return model.eval().requires_grad_(requires_grad=False)

    whole = mixtral()
    folder = tmp_path / "plain"
    whole.save_pretrained(folder)
    with torch.device("meta"):
        model = mixtral()
    if kind != "plain":
        folder = tmp_path / kind
        quantize_folder(tmp_path / "plain", folder, model, ENCODERS[kind], experts=True)
        files = PretrainedFiles(folder, model)
        for name, parameter in whole.named_parameters():
            parameter.data.copy_(files.reader([name], parameter)(0, len(parameter)))
    model, _ = tensorstow.stow(model, None, weights=folder, plan=plan)
    want = generated(whole.to(device), device, do_sample=False)
    assert torch.equal(generated(model, device, do_sample=False), want)
    stream = stream_of(model)
    assert stream is not None
    units = [unit for unit in stream.units if unit.experts]
    for unit in units:
        stream.device.drop(unit)
    used: list[frozenset[int]] = []
    for module in whole.modules():
        if is_of_experts(module):
            module.register_forward_pre_hook(
                lambda m, args: used.append(routed_experts(m, args, {}))
            )
    tokens = torch.tensor([[5]], device=device)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, whole(tokens).logits)
    # What is left of the call: buffers may have gone to others since.
    copied = [unit.copied_experts for unit in units if stream.device.get(unit) is not None]
    assert copied
    assert all(experts in used for experts in copied)
