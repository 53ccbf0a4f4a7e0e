"""What ranks do with a booster."""

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ranks.stowed import STEPS, RunConfig, finish, loss_of, model_for
from ranks.twin import weights_of as whole
from tensorstow.colossalai.adam import HybridAdam
from tensorstow.colossalai.booster import Booster
from tensorstow.colossalai.booster.plugin import GeminiPlugin, Plugin
from tensorstow.fsdp.sharding import current_device
from tensorstow.tensors.dtensor import layout_of


def model_of() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(16, 4))


def batch(step: int, rank: int = 0) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))


def losses_on_all(
    plugin: type[Plugin],
    given: dict[str, Any],
    mesh: bool = False,  # noqa: FBT001, FBT002  # sent to the ranks by position
    unsynced: bool = False,  # noqa: FBT001, FBT002
    micro_batches: int = 1,
) -> Any:  # noqa: ANN401
    """Train, and return this rank's losses; or the shape of the mesh that parameters are on.

    ``unsynced``: there are two micro-batches, of which the first is not reduced.
    """
    rank = torch.distributed.get_rank()
    booster = Booster(plugin=plugin(**given))
    model = model_of()
    model, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=1e-2))
    parts = 2 if unsynced else micro_batches
    losses = []
    for step in range(3):
        for part in range(parts):
            first = unsynced and part == 0
            with booster.no_sync(model, optimizer) if first else nullcontext():
                loss = model(batch(step, rank + 100 * part)).square().mean()
                booster.backward(loss, optimizer)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    shape: Any = None
    if mesh:
        (parameter, *_) = model.parameters()
        shape = tuple(layout_of(parameter).device_mesh.shape)
    optimizer.zero_grad()
    if hasattr(optimizer.unwrap(), "close"):
        optimizer.unwrap().close()
    return shape if mesh else losses


def goes_on(plugin: type[Plugin], given: dict[str, Any], folder: str, shard: bool) -> bool:  # noqa: FBT001
    """Save a run, go on, load it into another, go on alike; return whether both are equal."""
    rank = torch.distributed.get_rank()
    booster = Booster(plugin=plugin(**given))

    def boosted(seed: int) -> tuple[nn.Module, Any]:
        model = model_of()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(seed)
        placed, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=1e-2))
        return placed, optimizer

    def train(model: nn.Module, optimizer: Any, steps: range) -> None:  # noqa: ANN401
        for step in steps:
            booster.backward(model(batch(step, rank)).float().square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = boosted(0)
    train(model, optimizer, range(2))
    booster.save_model(model, Path(folder) / "m", shard=shard)
    booster.save_optimizer(optimizer, Path(folder) / "o", shard=shard)
    train(model, optimizer, range(2, 4))
    again, other = boosted(1)
    booster.load_model(again, Path(folder) / "m")
    booster.load_optimizer(other, Path(folder) / "o")
    train(again, other, range(2, 4))
    equal = all(map(torch.equal, whole(again), whole(model)))
    optimizer.close()
    other.close()
    return equal


def unsynced(plugin: type[Plugin], given: dict[str, Any]) -> list[torch.Tensor | None]:
    """Return ``.grad`` of each parameter behind a backward in ``no_sync``."""
    rank = torch.distributed.get_rank()
    booster = Booster(plugin=plugin(**given))
    model = model_of()
    model, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters()))
    with booster.no_sync(model, optimizer):
        booster.backward(model(batch(0, rank)).square().mean(), optimizer)
    found = [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]
    booster.backward(model(batch(0, rank)).square().mean(), optimizer)  # it ends reduced
    optimizer.zero_grad()
    optimizer.unwrap().close()
    return found


def report(plugin: type[Plugin], given: dict[str, Any]) -> str:
    """Return what is logged of a placement."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tensorstow")
    logger.addHandler(handler)
    try:
        Booster(plugin=plugin(verbose=True, **given)).boost(model_of())
    finally:
        logger.removeHandler(handler)
    (line,) = [each for each in told if each.startswith("placing ")]
    return line


PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class BoostedRun:
    """A config through Gemini's plugin, with an optimizer that was made before."""

    def __init__(self, config: RunConfig, given: dict[str, Any]) -> None:
        """Place the model; ``given``: the plugin's arguments, and ``nvme_offload_fraction``."""
        self.config, given = config, dict(given)
        on_disk = given.pop("nvme_offload_fraction", 0.0)
        precision = PRECISIONS[config.compute_dtype or config.dtype]
        plugin = GeminiPlugin(precision=precision, max_norm=config.clip or 0.0, **given)
        self.booster = Booster(plugin=plugin)
        model = model_for(config)
        decayed = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest}]
        before = HybridAdam(groups, lr=1e-2, nvme_offload_fraction=on_disk)
        self.model, self.optimizer, *_ = self.booster.boost(model, before)

    def train(self, *steps: int) -> None:
        """Take these steps."""
        rank, device = torch.distributed.get_rank(), current_device()
        for step in steps:
            for micro in range(self.config.plan.accumulation_steps):
                loss = loss_of(self.model, rank, step, micro, device)
                self.booster.backward(loss, self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()


def boosted(
    config: RunConfig, given: dict[str, Any], saved: str, folder: Path | None = None
) -> list[torch.Tensor]:
    """Train through Gemini's plugin; return whole weights.

    ``saved``: "no", or how a run is saved after its first step, in "one" file or in "many", to go
    on in another model. The step behind that is lost.
    """
    run, begin = BoostedRun(config, given), 0
    if saved != "no":
        assert folder is not None
        run.train(0)
        many = saved == "many"
        run.booster.save_model(run.model, folder / "m", shard=many)
        run.booster.save_optimizer(run.optimizer, folder / "o", shard=many)
        run.train(1)
        run.optimizer.unwrap().close()
        run, begin = BoostedRun(config, given), 1
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.zero_()  # what is right from now on comes from the files
        run.booster.load_model(run.model, folder / "m")
        run.booster.load_optimizer(run.optimizer, folder / "o")
    run.train(*range(begin, STEPS))
    return finish(run.model, run.optimizer)


def samples(plugin: type[Plugin]) -> list[int]:
    """Return the samples of ten that this rank is given."""
    data = torch.utils.data.TensorDataset(torch.arange(10))
    loader = plugin().prepare_dataloader(data, batch_size=2)
    return [sample for (batch,) in loader for sample in batch.tolist()]
