"""What a step is made of: gradients that are due, checked, and the rows and scalars of its plan."""

import pytest
import torch
from torch import nn

from tensorstow import AdamW
from tensorstow.base.errors import DTypeError, OptionError
from tensorstow.optim.step_runner import collect, make_plan
from tensorstow.step.managed_param import ParamUpdate
from tensorstow.step.param_table import ParamTable
from tensorstow.step.step_plan import as_step


def all_of(_: torch.Tensor) -> bool:
    return True


def optimizer_with(*parameters: nn.Parameter) -> tuple[AdamW, ParamTable]:
    optimizer = AdamW([{"params": [p]} for p in parameters])
    return optimizer, optimizer._params()


def weight(numel: int = 4, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(numel, dtype=dtype))


def test_only_parameters_with_a_gradient_are_due() -> None:
    used, unused, frozen = weight(), weight(), weight()
    frozen.requires_grad = False
    optimizer, params = optimizer_with(used, unused, frozen)
    used.grad, frozen.grad = torch.ones(4), torch.ones(4)
    update, new_params = collect(optimizer.param_groups, params, all_of)
    assert [p for _, p, _ in update] == [used, frozen]
    assert new_params == [frozen]  # frozen when the optimizer was made: it has no states yet


def test_gradients_are_contiguous_then() -> None:
    p = nn.Parameter(torch.ones(3, 4))
    optimizer, params = optimizer_with(p)
    p.grad = torch.arange(12.0).view(4, 3).t()
    [(_, _, gradient)], _ = collect(optimizer.param_groups, params, all_of)
    assert gradient.is_contiguous()
    assert torch.equal(gradient, p.grad)


def test_what_cannot_be_used_is_named_before_anything_changes() -> None:
    good, bad = weight(), weight()
    optimizer, params = optimizer_with(good, bad)
    good.grad = torch.ones(4)
    bad.grad = torch.ones(4).to_sparse()
    with pytest.raises(DTypeError, match="Parameter 0 of group 1 is sparse"):
        collect(optimizer.param_groups, params, all_of)
    bad.grad = None
    optimizer.param_groups[1]["amsgrad"] = True
    bad.grad = torch.ones(4)
    with pytest.raises(OptionError, match="amsgrad of Parameter 0 of group 1"):
        collect(optimizer.param_groups, params, all_of)
    assert not optimizer.state[good]


def test_scalars_are_shared_by_group_and_count() -> None:
    parameters = [weight() for _ in range(4)]
    optimizer = AdamW([{"params": parameters[:3]}, {"params": parameters[3:]}])
    params = optimizer._params()
    optimizer.state[parameters[1]]["step"] = as_step(7)
    updates = [
        ParamUpdate(group, params.get(p), torch.ones(4)) for group in optimizer.param_groups
        for p in group["params"]
    ]  # fmt: skip
    plan = make_plan(updates, params, optimizer.state, factor=0.5)
    assert [row.scalars for row in plan.rows] == [0, 1, 0, 2]
    assert len(plan.scalars) == 3
    assert [count.item() for count in plan.counts] == [0, 7, 0, 0]
    assert len({row.key for row in plan.rows}) == 4
    assert not plan.commits


def test_keys_differ_by_step() -> None:
    p = weight()
    optimizer, params = optimizer_with(p)
    updates = [ParamUpdate(optimizer.param_groups[0], params.get(p), torch.ones(4))]
    keys = []
    for step in range(50):
        optimizer.state[p]["step"] = as_step(step)
        keys.append(make_plan(updates, params, optimizer.state, factor=1.0).rows[0].key)
    assert len(set(keys)) == 50
    assert all(0 <= key < 1 << 63 for key in keys)


def test_a_gradient_that_is_still_to_come_is_expected() -> None:
    p, q = weight(), weight()
    optimizer, params = optimizer_with(p, q)
    plan = make_plan(
        [ParamUpdate(optimizer.param_groups[0], params.get(p), None)], params, optimizer.state,
        factor=1.0,
    )  # fmt: skip
    assert plan.rows[0].expected
    assert plan.rows[0].gradient is None
    assert not plan.rows[1].expected
    assert plan.rows[1].weight is q  # a commit takes it too
    assert not optimizer.state[p]  # no gradient yet: no step count
