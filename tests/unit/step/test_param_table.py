import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from tensorstow.states.offload_policy import Stowage
from tensorstow.states.policy import PipelinePolicy
from tensorstow.states.state_store import Placement
from tensorstow.step.param_table import Members

SMALL = PipelinePolicy(chunk_elements=4096)


def members_at(directory: Path) -> Members:
    return Members(Stowage(Placement(1.0, (directory,), None), SMALL), lambda _: None)


def weights(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(100 + i)) for i in range(count)]


def plain(*parameters: nn.Parameter) -> dict[int, bool]:
    return {id(p): False for p in parameters}


def test_numbers_are_given_once(tmp_path: Path) -> None:
    first, second = weights(2)
    members = members_at(tmp_path)
    members.attach([first], plain(first))
    members.attach([first, second], plain(first, second))
    assert [members.get(p).number for p in (first, second)] == [0, 1]
    assert len(members) == 2
    assert members.find(weights(1)[0]) is None
    with pytest.raises(KeyError):
        members.get(weights(1)[0])


def test_weights_that_are_lent_apart_have_chunks_apart(tmp_path: Path) -> None:
    parameters = weights(4)
    for number in (0, 3):
        parameters[number].lessor = object()  # type: ignore[attr-defined]
    parameters[2].lessor = parameters[0].lessor  # type: ignore[attr-defined]
    members = members_at(tmp_path)
    members.attach(parameters, plain(*parameters))
    assert [m.number for m in map(members.get, parameters)] == [0, 1, 2, 3]
    assert [tuple(chunk.owners) for chunk in members.store.chunks] == [(0, 2), (1,), (3,)]


def test_nothing_new_makes_nothing_new(tmp_path: Path) -> None:
    (weight,) = weights(1)
    members = members_at(tmp_path)
    members.attach([weight], plain(weight))
    store = members.store
    files = store.directories
    members.attach([weight], plain(weight))
    assert members.store is store
    assert store.directories == files


def test_all_exchanged_begins_anew_and_some_does_not(tmp_path: Path) -> None:
    first, second, third = weights(3)
    members = members_at(tmp_path)
    members.attach([first, second], plain(first, second))
    store = members.store
    members.attach([third], plain(second, third))
    assert members.store is store
    fresh = weights(1)[0]
    members.attach([fresh], plain(fresh))
    assert members.store is not store
    assert members.find(first) is None
    assert members.store.memory().logical_bytes == 800


def test_a_group_that_wants_other_states_is_seen() -> None:
    (weight,) = weights(1)
    members = Members(Stowage(Placement(0.0, (), None), SMALL), lambda _: None)
    members.attach([weight], plain(weight))
    assert not members.differ(plain(weight))
    assert members.differ({id(weight): True})
    assert not members.differ({})


def test_writing_by_others_is_seen_by_version_and_by_address() -> None:
    (weight,) = weights(1)
    members = Members(Stowage(Placement(0.0, (), None), SMALL), lambda _: None)
    members.attach([weight], plain(weight))
    member = members.get(weight)
    assert member.written_by_others  # nobody knows yet
    member.remember()
    assert not member.written_by_others
    with torch.no_grad():
        weight.add_(1)
    assert member.written_by_others
    member.remember()
    weight.data = weight.data.clone()
    assert member.written_by_others
    member.remember()
    members.forget_versions()
    assert member.written_by_others


def test_parameters_do_not_keep_the_store_alive(tmp_path: Path) -> None:
    (weight,) = weights(1)
    members = members_at(tmp_path)
    members.attach([weight], plain(weight))
    watcher = weakref.ref(members.store)
    del members
    gc.collect()
    assert watcher() is None
    assert not weight._post_accumulate_grad_hooks
    weight.sum().backward()


def test_closing_takes_the_hooks_off(tmp_path: Path) -> None:
    (weight,) = weights(1)
    members = members_at(tmp_path)
    members.attach([weight], plain(weight))
    assert weight._post_accumulate_grad_hooks
    members.close()
    assert not weight._post_accumulate_grad_hooks
