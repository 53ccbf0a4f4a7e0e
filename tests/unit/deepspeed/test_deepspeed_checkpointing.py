"""Activations are computed again, and what is kept may be in host memory."""

from collections.abc import Iterator

import pytest
import torch

from tensorstow.base.errors import OptionError
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


@pytest.mark.parametrize("in_cpu", [None, True])
def test_one_inside_of_another_is_called_by_both(in_cpu: bool | None) -> None:  # noqa: FBT001
    checkpointing.configure(checkpoint_in_cpu=in_cpu)
    calls = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        calls.append("inner")
        return x.sin()

    def outer(x: torch.Tensor) -> torch.Tensor:
        calls.append("outer")
        return checkpointing.checkpoint(inner, x.square()).square()

    x = torch.full((3,), 0.5, requires_grad=True)
    checkpointing.checkpoint(outer, x).sum().backward()
    assert calls == ["outer", "inner", "outer", "inner", "inner"]
    want = torch.full((3,), 0.5, requires_grad=True)
    want.square().sin().square().sum().backward()
    assert torch.equal(x.grad, want.grad)


def is_offloaded() -> bool:
    return bool(checkpointing._now.recomputed._forward_pre_hooks)


def test_the_configuration_s_section_is_used() -> None:
    for given in (True, False):
        config = {"train_batch_size": 1, "activation_checkpointing": {"cpu_checkpointing": given}}
        checkpointing.configure(None, config)
        assert is_offloaded() == given
        checkpointing.configure(None, config, checkpoint_in_cpu=not given)
        assert is_offloaded() != given


def test_several_model_parallel_ranks_are_refused() -> None:
    class Several:
        def get_model_parallel_world_size(self) -> int:
            return 2

    with pytest.raises(OptionError, match="over data-parallel ranks only"):
        checkpointing.configure(Several())
    assert not checkpointing.is_configured()


def test_keywords_are_the_functions() -> None:
    x = torch.ones(2, requires_grad=True)

    def scaled(x: torch.Tensor, *, use_reentrant: float) -> torch.Tensor:
        return x * use_reentrant

    checkpointing.checkpoint(scaled, x, use_reentrant=3.0).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]
