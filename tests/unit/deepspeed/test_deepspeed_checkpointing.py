"""Activations are computed again, and what is kept may be in host memory."""

from collections.abc import Iterator

import pytest
import torch

from tensorstow.deepspeed import checkpointing


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    checkpointing.reset()
    yield
    checkpointing.reset()


@pytest.mark.parametrize("in_cpu", [None, True])
def test_backward_calls_the_function_again(in_cpu: bool | None) -> None:  # noqa: FBT001
    if in_cpu is not None:
        checkpointing.configure(None, checkpoint_in_cpu=in_cpu, partition_activations=True)
    assert checkpointing.is_configured() == (in_cpu is not None)
    calls = []

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x.sin().square()

    x = torch.ones(3, requires_grad=True)
    checkpointing.checkpoint(function, x).sum().backward()
    assert len(calls) == 2
    assert torch.allclose(x.grad, (2 * x.sin() * x.cos()).detach())
