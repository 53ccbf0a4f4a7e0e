"""Loss curves of delayed updates beside exact ones, on the seed example's GPT-2.

Both runs see the same few batches again and again, so that the loss falls. During warm-up every
loss is that of the exact run, bit for bit; after it each gradient is one update late.
"""

import importlib.util
import statistics
from collections.abc import Iterator, Mapping

import torch

from benchmarks.cpu.models import SMALL, gpt2
from benchmarks.measure import Figure, Settings, exactly, not_available, use_all_cores
from tensorstow import AdamW, DelayedUpdate

COMMAND = "python benchmarks/run.py delayed"
WARMUP = 40
"""The number of the paper of ZeRO-Offload."""
_STEPS, _SMALL_STEPS = 120, 48
_BATCHES = 8
_BATCH, _SMALL_BATCH = (1, 64), (2, 16)
_LAST = 10
"""Steps at the end over which the final loss is averaged."""


def figures(settings: Settings) -> Iterator[Figure]:
    """Train twice; yield the curves and what sets them apart."""
    if importlib.util.find_spec("transformers") is None:
        yield not_available("delayed updates", None, "transformers is not installed")
        return
    use_all_cores()
    curves = {
        "exact": _train("none", quick=settings.quick),
        "delayed": _train(DelayedUpdate(warmup_steps=WARMUP), quick=settings.quick),
    }
    yield from judge(curves)


def judge(curves: Mapping[str, list[float]]) -> Iterator[Figure]:
    """Yield the figures of two loss curves."""
    exact, delayed = curves["exact"], curves["delayed"]
    # The loss of a step is computed before its update: the first that can differ is WARMUP + 2.
    apart = sum(one != other for one, other in zip(exact[: WARMUP + 1], delayed, strict=False))
    yield Figure("delayed updates: losses of the warm-up that differ", exactly(0), apart, "")
    for way, losses in curves.items():
        last = statistics.fmean(losses[-_LAST:])
        detail = {"command": COMMAND, "warmup_steps": WARMUP, "losses": losses}
        yield Figure(f"{way}: loss of the last {_LAST} steps", None, last, "", detail)


def _train(overlap: object, *, quick: bool) -> list[float]:
    model = gpt2(**SMALL if quick else {}).eval()  # no dropout: the curves compare updates
    rows, columns = _SMALL_BATCH if quick else _BATCH
    ids = torch.randint(model.config.vocab_size, (_BATCHES, rows, columns))
    optimizer = AdamW(model.parameters(), lr=1e-4, states="host", module=model, overlap=overlap)
    losses = []
    for step in range(_SMALL_STEPS if quick else _STEPS):
        batch = ids[step % _BATCHES]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.close()
    return losses
