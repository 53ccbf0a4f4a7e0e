"""Steps that repeat the last one give the bits of steps that are looked at from the start."""

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tensorstow import AdamW
from tensorstow.base.errors import DTypeError, ForkError, OptionError, PoisonedError, StowError
from tensorstow.colossalai import HybridAdam
from tensorstow.states.native_pipeline import UpdatePipeline
from tensorstow.step.repeated_steps import RepeatedSteps
from tensorstow.step.step_plan import Groups

Change = Callable[[AdamW, list[nn.Parameter]], None]


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    """A matrix, a vector, two images in channels_last, an empty one, and one without gradients."""
    generator = torch.Generator().manual_seed(0)

    def image() -> torch.Tensor:
        values = torch.randn(4, 3, 5, 2, generator=generator)
        return values.to(memory_format=torch.channels_last)

    matrix, vector = (torch.randn(n, generator=generator) for n in ((70, 33), (5,)))
    tensors = [matrix, vector, image(), image(), torch.empty(0), torch.ones(9)]
    return [nn.Parameter(t.to(dtype)) for t in tensors]


def optimizer_of(params: list[nn.Parameter], **options: Any) -> AdamW:  # noqa: ANN401
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.5, "lr": 0.02}]
    return AdamW(groups, lr=0.01, **options)


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in params[:-1]:
        gradient = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = gradient.contiguous(memory_format=torch.preserve_format)
        if p.dim() == 4:
            p.grad = p.grad.contiguous(memory_format=torch.channels_last)


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The thread of each step that repeated the last one."""
    steps: list[int] = []
    step = RepeatedSteps.step

    def counted(
        self: RepeatedSteps, pipeline: UpdatePipeline, groups: Groups, factor: float
    ) -> None:
        steps.append(threading.get_ident())
        step(self, pipeline, groups, factor)

    monkeypatch.setattr(RepeatedSteps, "step", counted)
    return steps


def train(dtype: torch.dtype, change: Change, **options: Any) -> list[torch.Tensor]:  # noqa: ANN401
    """Take six steps, with a change after the third; return weights, states and step counts."""
    torch.manual_seed(0)  # for the changes
    params = parameters(dtype)
    optimizer = optimizer_of(params, **options)
    for step in range(6):
        give_gradients(params, step)
        if step == 3:
            change(optimizer, params)
        optimizer.step()
    states = [s for p in params for _, s in sorted((optimizer.states_of(p) or {}).items())]
    return [*(p.detach().clone() for p in params), *(torch.as_tensor(s).clone() for s in states)]


def set_group(**values: object) -> Change:
    def change(optimizer: AdamW, _: list[nn.Parameter]) -> None:
        optimizer.param_groups[1].update(values)

    return change


def nothing(*_: object) -> None:
    """Change nothing."""


def drop_gradient(_: AdamW, params: list[nn.Parameter]) -> None:
    params[0].grad = None


def first_gradient(_: AdamW, params: list[nn.Parameter]) -> None:
    params[-1].grad = torch.ones_like(params[-1])


def strided_gradient(_: AdamW, params: list[nn.Parameter]) -> None:
    params[0].grad = torch.randn(33, 70, dtype=params[0].dtype).t()


def row_major_gradient(_: AdamW, params: list[nn.Parameter]) -> None:
    assert params[2].grad is not None
    params[2].grad = params[2].grad.contiguous()


def swapped_gradients(_: AdamW, params: list[nn.Parameter]) -> None:
    params[2].grad, params[3].grad = params[3].grad, params[2].grad


def subclass_gradient(_: AdamW, params: list[nn.Parameter]) -> None:
    assert params[1].grad is not None
    params[1].grad = nn.Parameter(params[1].grad)


def other_memory(_: AdamW, params: list[nn.Parameter]) -> None:
    params[0].data = torch.randn(70, 33).to(params[0].dtype)


def other_values(_: AdamW, params: list[nn.Parameter]) -> None:
    with torch.no_grad():
        params[0].mul_(3)
        params[2].add_(1)


def other_values_by_data(_: AdamW, params: list[nn.Parameter]) -> None:
    params[0].data.mul_(3)


def row_major_weight(_: AdamW, params: list[nn.Parameter]) -> None:
    assert params[0].grad is not None
    params[0].data = params[0].data.reshape(33, 70)
    params[0].grad = params[0].grad.reshape(33, 70)


def no_states(optimizer: AdamW, _: list[nn.Parameter]) -> None:
    optimizer.state.clear()


def empty_states(optimizer: AdamW, params: list[nn.Parameter]) -> None:
    optimizer.state[params[0]] = {}


def other_moment(optimizer: AdamW, params: list[nn.Parameter]) -> None:
    state = optimizer.state[params[0]]
    state["exp_avg"] = torch.full_like(state["exp_avg"], 0.25)


def moment_in_place(optimizer: AdamW, params: list[nn.Parameter]) -> None:
    optimizer.state[params[0]]["exp_avg"].mul_(2)


def other_count(optimizer: AdamW, params: list[nn.Parameter]) -> None:
    optimizer.state[params[0]]["step"] = torch.tensor(40.0)


def count_in_place(optimizer: AdamW, params: list[nn.Parameter]) -> None:
    optimizer.state[params[0]]["step"].fill_(40)


def count_in_other_memory(optimizer: AdamW, params: list[nn.Parameter]) -> None:
    optimizer.state[params[0]]["step"].data = torch.tensor(40.0)


def count_of_another_dtype(optimizer: AdamW, params: list[nn.Parameter]) -> None:
    optimizer.state[params[0]]["step"] = torch.tensor(40.0, dtype=torch.float64)


def whole_numbers(optimizer: AdamW, params: list[nn.Parameter]) -> None:
    optimizer.state[params[0]]["step"] = torch.tensor(40)


def other_order(optimizer: AdamW, _: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["params"].reverse()


def other_group(optimizer: AdamW, _: list[nn.Parameter]) -> None:
    first, second = (group["params"] for group in optimizer.param_groups)
    second.insert(0, first.pop())


def one_more_group(optimizer: AdamW, _: list[nn.Parameter]) -> None:
    new = nn.Parameter(torch.ones(3))
    new.grad = torch.ones(3)
    optimizer.add_param_group({"params": [new]})


def loaded(optimizer: AdamW, _: list[nn.Parameter]) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def frozen(_: AdamW, params: list[nn.Parameter]) -> None:
    params[0].requires_grad = False


def clipped(optimizer: AdamW, _: list[nn.Parameter]) -> None:
    optimizer.clip_grad_norm_(0.1)


def doubled_rate(optimizer: AdamW, _: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.02)


REPEATED = {
    "nothing": nothing,
    "a gradient less": drop_gradient,
    "a rate": set_group(lr=0.5),
    "a rate in a tensor": doubled_rate,
    "betas": set_group(betas=(0.5, 0.25)),
    "the direction": set_group(maximize=True),
    "decay": set_group(weight_decay=0.0, eps=0.5),
    "gradients of each other": swapped_gradients,
    "a moment in place": moment_in_place,
    "a count in place": count_in_place,
    "frozen": frozen,
    "clipped": clipped,
    "a weight of another shape": row_major_weight,
}
"""Changes that native code sees or that are scalars: the next step is a repetition."""
NEW = {
    "a first gradient": first_gradient,
    "a strided gradient": strided_gradient,
    "a gradient in another order": row_major_gradient,
    "a gradient of another class": subclass_gradient,
    "a weight elsewhere": other_memory,
    "no states": no_states,
    "no states of one": empty_states,
    "another moment": other_moment,
    "another count": other_count,
    "a count elsewhere": count_in_other_memory,
    "another order": other_order,
    "another group": other_group,
    "one more group": one_more_group,
}
"""Changes after which a step is looked at from the start."""
SINCE = {"a count of another dtype": count_of_another_dtype, "a whole count": whole_numbers}
"""Changes after which every step is looked at from the start."""
AS_IT_MAY = {"loaded": loaded, "written": other_values, "written by data": other_values_by_data}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*REPEATED, *NEW, *SINCE, *AS_IT_MAY])
def test_bits_are_those_of_a_step_from_the_start(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, repeated: list[int]
) -> None:
    change: Change = (REPEATED | NEW | SINCE | AS_IT_MAY)[name]
    actual = train(dtype, change)
    if name not in AS_IT_MAY:
        assert len(repeated) == (2 if name in SINCE else 4 if name in NEW else 5)
    repeated.clear()
    monkeypatch.setattr(RepeatedSteps, "after", lambda *_: None)
    expected = train(dtype, change)
    assert not repeated
    assert len(actual) == len(expected)
    for mine, other in zip(actual, expected, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("options", [{"states": "disk"}, {"states": 0.5}, {"ram_budget": "49MiB"}])
def test_states_on_disk_are_repeated_too(options: dict[str, Any], repeated: list[int]) -> None:
    if "states" not in options:
        options = {**options, "states": "disk"}
    actual = train(torch.float32, nothing, **options)
    assert len(repeated) == 5
    for mine, other in zip(actual, train(torch.float32, nothing), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("state_format", ["bf16", "int8", "split"])
def test_random_bits_are_those_of_a_step_from_the_start(
    state_format: str, monkeypatch: pytest.MonkeyPatch, repeated: list[int]
) -> None:
    dtype = torch.bfloat16 if state_format == "split" else torch.float32
    actual = train(dtype, nothing, states="disk", state_format=state_format)
    assert len(repeated) == 5
    monkeypatch.setattr(RepeatedSteps, "after", lambda *_: None)
    expected = train(dtype, nothing, states="disk", state_format=state_format)
    assert all(map(torch.equal, actual, expected))


def test_a_run_that_commits_is_not_repeated(tmp_path: Path, repeated: list[int]) -> None:
    train(torch.float32, nothing, states="disk", dir=tmp_path / "run")
    assert not repeated


def stepped_twice(dtype: torch.dtype = torch.float32) -> tuple[AdamW, list[nn.Parameter]]:
    params = parameters(dtype)
    optimizer = optimizer_of(params)
    for step in range(2):
        give_gradients(params, step)
        optimizer.step()
    give_gradients(params, 2)
    return optimizer, params


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (set_group(lr=float("nan")), OptionError),
        (set_group(foreach=True), OptionError),
        (set_group(amsgrad=True), OptionError),
        (
            lambda _, params: setattr(params[0], "grad", params[0].grad.to_sparse()),
            DTypeError,
        ),
    ],
)
def test_refusals_are_those_of_a_step_from_the_start(
    change: Change, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = []
    for repeats in (True, False):
        if not repeats:
            monkeypatch.setattr(RepeatedSteps, "after", lambda *_: None)
        optimizer, params = stepped_twice()
        before = [p.detach().clone() for p in params]
        change(optimizer, params)
        with pytest.raises(error) as raised:
            optimizer.step()
        messages.append(str(raised.value))
        assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert messages[0] == messages[1]


# --- changes of a parameter that the last steps did not update, and others that hide ---

Scenario = Callable[[AdamW, list[nn.Parameter]], None]


def idle_while(change: Change) -> Scenario:
    """Change the first parameter while it has no gradient, in a step that repeats none."""

    def scenario(optimizer: AdamW, params: list[nn.Parameter]) -> None:
        give_gradients(params, 3)
        params[0].grad = None
        strided_gradient_of_second(params)
        change(optimizer, params)
        optimizer.step()
        give_gradients(params, 4)
        if params[0].shape != (70, 33):
            params[0].grad = torch.ones_like(params[0])
        optimizer.step()

    return scenario


def strided_gradient_of_second(params: list[nn.Parameter]) -> None:
    params[1].grad = torch.ones(10, dtype=params[1].dtype)[::2]


def fewer_elements(_: AdamW, params: list[nn.Parameter]) -> None:
    params[0].data = torch.zeros(10, dtype=params[0].dtype)


def gaps(_: AdamW, params: list[nn.Parameter]) -> None:
    params[0].data = torch.zeros(140, 33, dtype=params[0].dtype)[::2]


def wider(_: AdamW, params: list[nn.Parameter]) -> None:
    params[0].data = torch.zeros(70, 33, dtype=torch.float64)


def loaded_and_written(optimizer: AdamW, params: list[nn.Parameter]) -> None:
    optimizer.load_state_dict(optimizer.state_dict())
    other_values(optimizer, params)


def no_dict(optimizer: AdamW, params: list[nn.Parameter]) -> None:
    optimizer.state[params[-1]] = [1, 2]  # type: ignore[assignment]


def amsgrad_while_idle(optimizer: AdamW, params: list[nn.Parameter]) -> None:
    for p in params[2:]:
        p.grad = None
    optimizer.param_groups[1]["amsgrad"] = True


def other_strides(_: AdamW, params: list[nn.Parameter]) -> None:
    params[2].data = params[2].data.transpose(0, 1)
    assert params[2].grad is not None
    params[2].grad = params[2].grad.transpose(0, 1)


def written_by_data_before_a_new_step(optimizer: AdamW, params: list[nn.Parameter]) -> None:
    give_gradients(params, 3)
    other_values_by_data(optimizer, params)
    strided_gradient_of_second(params)
    optimizer.step()


def tuple_of_groups(optimizer: AdamW, params: list[nn.Parameter]) -> None:
    optimizer.param_groups = tuple(optimizer.param_groups)  # type: ignore[assignment]
    give_gradients(params, 3)
    optimizer.step()


def other_class(optimizer: AdamW, params: list[nn.Parameter]) -> None:
    class Own(nn.Parameter):
        pass

    give_gradients(params, 3)
    params[0].__class__ = Own
    optimizer.step()


def two_errors(optimizer: AdamW, params: list[nn.Parameter]) -> None:
    assert params[0].grad is not None
    params[0].grad = params[0].grad.to_sparse()
    optimizer.param_groups[1]["lr"] = float("nan")
    optimizer.step()


def count_as_bits(optimizer: AdamW, params: list[nn.Parameter]) -> None:
    count = optimizer.state[params[0]]["step"]
    count.data = count.data.view(torch.int32)
    optimizer.step()


def stepped_by_another(optimizer: AdamW, params: list[nn.Parameter]) -> None:
    for p in params:
        p.requires_grad_(False)  # noqa: FBT003
    other = AdamW(params)
    other.step()
    for p in params:
        p.requires_grad_(True)  # noqa: FBT003
    optimizer.step()


def then_step(change: Change) -> Scenario:
    def scenario(optimizer: AdamW, params: list[nn.Parameter]) -> None:
        give_gradients(params, 3)
        change(optimizer, params)
        optimizer.step()

    return scenario


SCENARIOS: dict[str, Scenario] = {
    "fewer elements": idle_while(fewer_elements),
    "gaps": idle_while(gaps),
    "another dtype": idle_while(wider),
    "loaded and written": idle_while(loaded_and_written),
    "written": idle_while(other_values),
    "amsgrad": idle_while(amsgrad_while_idle),
    "no dict": idle_while(no_dict),
    "other strides": then_step(other_strides),
    "amsgrad of two": then_step(set_group(amsgrad=torch.ones(2))),
    **{
        act.__name__: act
        for act in (
            written_by_data_before_a_new_step,
            tuple_of_groups,
            other_class,
            two_errors,
            count_as_bits,
            stepped_by_another,
        )
    },
}


def outcome(scenario: Scenario, dtype: torch.dtype) -> tuple[list[torch.Tensor], str]:
    optimizer, params = stepped_twice(dtype)
    try:
        scenario(optimizer, params)
    except StowError as error:
        return [p.detach().clone() for p in params], str(error)
    return [p.detach().clone() for p in params], ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCENARIOS)
def test_what_comes_of_it_is_what_comes_of_new_steps(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, error = outcome(SCENARIOS[name], dtype)
    monkeypatch.setattr(RepeatedSteps, "after", lambda *_: None)
    expected, expected_error = outcome(SCENARIOS[name], dtype)
    assert error == expected_error
    assert all(map(torch.equal, weights, expected))


def test_a_parameter_that_becomes_the_optimizers_is_updated() -> None:
    own, other = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3, device="meta"))
    other.requires_grad_(False)  # noqa: FBT003
    optimizer = HybridAdam([own, other], lr=0.1)
    for _ in range(2):
        own.grad = torch.ones(5)
        optimizer.step()
    torch.utils.swap_tensors(other, nn.Parameter(torch.ones(3)))  # as model.cpu() does
    own.grad, other.grad = torch.ones(5), torch.ones(3)
    optimizer.step()
    assert torch.allclose(other, torch.full((3,), 0.9))


def test_an_optimizer_is_freed_after_a_step_that_failed() -> None:
    optimizer, _ = stepped_twice()
    optimizer._register_update_hook(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    alive = weakref.ref(optimizer)
    del optimizer, _
    gc.collect()
    assert alive() is None


def test_gradients_stay_on_in_a_forked_child() -> None:
    optimizer, _ = stepped_twice()
    child = os.fork()
    if child == 0:
        try:
            optimizer.step()
        except ForkError:
            os._exit(0 if torch.is_grad_enabled() else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def test_a_closed_optimizer_takes_no_step() -> None:
    optimizer, _ = stepped_twice()
    optimizer.close()
    with pytest.raises(PoisonedError):
        optimizer.step()


def test_graphs_of_old_weights_are_detected() -> None:
    optimizer, params = stepped_twice()
    product = (params[1] * params[1]).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()  # type: ignore[no-untyped-call]


def test_gradients_are_released_after_the_step() -> None:
    optimizer, params = stepped_twice()
    storage = weakref.ref(params[0].grad.untyped_storage())  # type: ignore[union-attr]
    optimizer.step()
    for p in params:
        p.grad = None
    assert storage() is None


def calls_of_a_step(count: int) -> int:
    """Return how many Python functions a repeated step of so many parameters calls."""
    params = [nn.Parameter(torch.ones(3)) for _ in range(count)]
    for p in params:
        p.grad = torch.ones(3)
    optimizer = AdamW(params)
    calls = 0

    def note(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    for _ in range(2):
        optimizer.step()
    sys.setprofile(note)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    optimizer.close()
    return calls


def test_a_repeated_step_calls_no_python_for_a_parameter() -> None:
    calls_of_a_step(5)  # what a first step imports
    assert calls_of_a_step(500) == calls_of_a_step(5)
