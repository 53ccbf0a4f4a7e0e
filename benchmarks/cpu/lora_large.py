"""Adapters over a frozen base of 7 billion parameters on disk: bf16, int8 and NF4.

Llama's shape, 34 blocks of width 4096, with random weights: 14.3 GB in bf16. `quantize_folder`
makes the other folders of it. Each way trains in a process of its own, which is to get along with
8 GB: the peak is of all its resident pages, those of mapped files too. Bytes are those of the reads
from the base's files, after the first step. The time of computing is that of one block in memory,
times 34, and of what is around the blocks; the raw read is of the same files twice, by the same
engine. The folders are removed at the end.
"""

import math
import re
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tensorstow
from benchmarks.cpu.lora import _Memory
from benchmarks.cpu.raw import RawFile, cut
from benchmarks.measure import Figure, Settings, as_child, at_most, exactly, run_alone
from tensorstow import Plan
from tensorstow.checkpoint.quantized_folder import quantize_folder
from tensorstow.checkpoint.weight_encoders import ENCODERS
from tensorstow.checkpoint.weight_files import INDEX, WeightFile, index_of, shard_name
from tensorstow.fsdp.report import parameter_bytes
from tensorstow.io.engine import open_engine
from tensorstow.io.files import open_file, reads_direct

_SIZES = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 34}
_QUICK = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
_CLASSES, _BATCH, _LENGTH, _STEPS = 32000, 1, 512, 4
_WAYS = ("bf16", "int8", "nf4")
_GIVEN = 8 * 10**9
"""Bytes of the machine that it is for."""
_FEW, _MORE = 2, 4
"""Blocks of the models in memory, by which the time of one is known."""


def figures(settings: Settings) -> Iterator[Figure]:
    """Train over each base, and compare memory, bytes and seconds with what they have to be."""
    with tempfile.TemporaryDirectory(dir=settings.scratch(32 << 30)) as name:
        folder = Path(name)
        _run("save", folder, settings)
        compute = _run("compute", folder, settings)["seconds"]
        for way in _WAYS:
            if way != "bf16":
                made = _run(f"quantize-{way}", folder, settings)
                peak = f"{way}: peak memory of quantizing, of its own / largest tensor in fp32"
                detail = {"mib": made["own"] / 2**20, "seconds": made["seconds"]}
                yield Figure(peak, None, made["own"] / made["largest"], detail=detail)
            ran = _run(way, folder, settings)
            yield from _figures_of(way, ran, _run(f"read-{way}", folder, settings), compute)


def _figures_of(
    way: str, ran: dict[str, Any], read: dict[str, Any], compute: float
) -> Iterator[Figure]:
    detail = {"gb": ran["file_bytes"] / 1e9, "parameters": ran["parameters"]}
    yield Figure(f"{way}: bytes of the base that are copied", exactly(0), ran["copied"], "")
    name = f"{way}: bytes read a step / bytes of the base"
    yield Figure(name, at_most(2.02), ran["read"] / ran["file_bytes"], detail=detail)
    detail = {"gb": ran["peak"] / 1e9, "buffers_gb": ran["buffers"] / 1e9}
    yield Figure(
        f"{way}: peak resident memory / 8 GB", at_most(1), ran["peak"] / _GIVEN, "", detail
    )
    bound = max(compute, read["seconds"])
    detail = {"seconds": ran["seconds"], "compute": compute, "raw_read": read["seconds"]}
    limit = at_most(1.10) if way == "bf16" else None
    name = f"{way}: seconds of a step / max(compute, raw read)"
    yield Figure(name, limit, ran["seconds"] / bound, detail=detail)


def _run(way: str, folder: Path, settings: Settings) -> dict[str, Any]:
    result = run_alone("benchmarks.cpu.lora_large", way, str(folder), quick=settings.quick)
    print(f"  {way}: {result}", file=sys.stderr, flush=True)
    return result


# --- the child ---


def _config(*, quick: bool, layers: int | None = None) -> Any:  # noqa: ANN401  # optional
    from transformers import LlamaConfig  # noqa: PLC0415  # as it is here

    sizes = dict(_QUICK if quick else _SIZES)
    sizes["num_hidden_layers"] = layers or sizes["num_hidden_layers"]
    heads = {"num_attention_heads": sizes["hidden_size"] // 128}
    return LlamaConfig(vocab_size=1000 if quick else _CLASSES, **sizes, **heads, use_cache=False)


def _on_meta(config: Any) -> Any:  # noqa: ANN401  # transformers'
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _save(folder: Path, *, quick: bool) -> dict[str, Any]:
    """Write random weights, a shard for each block; one block is in memory at a time."""
    from safetensors.torch import save_file  # noqa: PLC0415

    config = _config(quick=quick)
    shards: dict[str, dict[str, torch.Size]] = {}
    for name, parameter in _on_meta(config).named_parameters():
        block = re.match(r"model\.layers\.\d+", name)
        shards.setdefault(block[0] if block else "", {})[name] = parameter.shape
    base = folder / "bf16"
    base.mkdir()
    generator, values = torch.Generator().manual_seed(0), {}
    shard_of, total = {}, 0
    for number, shapes in enumerate(shards.values(), 1):
        file = shard_name("model", "safetensors", number, len(shards))
        tensors = {}
        for name, shape in shapes.items():
            if shape not in values:  # drawing all of them takes minutes
                spread = 1.0 if len(shape) == 1 else 0.02
                drawn = torch.randn(shape, generator=generator) * spread
                values[shape] = (drawn + (len(shape) == 1)).bfloat16()
            tensors[name] = values[shape] * (1 + number / 64)
            shard_of[name] = file
        save_file(tensors, base / file, {"format": "pt"})
        total += sum(tensor.nbytes for tensor in tensors.values())
    (base / INDEX).write_bytes(index_of(shard_of, total))
    config.save_pretrained(base)
    return {"bytes": total}


def _adapted(config: Any) -> Any:  # noqa: ANN401  # transformers', peft's
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415  # optional

    torch.manual_seed(0)
    return get_peft_model(_on_meta(config), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))


def _steps(model: Any, optimizer: Any, steps: int, words: int) -> list[float]:  # noqa: ANN401
    generator, seconds = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        tokens = torch.randint(words, (_BATCH, _LENGTH), generator=generator)
        begin = time.perf_counter()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    return seconds


_MAKE = partial(tensorstow.AdamW, lr=1e-4)


def _train(way: str, folder: Path, *, quick: bool) -> dict[str, Any]:
    config, read = _config(quick=quick), [0]
    read_file = WeightFile.read

    def counted(file: WeightFile, offset: int, into: torch.Tensor) -> Any:  # noqa: ANN401
        read[0] += into.numel()
        return read_file(file, offset, into)

    WeightFile.read = counted  # type: ignore[method-assign]
    with _Memory() as memory:
        model = _adapted(config)
        plan = Plan(parameters="disk", states="host", activations="recompute", prefetch=1)
        model, optimizer = tensorstow.stow(
            model,
            partial(_MAKE, durability="none"),
            plan=plan,
            weights=folder / way,
            dir=folder / f"run-{way}",
        )
        seconds = _steps(model, optimizer, 1, config.vocab_size)
        read[0] = 0
        seconds = _steps(model, optimizer, _STEPS - 1, config.vocab_size)
    held = parameter_bytes(model)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return {
        "seconds": statistics.median(seconds),
        "read": read[0] / (_STEPS - 1),
        "file_bytes": held.file_bytes,
        "copied": held.disk_bytes - held.file_bytes - _written(model),
        "buffers": held.most_buffer_pool_bytes,
        "parameters": sum(p.numel() for p in frozen),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        **memory.peaks,
    }


def _written(model: Any) -> int:  # noqa: ANN401
    return sum(p.nbytes for p in model.parameters() if p.requires_grad)


def _compute(*, quick: bool) -> dict[str, Any]:
    """Return the seconds of a step that nothing is read for: two models of few blocks in memory."""
    taken = {}
    for layers in (_FEW, _MORE):
        config = _config(quick=quick, layers=layers)
        model = _adapted(config)
        plan = Plan(parameters="device", states="host", activations="recompute")
        model, optimizer = tensorstow.stow(model, _MAKE, plan=plan, init=_fill)
        taken[layers] = statistics.median(_steps(model, optimizer, 4, config.vocab_size)[1:])
        optimizer.close()
        del model, optimizer
    block = (taken[_MORE] - taken[_FEW]) / (_MORE - _FEW)
    layers = _config(quick=quick).num_hidden_layers
    return {"seconds": taken[_FEW] + (layers - _FEW) * block, "block": block}


def _fill(module: torch.nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.data.fill_(0.01)
    reset = getattr(module, "compute_default_rope_parameters", None)
    if reset is not None:
        values, _ = reset(module.config, device="cpu")
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, values.to(buffer.dtype).clone(), persistent=False)


def _read(folder: Path) -> dict[str, Any]:
    """Read all files twice, 1 MiB at a time, as deep as the engine is."""
    total = 0.0
    for path in sorted(folder.glob("*.safetensors")) * 2:
        engine = open_engine(None if reads_direct(path) else "threads")
        file = open_file(engine, path)
        nbytes = path.stat().st_size // 4096 * 4096
        total += RawFile(engine, file.fd, 64 << 20).run(cut("read", 0, nbytes, 1 << 20))
        file.close()
    return {"seconds": total}


def _quantize(kind: str, folder: Path, *, quick: bool) -> dict[str, Any]:
    begin = time.perf_counter()
    model = _on_meta(_config(quick=quick))
    with _Memory() as memory:
        quantize_folder(folder / "bf16", folder / kind, model, ENCODERS[kind])
    largest = max(math.prod(p.shape) for p in model.parameters()) * 4
    return {"seconds": time.perf_counter() - begin, "largest": largest, **memory.peaks}


def _measure(way: str, folder: Path, *, quick: bool) -> dict[str, Any]:
    kind, _, rest = way.partition("-")
    if kind == "save":
        return _save(folder, quick=quick)
    if kind == "compute":
        return _compute(quick=quick)
    if kind == "read":
        return _read(folder / rest)
    if kind == "quantize":
        return _quantize(rest, folder, quick=quick)
    (folder / f"run-{kind}").mkdir()
    return _train(kind, folder, quick=quick)


if __name__ == "__main__":
    as_child(_measure)
