"""Bytes over the link between host and device, by the counters of what carries them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from benchmarks.accelerator.place import Place, cpu_as_device
from benchmarks.accelerator.transformer import TINY, Decoder, elements_of
from benchmarks.measure import Figure, exactly
from tensorstow import usage
from tensorstow.base.plan import Plan
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import Overlap
from tensorstow.fsdp.report import parameter_bytes
from tensorstow.fsdp.sharding import make_mesh
from tensorstow.fsdp.stow import stow
from tensorstow.optim.adam import AdamW
from tensorstow.optim.stowed_adam import StowedAdam

_STEPS = 3
_WARM_UP = 2  # the first step fetches the weights too


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One way of training a bf16 model whose states are on HOST."""

    parameters: Tier = Tier.DEVICE
    stowed: bool = True
    """By ``stow``; False: by the optimizer alone."""
    overlap: Overlap = "none"
    clip: float | None = None
    micro_batches: int = 1

    def __str__(self) -> str:
        """Say it."""
        words = [
            f"parameters on {self.parameters.name}",
            "stow" if self.stowed else "the optimizer alone",
            f"overlap {self.overlap}",
            "clipped" if self.clip is not None else "",
            f"{self.micro_batches} micro-batches" if self.micro_batches > 1 else "",
        ]
        return ", ".join(w for w in words if w)


def figures() -> Iterator[Figure]:
    """Count on the CPU in the device's place; parameters on HOST go up for forward and backward."""
    asked: list[tuple[RunConfig, float, float]] = [
        (RunConfig(stowed=False), 2, 2),
        (RunConfig(), 2, 2),
        (RunConfig(clip=1.0), 2, 2),
        # Each goes down, and they are summed on HOST.
        (RunConfig(micro_batches=4), 8, 2),
        (RunConfig(stowed=False, micro_batches=4), 2, 2),
    ]
    for config, down, up in asked:
        found = counted(config)
        for word, limit, value in (("down", down, found[0]), ("up", up, found[1])):
            name = f"link bytes per bf16 parameter and step, {word}: {config}"
            note = {"note": "CPU in the device's place"}
            yield Figure(name, exactly(limit), value, "bytes", note)
    for config in (RunConfig(Tier.HOST), RunConfig(Tier.HOST, micro_batches=4)):
        for word, value in zip(("down", "up"), counted(config), strict=True):
            name = f"link bytes per bf16 parameter and step, {word}: {config}"
            yield Figure(name, None, value, "bytes", {"note": "CPU in the device's place"})


def counted(config: RunConfig) -> tuple[float, float]:
    """Train on the CPU in the device's place; return the bytes (down, up) per parameter and step.

    Needs a process group, or none: then it starts one.
    """
    with cpu_as_device() as place:
        plain = Decoder(TINY)
        elements = elements_of(plain)
        model, optimizer = _made(config, place, plain)
        ids = torch.randint(TINY.vocabulary, (2, TINY.length), generator=torch.Generator())
        counts = []
        for _ in range(_WARM_UP + _STEPS + 1):
            out = model(ids)
            # After forward. At the end of a step, the copies that have begun for the next one are
            # as many as there are weights that are updated by then.
            counts.append(moved(model, optimizer))
            _finish_step(config, model, optimizer, out, ids)
        optimizer.close()
    before, after = counts[_WARM_UP], counts[-1]
    down, up = ((b - a) / elements / _STEPS for a, b in zip(before, after, strict=True))
    return down, up


def _made(config: RunConfig, place: Place, model: nn.Module) -> tuple[nn.Module, StowedAdam]:
    if not config.stowed:
        steps = {"accumulation_steps": config.micro_batches}
        given = {"overlap": config.overlap, **(steps if config.overlap == "backward" else {})}
        place.put(model)
        return model, AdamW(model.parameters(), lr=1e-3, module=model, **given)  # type: ignore[arg-type]
    plan = Plan(
        parameters=config.parameters,
        overlap=config.overlap,
        accumulation_steps=config.micro_batches,
    )
    if config.parameters == Tier.DEVICE:
        place.put(model)
        mesh = None
    else:  # without one, a CPU has nothing to shard nor to move
        mesh = make_mesh(place.device, stage=3, replicas=1)
    return stow(model, partial(AdamW, lr=1e-3), plan=plan, mesh=mesh)


def _finish_step(
    config: RunConfig,
    model: nn.Module,
    optimizer: StowedAdam,
    loss: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    loss.backward()
    for _ in range(config.micro_batches - 1):
        model(ids).backward()
    if config.clip is not None:
        optimizer.clip_grad_norm_(config.clip)
    optimizer.step()
    optimizer.wait()
    optimizer.zero_grad()


def moved(model: nn.Module, optimizer: StowedAdam) -> tuple[int, int]:
    """Return the bytes that came down so far, and went up: by the optimizer and by gathers."""
    states, weights = usage(optimizer=optimizer).traffic, parameter_bytes(model)
    return (
        states.bytes_down + weights.link_bytes_down,
        states.bytes_up + weights.link_bytes_up,
    )
