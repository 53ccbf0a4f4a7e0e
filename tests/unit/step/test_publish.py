import torch

from tensorstow.states.layout import Family
from tensorstow.states.native_pipeline import StepRow
from tensorstow.step.managed_param import (
    ManagedParam,
    ParamUpdate,
    StepPlan,
    fill_with_nan,
    publish_weight,
    write_to_copies,
)
from tensorstow.step.managed_param import StepPlan as Step


def param_of(values: torch.Tensor, number: int = 0) -> ManagedParam:
    family = Family(values.dtype, amsgrad=False)
    parameter = torch.nn.Parameter(values)
    return ManagedParam(parameter, parameter, number, family, values.numel(), {})


def plan_of(*params: ManagedParam) -> Step:
    updates = [ParamUpdate({}, param, None) for param in params]
    rows = [StepRow(weight=param.weight, scalars=3) for param in params]
    return StepPlan(updates, [], rows, torch.zeros(0, 9).numpy())


def test_a_copy_is_written_in_place_of_the_weight() -> None:
    param = param_of(torch.arange(4.0))
    plan = plan_of(param)
    write_to_copies(plan)
    assert param.host is not None
    assert plan.rows[0] == StepRow(weight=param.host, scalars=3)
    assert param.weight is param.host
    assert torch.equal(param.parameter, torch.arange(4.0))
    fill_with_nan(param)
    assert param.parameter.isnan().all()
    param.host.mul_(2)
    publish_weight(param)
    assert torch.equal(param.parameter, 2 * torch.arange(4.0))
    assert param.host is None
    assert not param.written_by_others


def test_a_weight_without_a_copy_is_left_alone() -> None:
    param = param_of(torch.ones(4))
    before = param.parameter._version
    fill_with_nan(param)
    publish_weight(param)
    assert param.parameter._version == before
    assert torch.equal(param.parameter, torch.ones(4))


def test_autograd_sees_the_published_weight() -> None:
    param = param_of(torch.ones(4))
    graph = param.parameter.square().sum()
    write_to_copies(plan_of(param))
    publish_weight(param)
    try:
        torch.autograd.backward(graph)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    else:
        raise AssertionError
