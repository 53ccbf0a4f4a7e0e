"""What a generation says of parameters is checked before native code gets any of it."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attacks.rows import Run
from tensorstow.base.errors import DamageError, StoreFormatError
from tensorstow.checkpoint.stored_layout import read_hyper, read_layout
from tensorstow.store.records import Generation

Edit = Callable[[Any], object]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Generation:
    run = Run(tmp_path_factory.mktemp("good"))
    run.train(1)
    run.optimizer.commit()
    generation = run.optimizer._params().store.storage.store.generation()  # type: ignore[union-attr]
    run.optimizer.close()
    assert generation is not None
    return generation


def set_at(*path: Any) -> Edit:  # noqa: ANN401
    *keys, last, value = path

    def edit(whole: Any) -> None:  # noqa: ANN401
        for key in keys:
            whole = whole[key]
        whole[last] = value

    return edit


def runs(chunk: int, *found: list[Any]) -> Edit:
    return set_at("chunks", chunk, "runs", list(found))


def test_it_is_read_as_it_was_written(good: Generation) -> None:
    layout = read_layout(good)
    assert [p.name for p in layout.parameters] == ["wide", "narrow", "small"]
    assert [p.shape for p in layout.parameters] == [(15, 10), (70,), (40,)]
    assert [p.dtype for p in layout.parameters] == ["float32", "bfloat16", "float32"]
    assert sum(run.count for c in layout.chunks for run in c.plan.runs) == 150 + 70 + 40
    hyper = read_hyper(good, 3)
    assert hyper.places == {0: (0, 0), 1: (0, 1), 2: (1, 0)}
    assert hyper.steps == {0: 1.0, 1: 1.0, 2: 1.0}


LAYOUTS: list[Edit] = [
    set_at("parameters", None),
    set_at("parameters", {}),
    set_at("parameters", 0, 3),
    set_at("parameters", 0, "name", 3),
    set_at("parameters", 0, "shape", "ab"),
    set_at("parameters", 0, "shape", [15, -10]),
    set_at("parameters", 0, "shape", [15, 10.0]),
    set_at("parameters", 0, "shape", [15, 11]),
    set_at("parameters", 0, "shape", [1 << 60, 1 << 60]),
    set_at("parameters", 0, "order", [0, 0]),
    set_at("parameters", 0, "order", [False, True]),
    set_at("parameters", 0, "dtype", "quint8"),
    set_at("parameters", 0, "dtype", ["float32"]),
    set_at("parameters", 0, "dtype", "bfloat16"),
    set_at("parameters", 0, "format", "int4"),
    set_at("parameters", 0, "format", "int8"),
    set_at("parameters", 0, "amsgrad", 0),
    set_at("parameters", 0, "amsgrad", 1),
    lambda layout: layout["parameters"].append(layout["parameters"][0]),
    lambda layout: layout["parameters"].pop(),
    lambda layout: layout["chunks"].pop(),
    set_at("chunks", 0, "runs", None),
    runs(0),
    runs(0, [-1, 0, 64, 0]),
    runs(0, [99, 0, 64, 0]),
    runs(0, [0, -64, 64, 0]),
    runs(0, [0, 1 << 40, 1, 0]),
    runs(0, [0, 0, 1 << 62, 0]),
    runs(0, [0, 0, 0, 0]),
    runs(0, [0, 0, 64, 32]),
    runs(0, [0, 0, 64, False]),
    runs(0, [0, 0, 64, 0.0]),
    runs(0, [0, 0, 64]),
    runs(0, [0, 64, 64, 0]),
    runs(0, [0, 0, 32, 0], [0, 32, 32, 32]),
    runs(0, [0, 0, 32, 0], [1, 0, 32, 32]),
    set_at("chunks", 0, "elements", 96),
    set_at("chunks", 0, "weight", {"bytes": 2, "per": 1}),
    set_at("chunks", 0, "streams", []),
]
HYPERS: list[Edit] = [
    set_at("groups", 3),
    set_at("members", None),
    set_at("members", 0, 3),
    set_at("members", 0, 0, -1),
    set_at("members", 0, 0, 3),
    set_at("members", 0, 0, 1),
    set_at("members", 0, 0, 1.0),
    lambda hyper: hyper["members"].pop(),
    set_at("steps", []),
    set_at("steps", "3", 1.0),
    set_at("steps", "-1", 1.0),
    set_at("steps", "x", 1.0),
    set_at("steps", "0", float("nan")),
    set_at("steps", "0", -1.0),
    set_at("steps", "0", 1e300),
    set_at("steps", "0", "1"),
    set_at("reseed", [3]),
    set_at("reseed", {}),
    set_at("update_on", 3),
]


@pytest.mark.parametrize("edit", LAYOUTS, ids=range(len(LAYOUTS)))
def test_layouts_that_we_do_not_write(edit: Edit, good: Generation) -> None:
    layout = copy.deepcopy(good.layout)
    edit(layout)
    with pytest.raises((DamageError, StoreFormatError), match=r"cannot be (?!read)|cannot be read"):
        read_layout(replace(good, layout=layout))


@pytest.mark.parametrize("edit", HYPERS, ids=range(len(HYPERS)))
def test_hyper_parameters_that_we_do_not_write(edit: Edit, good: Generation) -> None:
    hyper = copy.deepcopy(good.hyper)
    edit(hyper)
    with pytest.raises(DamageError, match=r"Generation 1 \(step 1\) .* cannot be"):
        read_hyper(replace(good, hyper=hyper), 3)


def test_each_chunk_has_bytes(good: Generation) -> None:
    with pytest.raises(DamageError, match="the chunks of the generation cannot be"):
        read_layout(replace(good, chunks=good.chunks[:-1]))


def resumed(directory: Path, edit: Callable[[Generation], Generation]) -> tuple[Run, str]:
    """Resume a generation that is edited; return the run, and its error."""
    run = Run(directory)
    run.train(1)
    run.optimizer.commit()
    store = run.optimizer._params().store.storage.store  # type: ignore[union-attr]
    generation = store.generation()
    assert generation is not None
    weights = run.facts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(store), "generation", lambda *_: edit(generation))
        with pytest.raises((DamageError, ValueError)) as caught:
            run.optimizer.resume()
    assert run.facts() == weights
    run.optimizer.close()
    return run, str(caught.value)


def hyper_with(edit: Edit) -> Callable[[Generation], Generation]:
    def change(generation: Generation) -> Generation:
        hyper = copy.deepcopy(generation.hyper)
        edit(hyper)
        return replace(generation, hyper=hyper)

    return change


def extra_of(extra: object) -> Callable[[Generation], Generation]:
    return lambda generation: replace(generation, extra=extra)


def tensors_with(**changed: Any) -> Callable[[Generation], Generation]:  # noqa: ANN401
    def change(generation: Generation) -> Generation:
        found = [replace(t, **changed) if t.name == "counts" else t for t in generation.tensors]
        return replace(generation, tensors=found)

    return change


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (hyper_with(set_at("groups", 0, "lr", -1.0)), "lr=-1.0 was given"),
        (hyper_with(set_at("groups", 0, "lr", float("nan"))), "must be finite"),
        (hyper_with(set_at("groups", 0, "maximize", "yes")), "True or False"),
        (hyper_with(set_at("groups", 0, "params", [])), "a group has amsgrad, betas"),
        (hyper_with(lambda hyper: hyper["groups"][0].pop("eps")), "a group has amsgrad, betas"),
        (hyper_with(set_at("groups", 0, [])), "a group has amsgrad, betas"),
        (extra_of({"a": {"__tensor__": 77}}), "its extra cannot be read"),
        (extra_of({"a": {"__scalar__": ["O", "41" * 8]}}), "its extra cannot be read"),
        (extra_of({"a": {"__scalar__": ["f8,O", "41" * 16]}}), "its extra cannot be read"),
        (extra_of({"a": {"__device__": "no device"}}), "its extra cannot be read"),
        (extra_of([1]), "its extra is a list"),
        (tensors_with(dtype="float64"), "counts of the model is int64"),
        (tensors_with(shape=(1, 3)), "counts of the model is int64"),
        (tensors_with(name="other"), "and nothing in the run"),
        (tensors_with(kind="frozen"), "and nothing in the run"),
    ],
)
def test_nothing_is_changed_by_values_that_we_do_not_write(
    edit: Callable[[Generation], Generation], said: str, tmp_path: Path
) -> None:
    assert said in resumed(tmp_path, edit)[1]


def test_a_run_without_a_module_says_what_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    run.optimizer._runtime.commits.module = None
    run.train(1)
    run.optimizer.commit()
    run.optimizer.close()
    again = Run(tmp_path)
    assert again.optimizer.resume() == 1
    again.optimizer.close()
    assert "was committed without module=: frozen of the model" in caplog.text
    assert torch.equal(again.model.counts, torch.zeros(3, dtype=torch.int64))  # type: ignore[arg-type]
