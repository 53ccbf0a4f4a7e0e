"""accelerate with our optimizer: against the plain loop, and from state to state."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

import tensorstow
import trainers
from tensorstow import AdamW, PipelinePolicy, Plan
from tensorstow.base.errors import OptionError
from tensorstow.fsdp.optimizer_factory import names_of, with_groups
from tensorstow.integrations.accelerate import last_micro_batch, prepared

SMALL = PipelinePolicy(chunk_elements=1024, depth=2)


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Drop what a process has one of; and one thread is faster for so small a model."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    for kind in (AcceleratorState, GradientState, PartialState):
        kind._reset_state()


class Loop:
    """A script of accelerate's."""

    def __init__(self, batches: int, accumulation: int = 1, **where: Any) -> None:  # noqa: ANN401
        for kind in (AcceleratorState, GradientState, PartialState):
            kind._reset_state()
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=accumulation
        )
        model = trainers.model().train()
        optimizer = AdamW(
            trainers.plain_groups(model), lr=1e-2, module=model, policy=SMALL, **where
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


def by_hand(
    batches: int, accumulation: int, clip: float | None = None, *, inside: bool = False
) -> list[bytes]:
    """The plain loop, which divides each loss by the micro-batches of a whole window."""
    net = trainers.model().train()
    optimizer = AdamW(trainers.plain_groups(net), lr=1e-2)
    for window in trainers.windows(batches, accumulation):
        for batch in window:
            (net(input_ids=batch, labels=batch).loss / accumulation).backward()
        if clip is not None and inside:
            optimizer.clip_grad_norm_(clip)
        elif clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return trainers.bits(net)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_weights_are_those_of_the_plain_loop(clip: float | None) -> None:
    """Five micro-batches by two: the last step has one."""
    loop = Loop(5, 2, states="disk")
    loop.train(clip=clip)
    assert loop.finish() == by_hand(5, 2, clip)


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
    where = {"states": "disk", "dir": tmp_path / "run", "checkpoints": "ticket"}
    first = Loop(4, **where)
    first.train(0, 2)
    first.accelerator.save_state(str(tmp_path / "state"))
    assert trainers.nbytes_beside_weights(tmp_path / "state") < 1 << 20
    first.train(2, 3)  # given up
    first.finish()
    second = Loop(4, **where)
    second.accelerator.load_state(str(tmp_path / "state"))
    second.train(2, 4)
    assert second.finish() == by_hand(4, 1)


def test_a_placed_model_is_left_as_it_is() -> None:
    """Weights on disk are neither moved nor wrapped nor cast; short last window, clipped."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = trainers.model().train()
    groups = names_of(model, trainers.plain_groups(model))
    make = with_groups(partial(AdamW, lr=1e-2, policy=SMALL), groups)
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
    assert found == by_hand(5, 2, 0.1, inside=True)


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
