"""A run of several ranks with a directory: what tests of commits call in each of them."""

import errno
import hashlib
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tensorstow
from stopped import stop
from tensorstow.base.errors import CommitError, OptionError, RankError, StowError
from tensorstow.checkpoint import ranks as tensorstow_ranks
from tensorstow.checkpoint.run import Interval
from tensorstow.optim import stowed_adam
from tensorstow.store.records import Content, Generation
from tensorstow.store.store import Store

WIDTH = 12
SMALL = tensorstow.PipelinePolicy(chunk_elements=1024, backend="threads", depth=4)


def make_model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return the model, sharded: odd sizes, a buffer, a frozen parameter."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(WIDTH, 67), nn.BatchNorm1d(67), nn.Tanh(), nn.Linear(67, 5), nn.Linear(5, 1)
    ).to(dtype)
    model[3].bias.requires_grad_(requires_grad=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class DurableRun:
    """A process's part of the run."""

    def __init__(self, directory: Path | None, **given: object) -> None:
        dtype = given.pop("dtype", torch.bfloat16)
        assert isinstance(dtype, torch.dtype)
        self.model = make_model(dtype)
        stowed = {} if directory is None else {"states": "disk", "dir": directory}
        options: dict[str, Any] = {"lr": 1e-2, "module": self.model, "policy": SMALL}
        self.optimizer = tensorstow.AdamW(self.model.parameters(), **{**options, **stowed, **given})
        self.step = 0

    def resume(self, which: str | int | None = None) -> int | None:
        """Go on where all ranks can."""
        found = self.optimizer.resume(which)
        self.step = found or 0
        return found

    def train(self, until: int) -> None:
        """Take steps."""
        while self.step < until:
            generator = torch.Generator().manual_seed(1000 * dist.get_rank() + self.step)
            batch = torch.randn(4, WIDTH, generator=generator).to(next(self.model.parameters()))
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def stop(self) -> None:
        """Let everything go as a stop of the process does: what no commit has is lost."""
        stop(self.optimizer)

    def facts(self) -> dict[str, str]:
        """Return what this rank has of the run, by its bits."""
        self.optimizer.wait()
        saved = self.optimizer.state_dict()
        found = dict(self.model.state_dict())
        for number, entry in saved["state"].items():
            found |= {f"{number}.{name}": value for name, value in entry.items()}
        return {name: digest(value) for name, value in found.items()}


def digest(tensor: torch.Tensor) -> str:
    """Return what stands for a tensor's bits."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    raw = local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{local.dtype} {tuple(local.shape)} {hashlib.sha256(raw).hexdigest()}"


def undisturbed(steps: int, **given: object) -> dict[str, str]:
    """Train in RAM."""
    run = DurableRun(None, **given)
    run.train(steps)
    return run.facts()


def in_two_lives(
    directory: Path, first: int, then: int, **given: object
) -> tuple[int | None, dict[str, str]]:
    """Train, end in the middle of it, go on; return where, and what it came to."""
    run = DurableRun(directory, **given)
    assert run.resume() is None
    run.train(first)
    run.stop()
    run = DurableRun(directory, **given)
    found = run.resume()
    run.train(then)
    facts = run.facts()
    run.stop()
    return found, facts


def stowed_in_two_lives(directory: Path, plan: tensorstow.Plan) -> tuple[int | None, list[str]]:
    """Train a stowed model, end, go on from its last commit; return where, and what differs."""

    def live(until: int) -> tuple[int | None, dict[str, str]]:
        torch.manual_seed(1)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        make = partial(tensorstow.AdamW, lr=0.01, dir=directory, commit_every=2)
        model, optimizer = tensorstow.stow(nn.Sequential(*blocks), make, plan=plan)
        start = optimizer.resume()
        for step in range(start or 0, until):
            generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
            model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = {name: digest(value) for name, value in model.state_dict().items()}
        for number, entry in optimizer.state_dict()["state"].items():
            found |= {f"{number}.{name}": digest(value) for name, value in entry.items()}
        optimizer.close()
        return start, found

    _, wanted = live(5)
    start, found = live(5)
    return start, sorted(n for n in {*wanted, *found} if wanted.get(n) != found.get(n))


def steps_committed(directory: Path, steps: int) -> list[int]:
    """Return the steps that this rank committed, where each rank's clock says something else."""
    committed = []
    commit = Store.commit

    def noting(store: Store, content: Content, *, keep: int | None = None) -> Generation:
        committed.append(content.step)
        return commit(store, content, keep=keep)

    clock = random.Random(dist.get_rank())  # noqa: S311
    run = DurableRun(directory, commit_every="10min")
    with (
        patched(Store, "commit", noting),
        patched(Interval, "is_due", lambda *_: clock.random() < 0.4),
    ):
        run.train(steps)
        run.stop()
    return committed


def with_a_failing_rank(directory: Path, where: str, steps: int) -> tuple[str, str, int | None]:
    """Train until rank 1 cannot commit step 4; return what is raised, and where all go on."""
    run = DurableRun(directory, commit_every=2, extra=dict)
    run.train(3)

    def full(*_: object, **__: object) -> None:
        message = "no room"
        raise CommitError(message)

    owners: dict[str, Any] = {
        "commit": Store,
        "write_tensor": Store,
        "extra_now": run.optimizer._runtime.commits,
        "step": run.optimizer._states().pipeline,
    }
    owner = owners[where]
    try:
        with patched(owner, where, full if dist.get_rank() == 1 else getattr(owner, where)):
            run.train(4)
            run.optimizer.synchronize()
    except (CommitError, RankError) as error:
        raised = error
    names = (type(raised).__name__, str(raised))
    run.optimizer.zero_grad()
    dist.barrier()
    found = run.resume()
    run.train(steps)
    facts = run.facts()
    assert facts == undisturbed(steps), "not the run that nothing happened to"
    run.stop()
    return (*names, found)


def with_references(directory: Path) -> tuple[str, bool, int | None]:
    """Save as a trainer does, by rank 0 alone; go on from what it saved on all."""
    run = DurableRun(directory, commit_every=None, checkpoints="reference")
    run.train(2)
    try:
        run.optimizer.state_dict()
    except OptionError as error:
        said = str(error)
    run.optimizer.snapshot("two")  # on all
    saved = [run.optimizer.state_dict() if dist.get_rank() == 0 else None]
    run.train(4)
    weights = {name: digest(value) for name, value in run.model.state_dict().items()}
    run.stop()

    run = DurableRun(directory, commit_every=None, checkpoints="reference")
    dist.broadcast_object_list(saved)
    assert saved[0] is not None
    run.optimizer.load_state_dict(saved[0])
    run.step = saved[0]["tensorstow"]["step"]
    found = run.step
    run.train(4)
    again = {name: digest(value) for name, value in run.model.state_dict().items()}
    run.stop()
    return said, again == weights, found


def with_snapshots(directory: Path) -> list[Any]:
    """Keep two steps, go back to the first."""
    run = DurableRun(directory, commit_every=None)
    run.train(2)
    run.optimizer.snapshot("two")
    wanted = run.facts()
    run.train(4)
    run.optimizer.snapshot("four")
    names = [summary.names for summary in run.optimizer.snapshots()]
    run.train(5)
    back = run.resume("two")
    same = run.facts() == wanted
    run.optimizer.drop("four")
    left = [summary.names for summary in run.optimizer.snapshots()]
    run.stop()
    return [names, back, same, left]


def _raising(*_: object) -> None:
    raise CommitError(errno.EIO, "a drive that fails once")


def after_an_earlier_snapshot(directory: Path, fails_on: int | None) -> int | None:
    """Return the last commit of a run that goes back, where rank 0 decides late.

    Before it does, one rank fails to.
    """
    run = DurableRun(directory, commit_every=2)
    run.train(1)
    run.optimizer.snapshot("one")
    run.train(5)
    if fails_on is not None:
        loads = stowed_adam.resume if dist.get_rank() != fails_on else _raising
        with patched(stowed_adam, "resume", loads), suppress(StowError):
            run.resume("one")
    run.resume("one")
    decide = tensorstow_ranks.Ranks.decide

    def late(*given: Any, **options: Any) -> tuple[bool, int | None]:  # noqa: ANN401
        if dist.get_rank() == 0:
            time.sleep(0.2)
        return decide(*given, **options)

    with patched(tensorstow_ranks.Ranks, "decide", late):
        run.train(3)
        run.stop()
    return DurableRun(directory).resume()


def refused(directory: Path, act: str) -> str:
    """Return what a rank is told."""
    try:
        run = DurableRun(directory)
        if act == "step":
            run.train(1)
        else:
            getattr(run.optimizer, act)()
    except tensorstow.StowError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@contextmanager
def patched(owner: object, name: str, value: object) -> Iterator[None]:
    """Exchange an attribute for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _fail_in(rank: int) -> None:
    if dist.get_rank() == rank:
        message = "mine"
        raise ValueError(message)


def ended(directory: Path, way: str) -> tuple[str, int | None]:
    """Train three steps and end, rank 1 by an exception where ``way`` says so.

    Return what was raised and where all go on.
    """
    run = DurableRun(directory)
    run.train(3)
    raised = ""
    if way == "close":
        run.optimizer.close()
    elif way == "drop":
        del run.optimizer
    else:
        try:
            with run.optimizer:
                _fail_in(rank=1)
        except (RankError, ValueError) as error:
            raised = type(error).__name__
    dist.barrier()
    after = DurableRun(directory)
    found = after.resume()
    after.stop()
    return raised, found


def lost_and_gone_on(
    directory: Path, other: Path, lost: list[int]
) -> tuple[list[str], int | None, dict[str, str]]:
    """Lose the directories of some ranks, go on elsewhere; return what was said, and the end."""
    run = DurableRun(directory)
    run.resume()
    run.train(2)
    run.optimizer.commit()
    run.train(3)
    run.optimizer.synchronize()
    rank = dist.get_rank()
    if rank in lost:
        mine = Path(run.optimizer._params().store.storage.directories[0])
        mine.rename(mine.with_name(f"gone-{rank}"))
    dist.barrier()
    said: list[str] = []
    try:
        run.optimizer.commit()
    except StowError as error:
        said.append(f"{type(error).__name__}: {error}")
    dist.barrier()
    try:
        run.optimizer.commit_to(other)
    except StowError as error:
        said.append(f"{type(error).__name__}: {error}")
        run.stop()
        return said, None, {}
    run.train(4)
    run.optimizer.commit()
    run.stop()
    run = DurableRun(other)
    found = run.resume()
    run.train(5)
    facts = run.facts()
    run.stop()
    return said, found, facts


def resumed(directory: Path) -> tuple[int | None, dict[str, str]]:
    """Go on, and return where and with what."""
    run = DurableRun(directory)
    found = run.resume()
    facts = run.facts()
    run.stop()
    return found, facts
