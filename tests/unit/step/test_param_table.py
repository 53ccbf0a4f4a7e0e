import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from pagers import let_attributes_be_pagers
from tensorstow.states.layout import OptionalStates
from tensorstow.states.offload_policy import OffloadPolicy
from tensorstow.states.policy import PipelinePolicy
from tensorstow.states.state_store import Placement
from tensorstow.step.param_table import ParamTable

SMALL = PipelinePolicy(chunk_elements=4096)


@pytest.fixture(autouse=True)
def _pagers(monkeypatch: pytest.MonkeyPatch) -> None:
    let_attributes_be_pagers(monkeypatch)


def table_at(directory: Path) -> ParamTable:
    return ParamTable(OffloadPolicy(Placement(1.0, (directory,), None), SMALL), lambda _: None)


def weights(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(100 + i)) for i in range(count)]


def plain(*parameters: nn.Parameter) -> dict[int, OptionalStates]:
    return {id(p): OptionalStates(amsgrad=False) for p in parameters}


def test_numbers_are_given_once(tmp_path: Path) -> None:
    first, second = weights(2)
    params = table_at(tmp_path)
    params.attach([first], plain(first))
    params.attach([first, second], plain(first, second))
    assert [params.get(p).number for p in (first, second)] == [0, 1]
    assert len(params.all()) == 2
    assert params.find(weights(1)[0]) is None
    with pytest.raises(KeyError):
        params.get(weights(1)[0])


def test_weights_that_are_pinned_apart_have_chunks_apart(tmp_path: Path) -> None:
    parameters = weights(4)
    for number in (0, 3):
        parameters[number].pager = object()  # type: ignore[attr-defined]
    parameters[2].pager = parameters[0].pager  # type: ignore[attr-defined]
    params = table_at(tmp_path)
    params.attach(parameters, plain(*parameters))
    assert [m.number for m in map(params.get, parameters)] == [0, 1, 2, 3]
    assert [tuple(chunk.owners) for chunk in params.store.chunks] == [(0, 2), (1,), (3,)]


def test_nothing_new_makes_nothing_new(tmp_path: Path) -> None:
    (weight,) = weights(1)
    params = table_at(tmp_path)
    params.attach([weight], plain(weight))
    store = params.store
    files = store.storage.directories
    params.attach([weight], plain(weight))
    assert params.store is store
    assert store.storage.directories == files


def test_all_exchanged_begins_anew_and_some_does_not(tmp_path: Path) -> None:
    first, second, third = weights(3)
    params = table_at(tmp_path)
    params.attach([first, second], plain(first, second))
    store = params.store
    params.attach([third], plain(second, third))
    assert params.store is store
    fresh = weights(1)[0]
    params.attach([fresh], plain(fresh))
    assert params.store is not store
    assert params.find(first) is None
    assert params.store.memory().logical_bytes == 800


def test_a_group_that_wants_other_states_is_seen() -> None:
    (weight,) = weights(1)
    params = ParamTable(OffloadPolicy(Placement(0.0, (), None), SMALL), lambda _: None)
    params.attach([weight], plain(weight))
    assert not params.differ(plain(weight))
    assert params.differ({id(weight): OptionalStates(amsgrad=True)})
    assert params.differ({id(weight): OptionalStates(amsgrad=False, ema=True)})
    assert not params.differ({})


def test_writing_by_others_is_seen_by_version_and_by_address() -> None:
    (weight,) = weights(1)
    params = ParamTable(OffloadPolicy(Placement(0.0, (), None), SMALL), lambda _: None)
    params.attach([weight], plain(weight))
    param = params.get(weight)
    assert param.written_by_others  # nobody knows yet
    param.remember()
    assert not param.written_by_others
    with torch.no_grad():
        weight.add_(1)
    assert param.written_by_others
    param.remember()
    weight.data = weight.data.clone()
    assert param.written_by_others


def test_parameters_do_not_keep_the_store_alive(tmp_path: Path) -> None:
    (weight,) = weights(1)
    params = table_at(tmp_path)
    params.attach([weight], plain(weight))
    watcher = weakref.ref(params.store)
    del params
    gc.collect()
    assert watcher() is None
    assert not weight._post_accumulate_grad_hooks
    weight.sum().backward()


def test_closing_takes_the_hooks_off(tmp_path: Path) -> None:
    (weight,) = weights(1)
    params = table_at(tmp_path)
    params.attach([weight], plain(weight))
    assert weight._post_accumulate_grad_hooks
    params.close()
    assert not weight._post_accumulate_grad_hooks
