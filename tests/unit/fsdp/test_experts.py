"""Mixtures of experts with weights on disk: only the experts that tokens are routed to are read."""

import errno
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tensorstow
from tensorstow import Plan
from tensorstow.base.errors import OptionError, StoreFormatError
from tensorstow.checkpoint.pretrained import PretrainedFiles
from tensorstow.checkpoint.quantized_folder import quantize_folder
from tensorstow.checkpoint.weight_encoders import ENCODERS
from tensorstow.checkpoint.weight_files import WeightFile
from tensorstow.fsdp.experts import take_experts
from tensorstow.fsdp.read_only import stream_of
from tensorstow.fsdp.units import Unit
from tensorstow.fsdp.weight_stream import StreamedUnit
from tensorstow.io.file_runs import Run
from tensorstow.io.files import IoFuture
from tensorstow.nn.routed_experts import is_of_experts, routed_experts

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 8}),
    "qwen3": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16},
    ),
    "deepseek": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            "num_key_value_heads": 2,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "first_k_dense_replace": 1,
        },
    ),
}


def made(family: str, dtype: torch.dtype = torch.float32) -> Any:  # noqa: ANN401  # another library's
    import transformers  # noqa: PLC0415  # takes seconds

    model_class, config_class, sizes = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**SIZES | sizes)
    return getattr(transformers, model_class)(config).to(dtype).eval()


class Routed:
    """The experts that the calls of a model's modules use, and their bytes."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[tuple[str, frozenset[int]]] = []
        self.nbytes: dict[str, int] = {}
        for name, module in model.named_modules():
            if is_of_experts(module):
                self.nbytes[name] = sum(
                    p[0].numel() * p.element_size() for p in module.parameters()
                )
                module.register_forward_pre_hook(partial(self._note, name))

    def _note(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.calls.append((name, routed_experts(module, args, {})))

    @property
    def bytes(self) -> int:
        """Those of the experts of all calls."""
        return sum(len(experts) * self.nbytes[name] for name, experts in self.calls)


class Reads:
    """The bytes that streams read of experts, and of anything else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of_experts = self.of_others = 0
        reads_of = StreamedUnit.reads_of

        def noted(unit: StreamedUnit, experts: frozenset[int]) -> Sequence[Run]:
            reads = reads_of(unit, experts)
            nbytes = sum(run.nbytes for run in reads)
            self.of_experts += nbytes if unit.experts else 0
            self.of_others += 0 if unit.experts else nbytes
            return reads

        monkeypatch.setattr(StreamedUnit, "reads_of", noted)


def on_disk(folder: Path, family: str, dtype: torch.dtype, **options: Any) -> Any:  # noqa: ANN401
    with torch.device("meta"):
        model = made(family, dtype)
    plan = Plan(parameters="disk", **options)
    return tensorstow.stow(model, None, plan=plan, weights=folder)[0]


def assert_same_logits(model: nn.Module, whole: nn.Module, tokens: torch.Tensor) -> None:
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, whole(tokens).logits)


@pytest.fixture
def mixtral(tmp_path: Path) -> nn.Module:
    """Return a Mixtral that is saved in ``tmp_path``."""
    whole = made("mixtral")
    whole.save_pretrained(tmp_path)
    return whole


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_routed_experts_alone_are_read(
    tmp_path: Path, family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = made(family, dtype)
    whole.save_pretrained(tmp_path, max_shard_size="100KB")
    model = on_disk(tmp_path, family, dtype)
    routed, reads = Routed(whole), Reads(monkeypatch)
    tokens = torch.randint(1, 64, (1, 1))
    assert_same_logits(model, whole, tokens)
    everything = sum(p.numel() for n, p in whole.named_parameters() if ".experts." in n)
    assert 0 < 2 * routed.bytes <= everything * dtype.itemsize
    assert reads.of_experts == routed.bytes
    assert reads.of_others > 0


def test_experts_that_are_in_memory_still_are_not_read_again(
    tmp_path: Path, mixtral: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = on_disk(tmp_path, "mixtral", torch.float32, weight_ram_budget="64MiB")
    routed, reads = Routed(mixtral), Reads(monkeypatch)
    how = {"max_new_tokens": 6, "do_sample": False}
    tokens = torch.randint(1, 64, (1, 3))
    how["attention_mask"] = torch.ones_like(tokens)
    assert torch.equal(model.generate(tokens, **how), mixtral.generate(tokens, **how))
    once = sum(
        len(frozenset[int]().union(*(e for n, e in routed.calls if n == name))) * nbytes
        for name, nbytes in routed.nbytes.items()
    )
    assert reads.of_experts == once < routed.bytes


@pytest.mark.parametrize("budget", [None, "64MiB"])
def test_generation_has_the_tokens_of_the_model_in_memory(
    tmp_path: Path, budget: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = made("qwen3", torch.bfloat16)
    whole.save_pretrained(tmp_path)
    options = {} if budget is None else {"weight_ram_budget": budget}
    model = on_disk(tmp_path, "qwen3", torch.bfloat16, prefetch=1, **options)
    routed, reads = Routed(whole), Reads(monkeypatch)
    tokens = torch.randint(1, 64, (2, 5))
    how = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    assert torch.equal(model.generate(tokens, **how), whole.generate(tokens, **how))
    assert 0 < reads.of_experts <= routed.bytes


def test_values_of_another_dtype_are_cast_expert_by_expert(tmp_path: Path) -> None:
    whole = made("mixtral", torch.bfloat16)
    whole.save_pretrained(tmp_path)
    model = on_disk(tmp_path, "mixtral", torch.float32, weight_ram_budget="64MiB")
    wide = whole.float()
    for number in range(1, 6):
        tokens = torch.tensor([[number]])
        assert_same_logits(model, wide, tokens)


def coded(folder: Path, family: str, kind: str) -> tuple[Path, Any]:
    """Write a folder in which experts are codes; return it, and a model of its values."""
    made(family, torch.bfloat16).save_pretrained(folder / "base", max_shard_size="100KB")
    with torch.device("meta"):
        model = made(family, torch.bfloat16)
    target = folder / kind
    quantize_folder(folder / "base", target, model, ENCODERS[kind], experts=True)
    files = PretrainedFiles(target, model)
    whole = made(family, torch.bfloat16)
    for name, parameter in whole.named_parameters():
        rows = len(parameter) if parameter.ndim else 0
        parameter.data.copy_(files.reader([name], parameter)(0, rows))
    return target, whole


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_codes_of_routed_experts_alone_are_read(
    tmp_path: Path, family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, whole = coded(tmp_path, family, kind)
    original = made(family, torch.bfloat16)
    (name, stack), *_ = ((n, p) for n, p in whole.named_parameters() if p.ndim == 3)
    assert not torch.equal(stack, original.state_dict()[name])
    assert (stack - original.state_dict()[name]).abs().max() < stack.abs().max() / 4
    model = on_disk(folder, family, torch.bfloat16)
    routed, reads = Routed(whole), Reads(monkeypatch)
    for number in range(1, 4):
        tokens = torch.tensor([[number]])
        assert_same_logits(model, whole, tokens)
    # Two bytes of an element are one, or half of one; scales of so small matrices take as much.
    share = {"int8": (0.5, 0.75), "nf4": (0.25, 0.4)}[kind]
    assert share[0] * routed.bytes <= reads.of_experts <= share[1] * routed.bytes


@pytest.mark.parametrize("tier", ["disk", "host", "device"])
def test_experts_as_codes_have_the_decoded_values_on_each_tier(tmp_path: Path, tier: str) -> None:
    folder, whole = coded(tmp_path, "mixtral", "nf4")
    with torch.device("meta"):
        model = made("mixtral", torch.bfloat16)
    model, _ = tensorstow.stow(model, None, plan=Plan(parameters=tier), weights=folder)
    tokens = torch.randint(1, 64, (2, 5))
    assert_same_logits(model, whole, tokens)


def test_experts_of_which_some_are_codes_are_read_as_wholes(tmp_path: Path) -> None:
    folder, whole = coded(tmp_path, "mixtral", "int8")
    (path, *_) = sorted(folder.glob("*.safetensors"))
    stored, values = load_file(path), PretrainedFiles(folder)
    name = next(n for n in stored if "experts.0.w1" in n and not n.endswith("_scale"))
    stored[name] = values._values(name).bfloat16()
    del stored[f"{name}_scale"]
    for digests in folder.glob("*.digests"):
        digests.unlink()
    save_file(stored, path, {"format": "pt"})
    with torch.device("meta"):
        model = made("mixtral", torch.bfloat16)
    model, _ = tensorstow.stow(model, None, plan=Plan(parameters="device"), weights=folder)
    tokens = torch.randint(1, 64, (2, 5))
    assert_same_logits(model, whole, tokens)
    with pytest.raises(OptionError):
        on_disk(folder, "mixtral", torch.bfloat16)


def test_a_plan_names_experts_or_the_block_that_they_are_in(
    tmp_path: Path, mixtral: nn.Module
) -> None:
    units = {"model.layers.0.mlp.experts": "host", "model.layers.1": "host"}
    model = on_disk(tmp_path, "mixtral", torch.float32, parameter_units=units)
    stream = stream_of(model)
    assert stream is not None
    assert [u.name for u in stream.units if u.experts] == ["model.layers.2.mlp.experts"]
    assert "model.layers.0" in {u.name for u in stream.units}
    assert "model.layers.1" not in {u.name for u in stream.units}
    tokens = torch.randint(1, 64, (2, 5))
    assert_same_logits(model, mixtral, tokens)


def test_two_threads_use_other_experts_of_one_unit(tmp_path: Path, mixtral: nn.Module) -> None:
    model = on_disk(tmp_path, "mixtral", torch.float32, weight_ram_budget="64MiB")
    inputs = [torch.tensor([[number]]) for number in range(1, 9)]

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(tokens).logits

    with ThreadPoolExecutor(4) as pool:
        both = list(pool.map(logits, inputs * 4))
    with torch.no_grad():
        wanted = [mixtral(tokens).logits for tokens in inputs] * 4
    assert all(map(torch.equal, both, wanted))


def test_a_read_that_fails_is_tried_again(
    tmp_path: Path, mixtral: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = on_disk(tmp_path, "mixtral", torch.float32)
    tokens = torch.tensor([[3]])
    read = WeightFile.read

    def broken(file: WeightFile, offset: int, into: torch.Tensor) -> IoFuture:
        if into.numel() == mixtral.model.layers[0].mlp.experts.down_proj[0].nbytes:
            raise OSError(errno.EIO, "broken")
        return read(file, offset, into)

    with monkeypatch.context() as patched:
        patched.setattr(WeightFile, "read", broken)
        with pytest.raises(OSError, match="broken"), torch.no_grad():
            model(tokens)
    assert_same_logits(model, mixtral, tokens)


def test_a_read_that_fails_leaves_a_call_under_way_its_experts(
    tmp_path: Path, mixtral: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = on_disk(tmp_path, "mixtral", torch.float32)
    stream = stream_of(model)
    assert stream is not None
    call, other, *_ = (call for call in stream.calls if call.unit.experts)
    wanted = dict(mixtral.named_parameters())
    stream.enter(call, frozenset({0}))
    read = WeightFile.read

    def broken(file: WeightFile, offset: int, into: torch.Tensor) -> IoFuture:
        if into.numel():
            raise OSError(errno.EIO, "broken")
        return read(file, offset, into)

    with monkeypatch.context() as patched:
        patched.setattr(WeightFile, "read", broken)
        with pytest.raises(OSError, match="broken"):
            stream.enter(call, frozenset({1}))
    stream.enter(other, frozenset(range(8)))  # would have the memory if that were free
    for tensor, weight in zip(call.unit.tensors, call.unit.attached, strict=True):
        assert torch.equal(weight[0], wanted[tensor.name][0])
    stream.leave(other)
    stream.enter(call, frozenset({1}))
    for tensor, weight in zip(call.unit.tensors, call.unit.attached, strict=True):
        assert torch.equal(weight[:2], wanted[tensor.name][:2])
    for _ in range(2):
        stream.leave(call)


def test_parameters_that_other_modules_use_stay_in_their_block() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.ones(4, 2, 3))

        def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor) -> torch.Tensor:
            return hidden @ self.up[top_k_index[0]].T

    class Adapter(nn.Module):  # peft's adds to its base layer's parameters before it calls it
        def __init__(self, base_layer: nn.Module) -> None:
            super().__init__()
            self.base_layer = base_layer

    def taken(block: nn.Module) -> list[str]:
        unit = Unit("block", block, {f"block.{n}": p for n, p in block.named_parameters()})
        return [part.name for part in take_experts(unit)]

    first, second = Experts(), Experts()
    block = nn.ModuleDict({"first": first, "second": second})
    assert taken(block) == ["block.first", "block.second"]
    second.up = first.up
    assert taken(block) == []
    assert taken(nn.ModuleDict({"mlp": Adapter(Experts())})) == []


def test_a_hook_that_routes_tokens_to_experts_that_were_not_read_is_refused(
    tmp_path: Path, mixtral: nn.Module
) -> None:
    model = on_disk(tmp_path, "mixtral", torch.float32)

    def others(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, indices, weights = args
        return hidden, (indices + 1) % 8, weights

    handle = model.model.layers[1].mlp.experts.register_forward_pre_hook(others)
    tokens = torch.tensor([[3, 5]])
    with torch.no_grad():
        with pytest.raises(OptionError, match="top_k_index of a MixtralExperts has experts"):
            model(tokens)
        handle.remove()
        assert torch.equal(model(tokens).logits, mixtral(tokens).logits)


def test_an_expert_of_another_shape_is_named(tmp_path: Path) -> None:
    made("mixtral").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    name = next(n for n in stored if "layers.1" in n and "experts.3.w1" in n)
    save_file({**stored, name: stored[name][:-1].clone()}, path)
    with pytest.raises(StoreFormatError, match=f"'{name}' of shape .47, 32., and they do not fit"):
        on_disk(tmp_path, "mixtral", torch.float32)
