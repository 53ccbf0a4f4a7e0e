"""A gradient whose elements are in host memory: operations act there, results are on its device."""

import pytest
import torch

from tensorstow.fsdp.gradient_offload import HostGradient, HostSum


def gradient_of(values: torch.Tensor) -> HostGradient:
    return HostGradient(torch.empty_like(values), HostSum(values))


def test_operations_act_on_the_elements_in_host_memory() -> None:
    gradient = gradient_of(torch.tensor([3.0, 4.0]))
    norm = torch.linalg.vector_norm(gradient)
    assert (type(norm), norm.item()) == (torch.Tensor, 5.0)
    assert gradient.mul_(0.5) is gradient
    assert gradient.elements.tolist() == [1.5, 2.0]


def test_an_alias_shares_its_elements() -> None:
    gradient = gradient_of(torch.ones(2))
    gradient.detach().zero_()
    assert gradient.elements.eq(0.0).all()


@pytest.mark.parametrize("on_host", [False, True])
def test_a_later_micro_batch_makes_the_sum_fp32(on_host: bool) -> None:  # noqa: FBT001
    first = torch.tensor([256.0], dtype=torch.bfloat16)
    later = torch.ones(1, dtype=torch.bfloat16)
    gradient = gradient_of(first)
    for _ in range(3):
        gradient.accumulate(gradient_of(later) if on_host else later)
    assert gradient.elements.dtype == torch.float32
    assert gradient.elements.tolist() == [259.0]  # a bf16 sum would stay 256
