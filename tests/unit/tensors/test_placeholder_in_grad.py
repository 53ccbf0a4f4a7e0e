import pytest
import torch
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.tensors.placeholder import ConsumedGradient


def placeholder() -> ConsumedGradient:
    return ConsumedGradient(torch.ones(3, 4, dtype=torch.bfloat16))


def test_it_looks_like_the_gradient_and_has_no_memory() -> None:
    consumed = placeholder()
    assert consumed.shape == (3, 4)
    assert consumed.dtype == torch.bfloat16
    assert consumed.device.type == "cpu"
    assert consumed.numel() == 12
    assert consumed.untyped_storage().nbytes() == 0 or consumed.data_ptr() == 0
    assert repr(consumed) == str(consumed)
    assert "ConsumedGradient(shape=(3, 4), dtype=torch.bfloat16)" in repr(consumed)


def test_it_may_stand_in_grad_and_be_dropped() -> None:
    parameter = nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16))
    parameter.grad = placeholder()
    assert parameter.grad is not None
    assert isinstance(parameter.grad.detach(), ConsumedGradient)
    parameter.grad = None


@pytest.mark.parametrize(
    "operation",
    [
        lambda g: g + 1,
        lambda g: g.add_(1),
        lambda g: g.float(),
        lambda g: g.zero_(),
        torch.zeros_like,
        lambda g: g.copy_(torch.ones(3, 4)),
        lambda g: torch.ones(3, 4, dtype=torch.bfloat16).copy_(g),
        lambda g: torch.ones(3, 4, dtype=torch.bfloat16).add_(g),
        lambda g: torch._foreach_mul_([g], 2.0),
        lambda g: torch._foreach_norm([g]),
        lambda g: bool((g == 0).all()),
        lambda g: g.view(-1),
        lambda g: g[0],
    ],
)
def test_every_operation_is_refused(operation) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    with pytest.raises(OptionError, match=r'used already: with overlap="backward"'):
        operation(placeholder())


def test_what_torch_itself_refuses() -> None:
    for name in ("tolist", "numpy"):
        with pytest.raises(RuntimeError, match="not supported for tensor subclasses"):
            getattr(placeholder(), name)()


def test_a_refusal_names_the_operation() -> None:
    with pytest.raises(OptionError, match=r"^norm was called on"):
        ConsumedGradient.refuse("norm")
