"""accelerate with our optimizer: against the plain loop, and from state to state."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, DistributedType
from torch import nn

import tensorstow
import trainers
from ranks.pool import Ranks
from tensorstow import AdamW, Plan
from tensorstow.base.errors import OptionError
from tensorstow.fsdp.optimizer_factory import names_of, with_groups
from tensorstow.integrations.accelerate import last_micro_batch, prepared


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Drop what a process has one of."""
    yield
    trainers.forget_state()


class Loop:
    """A script of accelerate's."""

    def __init__(self, batches: int, accumulation: int = 1, **where: Any) -> None:  # noqa: ANN401
        trainers.forget_state()
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=accumulation
        )
        model = trainers.model().train()
        optimizer = AdamW(
            trainers.plain_groups(model), lr=1e-2, module=model, policy=trainers.SMALL, **where
        )
        loader = torch.utils.data.DataLoader(
            trainers.examples(batches), batch_size=trainers.BATCH, shuffle=False
        )
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.accumulation = accumulation

    def train(self, first: int = 0, last: int | None = None, clip: float | None = None) -> None:
        for batch in list(self.loader)[first:last] if first or last else self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
                self.accelerator.backward(loss)
                if clip is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                self.optimizer.step()
                self.optimizer.zero_grad()

    def finish(self) -> list[bytes]:
        found = trainers.bits(self.accelerator.unwrap_model(self.model))
        self.optimizer.optimizer.close()
        return found


by_hand = partial(trainers.mean_loop, inside=False)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_weights_are_those_of_the_plain_loop(clip: float | None) -> None:
    """Five micro-batches by two: the last step has one."""
    loop = Loop(5, 2, states="disk")
    loop.train(clip=clip)
    assert loop.finish() == by_hand(5, 2, clip=clip)


def test_beside_backward_the_accelerator_says_which_is_the_last() -> None:
    """A count of two would miss the last step's one, and let it wait in memory until step()."""
    loop = Loop(5, 2, states="disk", overlap="backward", accumulation_steps=last_micro_batch)
    first = next(loop.model.parameters())
    gone: list[bool] = []
    before = loop.optimizer.optimizer.step

    def step(closure: Any = None) -> Any:  # noqa: ANN401
        gone.append(type(first.grad).__name__ == "ConsumedGradient")
        return before(closure)

    loop.optimizer.optimizer.step = step
    loop.train()
    del loop.optimizer.optimizer.step
    assert gone == [True, True, True]
    assert loop.finish() == by_hand(5, 2)


def test_a_saved_state_is_small_and_goes_on(tmp_path: Path) -> None:
    where = {"states": "disk", "dir": tmp_path / "run", "checkpoints": "reference"}
    first = Loop(4, **where)
    first.train(0, 2)
    first.accelerator.save_state(str(tmp_path / "state"))
    assert trainers.nbytes_beside_weights(tmp_path / "state") < 1 << 20
    first.train(2, 3)  # given up
    first.finish()
    second = Loop(4, **where)
    second.accelerator.load_state(str(tmp_path / "state"))
    second.train(2, 4)
    assert second.finish() == by_hand(4)


def test_a_placed_model_is_left_as_it_is() -> None:
    """Weights on disk are neither moved nor wrapped nor cast; short last window, clipped."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = trainers.model().train()
    groups = names_of(model, trainers.plain_groups(model))
    make = with_groups(partial(AdamW, lr=1e-2, policy=trainers.SMALL), groups)
    model, optimizer = tensorstow.stow(model, make, plan=Plan(parameters="disk", states="disk"))
    loader = torch.utils.data.DataLoader(trainers.examples(5), batch_size=trainers.BATCH)
    same, wrapped, loader = accelerator.prepare(prepared(model), optimizer, loader)
    assert same is model
    for batch in loader:
        with accelerator.accumulate(same):
            accelerator.backward(same(**batch).loss)
            if accelerator.sync_gradients:
                wrapped.optimizer.clip_grad_norm_(0.1)
            wrapped.step()
            wrapped.zero_grad()
    found = trainers.bits(model)
    optimizer.close()
    assert found == by_hand(5, 2, clip=0.1, inside=True)


def sharded_by_accelerate(rank: int, where: dict[str, Any]) -> list[bytes] | str:
    """Train under accelerate's own FSDP2 plugin, which exchanges the optimizer's parameters."""
    with trainers.environment_of_two(rank):
        trainers.forget_state()
        plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2)
        accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
        # accelerate shards on accelerators alone; gloo does as well.
        AcceleratorState._shared_state |= {
            "distributed_type": DistributedType.FSDP,
            "fsdp_plugin": plugin,
        }
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        for number, parameter in enumerate(net.parameters()):
            nn.init.constant_(parameter, 0.1 * (number + 1))
        optimizer = AdamW(net.parameters(), lr=1e-2, module=net, policy=trainers.SMALL, **where)
        model, wrapped = accelerator.prepare(net, optimizer)
        try:
            for step in range(2):
                accelerator.backward(model(torch.full((1, 4), step + 1.0)).sum())
                wrapped.step()
                wrapped.zero_grad()
        except OptionError as error:
            return str(error)
        finally:
            optimizer.close()
            trainers.forget_state()
        return [p.full_tensor().detach().numpy().tobytes() for p in model.parameters()]


def sharded_in_all_ways(place: Path) -> list[list[bytes] | str]:
    rank = dist.get_rank()
    ways: list[dict[str, Any]] = [{}, {"states": "disk"}]
    ways += [{"states": "disk", "overlap": "forward"}]
    ways += [{"states": "disk", "dir": place / f"rank-{rank}"}]
    return [sharded_by_accelerate(rank, where) for where in ways]


def test_what_accelerate_shards_has_states_alone_off_the_device(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    """A directory, and updates beside the passes, are of the parameters that it exchanges."""
    for plain, on_disk, forward, durable in ranks(2).run(sharded_in_all_ways, tmp_path):
        assert on_disk == plain
        assert str(forward).startswith('overlap="forward" was given, and all parameters')
        assert str(durable).startswith("dir= was given, and all parameters were replaced")


def test_autocast_is_refused_for_a_placed_model() -> None:
    model, optimizer = tensorstow.stow(
        torch.nn.Linear(2, 2), partial(AdamW, lr=1e-2), plan=Plan(parameters="disk")
    )
    accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.raises(OptionError, match="16-bit copy of every weight"):
        prepared(model)
    optimizer.close()
    with pytest.raises(OptionError, match="stow"):
        prepared(torch.nn.Linear(2, 2))


def test_ranks_that_accelerate_does_not_know_of_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = tensorstow.stow(
        torch.nn.Linear(2, 2), partial(AdamW, lr=1e-2), plan=Plan(parameters="disk")
    )
    accelerate.Accelerator(cpu=True)
    monkeypatch.setattr(tensorstow.integrations.accelerate, "world_size", lambda: 2)
    with pytest.raises(OptionError, match="shared by 2 ranks, and the Accelerator knows of 1"):
        prepared(model)
    optimizer.close()
