"""Any order of calls, beside a plain model: each is right, or refused as the table says."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from tensorstow import AdamW, PipelinePolicy
from tensorstow.base.errors import OptionError, PoisonedError
from tensorstow.formats.reference import AdamState, adam_reference, adam_scalars
from tensorstow.step.legal_calls import LEGAL, Phase, PublicCall

POLICY = PipelinePolicy(chunk_elements=64, backend="threads", depth=2)


class BrokenError(Exception):
    """What a backward raises in its middle."""


class Fail(torch.autograd.Function):
    """Nothing in forward; raises in backward, behind the gradients of the layers after it."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # noqa: ANN401
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # noqa: ANN401
        del grad
        raise BrokenError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.fails_behind: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if self.fails_behind == number:
                x = Fail.apply(x)  # type: ignore[no-untyped-call]
        return x


def loss_of(model: Net, seed: int) -> torch.Tensor:
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
    out: torch.Tensor = model(x).square().sum()
    return out


class Plain:
    """The same training in plain torch, and what a commit has of it."""

    def __init__(self) -> None:
        self.model = Net()
        self.states: dict[int, tuple[int, AdamState]] = {}
        self.steps = 0

    def step(self) -> None:
        for number, parameter in enumerate(self.model.parameters()):
            if parameter.grad is None:
                continue
            zeros = AdamState(torch.zeros_like(parameter), torch.zeros_like(parameter))
            count, state = self.states.get(number, (0, zeros))
            scalars = adam_scalars(
                lr=1e-2,
                betas=(0.9, 0.999),
                eps=1e-8,
                weight_decay=1e-2,
                step=count + 1,
                decoupled=True,
            )
            with torch.no_grad():
                adam_reference(parameter, parameter.grad, state, scalars)
            self.states[number] = (count + 1, state)
        self.steps += 1

    def saved(self) -> tuple[Any, ...]:
        states = {n: (c, AdamState(s.m.clone(), s.v.clone())) for n, (c, s) in self.states.items()}
        return [p.detach().clone() for p in self.model.parameters()], states, self.steps

    def load(self, saved: tuple[Any, ...]) -> None:
        weights, states, self.steps = saved
        self.states = {n: (c, AdamState(s.m.clone(), s.v.clone())) for n, (c, s) in states.items()}
        with torch.no_grad():
            for parameter, weight in zip(self.model.parameters(), weights, strict=True):
                parameter.copy_(weight)
                parameter.grad = None


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="legal-", dir="/var/tmp"))
        self.plain = Plain()
        self.committed: tuple[Any, ...] | None = None
        self.phase = Phase.BETWEEN
        self.seed = 0

    @initialize(overlap=st.sampled_from(["none", "forward", "backward"]))
    def begin(self, overlap: str) -> None:
        self.overlap = overlap
        self.make()

    def make(self) -> None:
        self.model = Net()
        given: dict[str, Any] = {"dir": self.directory, "durability": "commit"}
        self.optimizer = AdamW(
            self.model.parameters(),
            lr=1e-2,
            states="disk",
            overlap=self.overlap,  # type: ignore[arg-type]
            module=self.model,
            commit_every=None,
            policy=POLICY,
            **given,
        )

    def teardown(self) -> None:
        if hasattr(self, "optimizer"):
            self.optimizer.close()
        shutil.rmtree(self.directory)

    def is_legal(self, call: PublicCall) -> bool:
        return call in LEGAL[self.phase]

    @precondition(lambda self: self.phase in {Phase.BETWEEN, Phase.USED})
    @rule(fails_behind=st.sampled_from([None, None, 0, 1, 2]))
    def backward(self, fails_behind: int | None) -> None:
        self.seed += 1
        losses = []
        for model in (self.plain.model, self.model):
            model.fails_behind = fails_behind
            losses.append(loss_of(model, self.seed))
        if not self.is_legal(PublicCall.BACKWARD):
            with pytest.raises(OptionError, match="used already"):
                torch.autograd.backward(losses[1])
            return
        for loss in losses:
            if fails_behind is None:
                torch.autograd.backward(loss)
            else:
                with pytest.raises(BrokenError):
                    torch.autograd.backward(loss)
        if self.overlap == "backward" and fails_behind != 2:
            self.phase = Phase.OPEN if fails_behind is None else Phase.BROKEN

    @rule()
    def step(self) -> None:
        if self.is_legal(PublicCall.STEP):
            used = any(p.grad is not None for p in self.plain.model.parameters())
            self.optimizer.step()
            self.plain.step()
            if self.overlap == "backward":
                self.phase = Phase.USED if used else Phase.BETWEEN
        else:
            self.refused(self.optimizer.step)

    @rule(to_none=st.booleans())
    def zero_grad(self, *, to_none: bool) -> None:
        if self.is_legal(PublicCall.ZERO_GRAD):
            self.optimizer.zero_grad(set_to_none=to_none)
            for parameter in self.plain.model.parameters():
                if parameter.grad is not None:
                    parameter.grad = None if to_none else torch.zeros_like(parameter)
            self.phase = Phase.BETWEEN
        else:
            self.refused(self.optimizer.zero_grad)

    @rule()
    def drop_gradients_by_the_model(self) -> None:
        self.model.zero_grad()
        self.plain.model.zero_grad()
        self.phase = {Phase.USED: Phase.BETWEEN, Phase.OPEN: Phase.BROKEN}.get(
            self.phase, self.phase
        )

    @rule()
    def forward(self) -> None:
        self.model.fails_behind = self.plain.model.fails_behind = None
        if self.is_legal(PublicCall.FORWARD):
            with torch.no_grad():
                assert torch.equal(loss_of(self.model, 0), loss_of(self.plain.model, 0))
        else:
            self.refused(lambda: loss_of(self.model, 0))
            self.refused(self.optimizer.wait)

    @rule(requested=st.booleans())
    def commit(self, *, requested: bool) -> None:
        if not self.is_legal(PublicCall.WHOLE):
            self.refused(self.optimizer.commit)
            self.refused(self.optimizer.state_dict)
            return
        if requested and self.is_legal(PublicCall.STEP):
            self.optimizer.request_commit()
            self.step()
        else:
            assert self.optimizer.commit() == self.plain.steps
        self.committed = self.plain.saved()

    @rule()
    def resume(self) -> None:
        if self.committed is None:
            return
        assert self.optimizer.resume() == self.committed[2]
        self.plain.load(self.committed)
        self.phase = Phase.BETWEEN

    @precondition(lambda self: self.committed is not None)
    @rule()
    def close_and_resume(self) -> None:
        self.optimizer.close()
        for use in (self.optimizer.step, self.optimizer.commit, self.optimizer.state_dict):
            with pytest.raises(PoisonedError, match="closed"):
                use()
        self.make()
        self.resume()

    def refused(self, use: Any) -> None:  # noqa: ANN401
        way = {Phase.USED: "zero_grad", Phase.OPEN: "step", Phase.BROKEN: "resume"}[self.phase]
        with pytest.raises(OptionError, match=rf'overlap="backward".*{way}\(\)'):
            use()

    @invariant()
    def all_is_as_in_torch(self) -> None:
        if not hasattr(self, "optimizer") or self.phase in {Phase.OPEN, Phase.BROKEN}:
            return
        self.optimizer.wait()
        pairs = zip(self.model.parameters(), self.plain.model.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        counts = [float(s["step"]) for s in self.optimizer.state.values()]
        assert counts == [float(self.plain.states[n][0]) for n in sorted(self.plain.states)]


TestLegalCalls = Machine.TestCase
TestLegalCalls.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("phase", Phase)
def test_there_is_a_way_out_of_every_phase(phase: Phase) -> None:
    assert LEGAL[phase] >= {PublicCall.RESUME, PublicCall.CLOSE}
