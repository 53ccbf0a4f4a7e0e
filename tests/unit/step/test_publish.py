import torch

from tensorstow.states.layout import Family
from tensorstow.states.native_pipeline import StepRow
from tensorstow.step.param_table import Member
from tensorstow.step.publish import deliver, hide, shadow
from tensorstow.step.step_plan import Due, Turn
from tensorstow.step.step_plan import Turn as Step  # one step of the optimizer


def member_of(values: torch.Tensor, number: int = 0) -> Member:
    family = Family(values.dtype, amsgrad=False)
    parameter = torch.nn.Parameter(values)
    return Member(parameter, parameter, number, family, values.numel(), {})


def turn_of(*members: Member) -> Step:
    dues = [Due({}, member, None) for member in members]
    rows = [StepRow(weight=member.weight, scalars=3) for member in members]
    return Turn(dues, [], rows, torch.zeros(0, 9).numpy())


def test_a_shadow_is_written_in_place_of_the_weight() -> None:
    member = member_of(torch.arange(4.0))
    turn = turn_of(member)
    shadow(turn)
    assert member.host is not None
    assert turn.rows[0] == StepRow(weight=member.host, scalars=3)
    assert member.weight is member.host
    assert torch.equal(member.parameter, torch.arange(4.0))
    hide(member)
    assert member.parameter.isnan().all()
    member.host.mul_(2)
    deliver(member)
    assert torch.equal(member.parameter, 2 * torch.arange(4.0))
    assert member.host is None
    assert not member.written_by_others


def test_what_has_no_shadow_is_left_alone() -> None:
    member = member_of(torch.ones(4))
    before = member.parameter._version
    hide(member)
    deliver(member)
    assert member.parameter._version == before
    assert torch.equal(member.parameter, torch.ones(4))


def test_autograd_sees_a_delivery() -> None:
    member = member_of(torch.ones(4))
    graph = member.parameter.square().sum()
    shadow(turn_of(member))
    deliver(member)
    try:
        torch.autograd.backward(graph)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    else:
        raise AssertionError
