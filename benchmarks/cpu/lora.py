"""Adapters of peft over a frozen base of Llama's shape on disk, and the same without ``stow``.

24 blocks of width 1024 in bf16, 0.5 GB. Each way trains in processes of its own, with the same
losses. Memory of its own is RssAnon and RssShmem of /proc/self/status; pages of mapped files
(RssFile), which the system takes back when it needs room, are counted apart. With ``stow`` the base
passes through buffers of a fixed size, which are memory of its own; without, all of it is mapped.
"""

import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tensorstow
from benchmarks.measure import Figure, Settings, as_child, at_most, exactly, run_alone, run_ways
from tensorstow import Plan
from tensorstow.fsdp.report import parameter_bytes
from tensorstow.report.rss import PeriodicSampler

_MODULE = "benchmarks.cpu.lora"
_SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24}
_QUICK = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
_CLASSES, _BATCH, _LENGTH = 4096, 1, 64
_WAYS = ("without stow", "mapped", "weights=")
_MIB = 1 << 20


def figures(settings: Settings) -> Iterator[Figure]:
    """Train by each way in turns, and compare losses, memory and seconds with those without us."""
    turns = 1 if settings.quick else 3
    with tempfile.TemporaryDirectory(dir=settings.scratch(4 << 30)) as folder:
        run_alone(_MODULE, "save", folder, quick=settings.quick)
        runs = run_ways(_MODULE, _WAYS, turns, folder, quick=settings.quick)
    theirs = runs["without stow"]
    for way in _WAYS[1:]:
        ours = runs[way]
        differ = sum(run["losses"] != theirs[0]["losses"] for run in ours)
        yield Figure(f"adapters, {way}: runs with other losses", exactly(0), differ, "")
        copied = max(run["frozen"] - run["in_files"] for run in ours)
        yield Figure(f"adapters, {way}: bytes of the base that are copied", exactly(0), copied, "")
        for what, named in _NAMES.items():
            most, least = (max(run[what] for run in ours), min(run[what] for run in theirs))
            extra = ours[0]["buffers"] + 64 * _MIB if what == "own" else 0
            detail = {"mib": most / _MIB, "without_mib": least / _MIB, "more_mib": extra / _MIB}
            name = f"adapters, {way}: peak of {named} / without stow"
            yield Figure(name, at_most(1.0), most / (least + extra), detail=detail)
        seconds = [statistics.median(run["seconds"] for run in each) for each in (ours, theirs)]
        name = f"adapters, {way}: seconds of a step / without stow"
        yield Figure(name, None, seconds[0] / seconds[1], detail={"seconds": seconds})


_NAMES = {
    "own": "memory of its own (less buffers and 64 MiB)",
    "file": "pages of mapped files",
    "all": "both",
}


# --- the child ---


class _Memory(PeriodicSampler):
    """The peaks of the process's memory, by kind."""

    def __init__(self) -> None:
        super().__init__("memory")
        self.peaks = {"own": 0, "file": 0, "all": 0}

    def take(self) -> None:
        text = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
        kinds = {k: int(n) << 10 for k, n in re.findall(r"Rss(\w+):\s*(\d+) kB", text)}
        own = kinds["Anon"] + kinds["Shmem"]
        now = {"own": own, "file": kinds["File"], "all": own + kinds["File"]}
        self.peaks = {kind: max(peak, now[kind]) for kind, peak in self.peaks.items()}


def _config(*, quick: bool) -> Any:  # noqa: ANN401  # transformers', which is optional
    from transformers import LlamaConfig  # noqa: PLC0415  # as it is here

    sizes = _QUICK if quick else _SIZES
    heads = {"num_attention_heads": sizes["hidden_size"] // 32, "num_key_value_heads": 2}
    return LlamaConfig(vocab_size=_CLASSES, **sizes, **heads)


def _adapted(way: str, folder: Path, *, quick: bool) -> Any:  # noqa: ANN401
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415  # optional
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    if way == "weights=":
        with torch.device("meta"):
            base = AutoModelForCausalLM.from_config(_config(quick=quick), dtype=torch.bfloat16)
            return get_peft_model(base, config)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return get_peft_model(base, config)


def _train(way: str, folder: Path, *, quick: bool) -> dict[str, Any]:
    steps = 3 if quick else 6
    with _Memory() as memory:
        model = _adapted(way, folder, quick=quick)
        make = partial(tensorstow.AdamW, lr=1e-3, durability="none")
        if way == "without stow":
            optimizer = make(model.named_parameters(), module=model)
        else:
            weights = folder if way == "weights=" else None
            plan = Plan(parameters="disk", states="host")
            model, optimizer = tensorstow.stow(
                model, make, plan=plan, weights=weights, dir=folder / "run"
            )
        generator = torch.Generator().manual_seed(1)
        losses, seconds = [], []
        for _ in range(steps):
            tokens = torch.randint(_CLASSES, (_BATCH, _LENGTH), generator=generator)
            begin = time.perf_counter()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - begin)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    result = {"losses": losses, "seconds": statistics.median(seconds[1:]), "frozen": frozen}
    held = parameter_bytes(model)
    result |= {"in_files": held.file_bytes, "buffers": held.most_buffer_pool_bytes}
    return result | memory.peaks


def _measure(way: str, folder: Path, *, quick: bool) -> dict[str, Any]:
    if way != "save":
        return _train(way, folder, quick=quick)
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_config(quick=quick), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    (folder / "run").mkdir()
    return {}


if __name__ == "__main__":
    as_child(_measure, ("save", *_WAYS))
