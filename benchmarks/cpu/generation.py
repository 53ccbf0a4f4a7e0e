"""Generation by a model of Llama's shape, weights on disk, beside accelerate; fresh processes.

24 blocks of width 1024 and 4096 classes in fp32, 1.3 GB: two cores multiply a batch of 8 faster
than a disk reads. accelerate reads through the page cache, which would hold this model and not one
that is larger than memory: so in its runs the cache of its files is dropped before each token; how
fast it is from the cache is told beside that. Ours passes the cache by.

Per token of the batch every weight is read once: the seconds of a token are compared with a raw
read of as many bytes of the same file, in turns.
"""

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import tensorstow
from benchmarks.cpu.raw import RawFile, cut
from benchmarks.measure import Figure, Settings, as_child, at_least, at_most, run_alone, run_ways
from tensorstow import Plan
from tensorstow.fsdp.read_only import stream_of
from tensorstow.io.engine import open_engine
from tensorstow.report.rss import peak_bytes, resident_bytes, return_freed_memory

_MODULE = "benchmarks.cpu.generation"
_SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24}
_QUICK = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
_CLASSES, _BATCH, _PROMPT = 4096, 8, 16
_INT8 = "ours in int8"
_PEERS = ("disk_offload", "disk_offload from the page cache", "cpu_offload")
_WAYS = ("ours", *_PEERS, "in memory", _INT8)
_MIB = 1 << 20


def figures(settings: Settings) -> Iterator[Figure]:
    """Run all ways in turns, each in a process of its own that generates several times."""
    turns = 1 if settings.quick else 3
    with tempfile.TemporaryDirectory(dir=settings.scratch(8 << 30)) as folder:
        run_alone(_MODULE, "save", folder, quick=settings.quick)
        runs = run_ways(_MODULE, _WAYS, turns, folder, quick=settings.quick)
    ours = runs["ours"]
    read = statistics.median(r["raw"] / r["seconds"] for run in ours for r in run["rounds"])
    rates = {way: _rate(found) for way, found in runs.items() if "why" not in found[0]}
    yield Figure(
        "generation from disk: seconds to read the weights raw / of a token",
        at_least(0.9),
        read,
        detail={"tokens_per_second": rates, "weights_mib": ours[0]["weights"] // _MIB},
    )
    for way in _WAYS[1:]:
        limit = at_least(2.0) if way == "disk_offload" else None
        name = f"generation from disk: tokens per second / {way}"
        if "why" in runs[way][0]:
            yield Figure(name, limit, None, detail={"why": runs[way][0]["why"]})
        else:
            yield Figure(name, limit, rates["ours"] / rates[way])
    yield Figure(
        "generation from disk: host memory / buffers, cache and 64 MiB",
        at_most(1.0),
        max(run["grown"] / (run["lent"] + run["cache"] + 64 * _MIB) for run in ours),
        detail={"mib": {key: ours[0][key] // _MIB for key in ("grown", "lent", "cache")}},
    )


def _rate(runs: list[dict[str, Any]]) -> float:
    return _BATCH / statistics.median(r["seconds"] for run in runs for r in run["rounds"])


# --- the child ---


def _config(*, quick: bool) -> Any:  # noqa: ANN401  # transformers', which is optional
    from transformers import LlamaConfig  # noqa: PLC0415  # as it is here

    sizes = _QUICK if quick else _SIZES
    heads = {"num_attention_heads": sizes["hidden_size"] // 32, "num_key_value_heads": 2}
    ends = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    return LlamaConfig(vocab_size=_CLASSES, **sizes, **heads, **ends)


def _make(*, quick: bool) -> Any:  # noqa: ANN401
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    return AutoModelForCausalLM.from_config(_config(quick=quick), dtype=torch.float32).eval()


def _measure(way: str, folder: Path, *, quick: bool) -> dict[str, Any]:
    if way == "save":
        torch.manual_seed(0)
        _make(quick=quick).save_pretrained(folder, max_shard_size="100GB")
        return {}
    rounds, tokens = (1, 2) if quick else (3, 8)
    file = folder / "model.safetensors"
    result: dict[str, Any] = {"rounds": []}
    if way in {"ours", _INT8}:
        with torch.device("meta"):
            model = _make(quick=quick)
        files = folder if way == "ours" else tensorstow.quantize_to_int8(model, file, folder / "8")
        _touch_libraries()
        return_freed_memory()
        before = resident_bytes()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is that of now
        model, _ = tensorstow.stow(model, None, plan=Plan(parameters="disk"), weights=files)
    else:
        from safetensors.torch import load_file  # noqa: PLC0415

        model = _make(quick=quick)
        model.load_state_dict(load_file(file), strict=False)
        if way != "in memory":
            try:
                model = _offloaded(model, way, folder)
            except ImportError as error:
                return {"why": str(error)}
    prompt = torch.arange(_BATCH * _PROMPT).view(_BATCH, _PROMPT) % _CLASSES
    for _ in range(rounds):
        seconds = _generate(model, prompt, tokens)
        result["rounds"].append({"seconds": seconds})
    if way == "ours":
        stream = stream_of(model)
        if stream is None:
            message = "The benchmark's model was to be on disk and is in memory."
            raise AssertionError(message)
        config = _config(quick=quick)
        head = config.hidden_size // config.num_attention_heads
        width = 2 * config.num_key_value_heads * head * config.num_hidden_layers
        result["grown"] = (peak_bytes() or 0) - before
        result["lent"] = stream.host.memory.capacity
        result["cache"] = 4 * width * _BATCH * (_PROMPT + tokens)
        result["weights"] = sum(p.nbytes for p in model.parameters())
        for each in result["rounds"]:
            each["raw"] = read_raw(file, result["weights"])
            each["seconds"] = _generate(model, prompt, tokens)
    return result


def _touch_libraries() -> None:
    """Let what is loaded late be loaded before memory is measured."""
    a = torch.ones(64, 64)
    torch.nn.functional.scaled_dot_product_attention(a[None], a[None], a[None])


def _generate(model: Any, prompt: torch.Tensor, tokens: int) -> float:  # noqa: ANN401
    """Return the median seconds of a token behind the first, which has the whole prompt."""
    ends: list[float] = []
    with model.register_forward_hook(lambda *_: ends.append(time.perf_counter())):
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens + 1,
            do_sample=False,
        )
    return statistics.median(b - a for a, b in itertools.pairwise(ends))


def read_raw(file: Path, nbytes: int) -> float:
    """Return the seconds in which the engine reads as many bytes of the file."""
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    try:
        raw = RawFile(open_engine(), fd, 64 * _MIB)
        whole = nbytes // 4096 * 4096
        return raw.run(cut("read", 0, whole, _MIB))
    finally:
        os.close(fd)


def _offloaded(model: Any, way: str, folder: Path) -> Any:  # noqa: ANN401
    """Return the model as accelerate offloads it."""
    import accelerate  # noqa: PLC0415  # optional

    if way == "cpu_offload":
        return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    place = folder / "offloaded"
    model = accelerate.disk_offload(model, str(place), execution_device=torch.device("cpu"))
    if way == "disk_offload":
        model.register_forward_pre_hook(_dropping(place), prepend=True)
    return model


def _dropping(place: Path) -> Callable[..., None]:
    """Return a hook that drops a folder's files from the page cache."""
    files = [os.open(path, os.O_RDONLY) for path in sorted(place.iterdir())]
    for fd in files:
        os.fsync(fd)

    def drop(*_: object) -> None:
        for fd in files:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    return drop


if __name__ == "__main__":
    as_child(_measure, ("save", *_WAYS))
