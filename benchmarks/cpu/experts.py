"""Generation by a mixture of experts on disk: bytes and seconds of a token, beside raw reads.

A model of Mixtral's shape in bf16, 2.5 GB, 2 of 8 experts for each token, one sequence, in fresh
processes. Beside it the same with whole layers read, as for any other block. The raw read is of as
many bytes as a token read, in pieces of a MiB, and passes the page cache by.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import tensorstow
from benchmarks.cpu.generation import read_raw
from benchmarks.measure import Figure, Settings, as_child, at_least, at_most, run_alone, run_ways
from tensorstow import Plan
from tensorstow.fsdp.read_only import stream_of
from tensorstow.fsdp.read_sources import ReadUnit
from tensorstow.fsdp.weight_stream import StreamedUnit
from tensorstow.nn.routed_experts import is_of_experts, routed_experts

_MODULE = "benchmarks.cpu.experts"
_SIZES = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 14}
_QUICK = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
_EXPERTS, _CLASSES, _PROMPT, _TOKENS = 8, 4096, 4, 12
_WAYS = ("routed", "whole layers")


def figures(settings: Settings) -> Iterator[Figure]:
    """Run both ways in turns."""
    turns = 1 if settings.quick else 3
    with tempfile.TemporaryDirectory(dir=settings.scratch(4 << 30)) as folder:
        run_alone(_MODULE, "save", folder, quick=settings.quick)
        runs = run_ways(_MODULE, _WAYS, turns, folder, quick=settings.quick)
    ours = runs["routed"]
    yield Figure(
        "experts on disk: bytes of experts read / bytes of those that tokens are routed to",
        at_most(1.0),
        max(run["read_of_experts"] / run["routed"] for run in ours),
        detail={"mib_per_token": {w: runs[w][0]["per_token"] >> 20 for w in _WAYS}},
    )
    seconds = {way: statistics.median(run["seconds"] for run in runs[way]) for way in _WAYS}
    yield Figure(
        "experts on disk: seconds to read the bytes of a token raw / of a token",
        None,
        statistics.median(run["raw"] / run["seconds"] for run in ours),
        detail={"seconds": seconds},
    )
    yield Figure(
        "experts on disk: tokens per second / whole layers read",
        None if settings.quick else at_least(1.5),
        seconds["whole layers"] / seconds["routed"],
    )


# --- the child ---


def _make(*, quick: bool) -> Any:  # noqa: ANN401  # transformers', which is optional
    from transformers import AutoModelForCausalLM, MixtralConfig  # noqa: PLC0415

    sizes = _QUICK if quick else _SIZES
    heads = {"num_attention_heads": sizes["hidden_size"] // 32, "num_key_value_heads": 2}
    ends = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    config = MixtralConfig(
        vocab_size=_CLASSES, num_local_experts=_EXPERTS, **sizes, **heads, **ends
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def _measure(way: str, folder: Path, *, quick: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    if way == "save":
        _make(quick=quick).save_pretrained(folder)
        return {}
    if way == "whole layers":
        ReadUnit.experts = 0  # type: ignore[assignment, method-assign]
    with torch.device("meta"):
        model = _make(quick=quick)
    routed: dict[str, list[int]] = {"experts": [], "bytes": []}
    for module in model.modules():
        if is_of_experts(module):
            nbytes = sum(p[0].numel() * p.element_size() for p in module.parameters())

            def note(called: Any, args: Any, nbytes: int = nbytes) -> None:  # noqa: ANN401
                routed["bytes"].append(nbytes * len(routed_experts(called, args, {})))

            module.register_forward_pre_hook(note)
    model, _ = tensorstow.stow(model, None, plan=Plan(parameters="disk"), weights=folder)
    stream: Any = stream_of(model)
    reads_of, of_experts = StreamedUnit.reads_of, [0]

    def counted(unit: StreamedUnit, experts: Any) -> Any:  # noqa: ANN401
        reads = reads_of(unit, experts)
        of_experts[0] += sum(run.nbytes for run in reads) if "experts" in unit.name else 0
        return reads

    StreamedUnit.reads_of = counted  # type: ignore[method-assign]
    prompt = torch.arange(_PROMPT).view(1, -1) % _CLASSES + 1
    _generate(model, prompt, 2)
    before = stream.bytes_read
    routed["bytes"].clear()
    of_experts[0] = 0
    seconds = _generate(model, prompt, _TOKENS)
    per_token = (stream.bytes_read - before) // _TOKENS
    file = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    return {
        "seconds": seconds / _TOKENS,
        "per_token": per_token,
        "routed": sum(routed["bytes"]),
        "read_of_experts": of_experts[0],
        "raw": read_raw(file, min(per_token, file.stat().st_size)),
    }


def _generate(model: Any, prompt: torch.Tensor, tokens: int) -> float:  # noqa: ANN401
    start = time.perf_counter()
    model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False
    )
    return time.perf_counter() - start


if __name__ == "__main__":
    as_child(_measure, ("save", *_WAYS))
