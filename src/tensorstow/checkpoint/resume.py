"""Loads a commit: reads the weights, and leaves the states where they are on disk."""

import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from tensorstow.base.errors import DamageError, OptionError, StowError
from tensorstow.base.sizes import format_count
from tensorstow.base.update_on import UpdateOn, keyword_of
from tensorstow.checkpoint.commits import storage_of
from tensorstow.checkpoint.content import (
    has_bytes,
    names_of,
    own_names,
    refuse_other_groups,
    unmanaged_tensors,
)
from tensorstow.checkpoint.frozen_weights import (
    is_in_files,
    is_same_bytes,
    read_checksums,
    validate_checksums,
)
from tensorstow.checkpoint.serialize import inflate
from tensorstow.checkpoint.stored_layout import (
    StoredHyper,
    StoredLayout,
    StoredParameter,
    altered,
    naming,
    read_hyper,
    read_layout,
)
from tensorstow.io import device_link
from tensorstow.io.arena import read_ahead
from tensorstow.io.files import IoFuture
from tensorstow.states.chunks import Chunk
from tensorstow.states.layout import Family, OptionalStates, parts_of
from tensorstow.states.state_store import StateStore
from tensorstow.states.stored import StoreStorage
from tensorstow.states.stored_chunks import StoredChunk
from tensorstow.step.managed_param import ManagedParam
from tensorstow.step.param_table import ParamTable
from tensorstow.step.step_plan import Groups, States, as_step
from tensorstow.step.validation import check_group, refuse_beside
from tensorstow.store.checksums import differing_runs, weight_checksums
from tensorstow.store.records import ChunkShape, Generation, TensorRecord, chunk_shapes
from tensorstow.tensors.dtensor import Pager, in_memory, order_of, shard_of

logger = logging.getLogger("tensorstow")
_AHEAD = 4
"""Chunks whose weights are read while those of one are copied."""
_UNREADABLE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors that values may cause which ``flatten`` has not written."""


def resume(
    generation: Generation,
    params: ParamTable,
    groups: Groups,
    states: MutableMapping[torch.Tensor, dict[str, Any]],
    module: torch.nn.Module | None,
) -> dict[str, Any]:
    """Restore the optimizer and the model to ``generation``; return its ``extra``.

    Reads the weights; states are read when the first step needs them. Raises OptionError or
    BudgetError if the run has other parameters or does not fit, before anything is changed; later
    failures poison the optimizer until it is resumed again.
    """
    checked = check(generation, params, groups, module)
    layout, hyper, order, values, extra, buffers, families, update_on = checked
    storage = storage_of(params)
    records = sorted(generation.chunks, key=lambda record: record.chunk)

    def adopt() -> list[StoredChunk]:
        return [
            StoredChunk(storage.adopt(r.extent), r.blank, r.checksums, r.weight_checksums)
            for r in records
        ]

    try:
        # Only parameters with a stored step count get an entry again.
        for param in params.all():
            states.pop(param.owner, None)
        # `adopt` is a function: the optimizer's own extents are released first.
        params.restore(order, families, layout.chunks, adopt, update_on)
        _load_weights(generation, params, storage)
        # Weights of an accelerator were read into their copies in host memory.
        params.update_router.upload()
        _load_module(buffers, storage)
        for group, value in zip(groups, values, strict=True):
            group.update(value)
        for number, count in hyper.steps.items():
            param = params.all()[number]
            states[param.owner] = {"step": as_step(count), **param.views}
        for param in params.all():
            _begin(param, params.store, reseed=param.number in hyper.reseed, states=states)
    except BaseException as error:
        params.store.pipeline.handle.poison(error)
        raise
    return extra


class Checked(NamedTuple):
    """What a generation restores, all of which fits this optimizer."""

    layout: StoredLayout
    hyper: StoredHyper
    order: list[torch.Tensor]
    """This optimizer's parameters, in the order of the generation's."""
    values: list[dict[str, Any]]
    """The values of each group."""
    extra: dict[str, Any]
    buffers: list[tuple[torch.Tensor, TensorRecord]]
    families: list[Family]
    update_on: UpdateOn | None


def check(
    generation: Generation, params: ParamTable, groups: Groups, module: torch.nn.Module | None
) -> Checked:
    """Return what ``generation`` restores; raise if it cannot be resumed. Nothing is changed."""
    layout = read_layout(generation)
    hyper = read_hyper(generation, len(layout.parameters))
    order = match(layout.parameters, hyper, groups, module, _print)
    storage = storage_of(params)
    values = _group_values(hyper, generation, groups, storage)
    extra = _extra(generation, storage)
    refuse_other_rule("The run that is stored here", values, groups)
    _refuse_unknown(params, order, names_of(groups, module))
    buffers = _module_records(generation, order, module)
    families = [family_of(parameter, params) for parameter in layout.parameters]
    params.store.check_budget(layout.chunks)
    update_on = _updated_on(hyper.update_on, params, order)
    return Checked(layout, hyper, order, values, extra, buffers, families, update_on)


def _updated_on(
    saved: UpdateOn, params: ParamTable, order: Sequence[torch.Tensor]
) -> UpdateOn | None:
    """Return the run's ``update_on`` if this optimizer has none of its own, else None.

    Raises OptionError if this optimizer cannot update there.
    """
    if params.offload_policy.update_on is not None or saved == "host":
        return None
    why = f"The run that is stored here was written with {keyword_of(saved)}"
    if not all(device_link.is_remote(shard_of(p)) for p in order):
        message = (
            f"{why}, and here are parameters in host memory. Move the model to the accelerator"
            ' first, or set update_on="host", which goes on with the same bits.'
        )
        raise OptionError(message)
    refuse_beside(params.offload_policy.timing, why)
    return saved


def _group_values(
    hyper: StoredHyper, generation: Generation, groups: Groups, storage: StoreStorage
) -> list[dict[str, Any]]:
    """Return the stored values of each group; raise DamageError if one is impossible."""
    refuse_other_groups("The run that is stored here", len(hyper.groups), len(groups))
    values = _put_back(hyper.groups, "hyper", generation, storage)
    for number, group in enumerate(values):
        try:
            check_group(group)
        except (OptionError, *_UNREADABLE) as error:
            raise altered(generation, f"group {number}: {error}") from error
    return list(values)


def refuse_other_rule(source: str, saved: Sequence[Mapping[str, Any]], groups: Groups) -> None:
    """Raise OptionError if a group's update rule is not that of ``saved``, from ``source``."""
    for number, (saved_group, group) in enumerate(zip(saved, groups, strict=True)):
        wrote, asks = _rule(saved_group), _rule(group)
        if _states_of(saved_group) != _states_of(group):
            message = (
                f"{source} was written by {wrote}, and this optimizer is {asks} (parameter group"
                f" {number}): its steps would be others. Construct"
                f" tensorstow.{wrote.replace(')', ', ...)')}; for another rule, save state_dict()"
                " there and load it into a new run."
            )
            raise OptionError(message)


def _rule(group: Mapping[str, Any]) -> str:
    """Return the class whose rule a group has, as it is constructed.

    Adam with decoupled_weight_decay=True is AdamW.
    """
    name = "AdamW" if group.get("decoupled_weight_decay") else "Adam"
    average = "" if group.get("ema") is None else f", ema={group['ema']}"
    return f"{name}(amsgrad={bool(group.get('amsgrad'))}{average})"


def _states_of(group: Mapping[str, Any]) -> tuple[bool, OptionalStates]:
    """Return the part of a group's rule that decides which states exist, and how they move."""
    return bool(group.get("decoupled_weight_decay")), OptionalStates.of(group)


Facts = tuple[tuple[int, ...], str]
"""Shape and dtype of a tensor."""


def match(
    stored: Sequence[StoredParameter],
    hyper: StoredHyper,
    groups: Groups,
    module: torch.nn.Module | None,
    facts_of: Callable[[torch.Tensor], Facts],
) -> list[torch.Tensor]:
    """Return this optimizer's parameters in the order of the saved ones.

    Parameters are matched by name if all have one, else by their places in the groups. Frozen
    ones, without states, are matched too: the run may have unfrozen them later. ``facts_of``: what
    of a parameter is like the saved one. Raises OptionError if they are others.
    """
    refuse_other_groups("The run that is stored here", len(hyper.groups), len(groups))
    names = own_names(groups, module)
    by_name = {
        name: (g, parameter)
        for g, called in enumerate(names or ())
        for name, parameter in zip(called, groups[g]["params"], strict=True)
    }
    named = names is not None and all(parameter.name for parameter in stored)
    parameters: list[torch.Tensor] = []
    taken: set[int] = set()
    for number, wanted in enumerate(stored):
        at = hyper.places.get(number)
        if named:
            group, parameter = by_name.get(str(wanted.name), (None, None))
            if parameter is not None and at is not None and group != at[0]:
                message = (
                    f"{wanted.name} is in parameter group {group} here, and in group {at[0]} of"
                    " the run that is stored here: it would get another one's hyper-parameters."
                    " Make the same groups in the same order."
                )
                raise OptionError(message)
        else:
            parameter = _at(groups, at)
        is_taken = id(parameter) in taken
        if parameter is None or is_taken or facts_of(parameter) != (wanted.shape, wanted.dtype):
            actual = "nothing" if parameter is None else "{1} {0}".format(*facts_of(parameter))
            raise OptionError(_difference(number, wanted, actual, len(stored), groups))
        _check_order(number, wanted, parameter)
        parameters.append(parameter)
        taken.add(id(parameter))
    return parameters


def _check_order(number: int, stored: StoredParameter, parameter: torch.Tensor) -> None:
    """Raise OptionError for a parameter whose memory is in another order than the stored one's."""
    order = order_of(shard_of(parameter))
    if stored.order != order:
        message = (
            f"{stored.name or f'Parameter {number}'} was committed with its dimensions"
            f" {list(stored.order) if stored.order else 'in their own order'} in memory and has"
            f" them {order or 'in their own order'} here. Give the model the memory format it had"
            " (model.to(memory_format=torch.channels_last), or contiguous_format), then make the"
            " optimizer."
        )
        raise OptionError(message)


def _at(groups: Groups, place: tuple[int, int] | None) -> torch.Tensor | None:
    if place is None or place[1] >= len(groups[place[0]]["params"]):
        return None
    parameter: torch.Tensor = groups[place[0]]["params"][place[1]]
    return parameter


def _difference(
    number: int,
    stored: StoredParameter,
    actual: str,
    saved: int,
    groups: Groups,
) -> str:
    wanted = f"{stored.name or f'number {number}'} ({stored.dtype} {stored.shape})"
    count = sum(len(group["params"]) for group in groups)
    return (
        f"The run that is stored here trains {format_count(saved, 'parameter')}, this"
        f" optimizer has {count:,}, and"
        f" they are not the same: {wanted} of the run is {actual} here. Give it the same model"
        " in the same order, or another directory."
    )


def _refuse_unknown(
    params: ParamTable, order: Sequence[torch.Tensor], names: Mapping[int, str]
) -> None:
    run_ids = {id(p) for p in order}
    strange = [m for m in params.all() if id(m.owner) not in run_ids]
    if strange:
        listed = [names.get(id(m.owner), f"number {m.number}") for m in strange[:5]]
        message = (
            f"This optimizer trains {format_count(len(strange), 'parameter')} that the run which is"
            f" stored here does not ({', '.join(listed)}). Give it the same model, or another"
            " directory; to train a frozen parameter from now on, unfreeze it after resume()."
        )
        raise OptionError(message)


def whole_facts(parameter: torch.Tensor) -> Facts:
    """Return the shape that ``parameter`` has on all ranks together, and its dtype."""
    shape, dtype = _print(parameter)
    return (shape if is_lazy(parameter) else tuple(parameter.shape)), dtype


def _print(parameter: torch.Tensor) -> Facts:
    if is_lazy(parameter):
        # No stored parameter is of this dtype, so `match` reports it as the difference.
        return (), "uninitialized: run a forward of the model first"
    parameter = shard_of(parameter)
    return tuple(parameter.shape), str(parameter.dtype).removeprefix("torch.")


def family_of(stored: StoredParameter, params: ParamTable) -> Family:
    """Return the family of a saved parameter; raise OptionError if other states were requested."""
    saved = stored.family
    wanted = params.offload_policy.family(saved.dtype, saved.optional)
    if params.offload_policy.format is not None and wanted != saved:
        message = (
            f"state_format={params.offload_policy.format.value!r} was requested, and the run that"
            f" is stored here keeps its {stored.dtype} parameters' states as"
            f" {saved.format.value!r}. Leave state_format out; to change it, save state_dict() and"
            " load it into a new run."
        )
        raise OptionError(message)
    return saved


@contextmanager
def pinned_one_at_a_time() -> Iterator[Callable[[ManagedParam], None]]:
    """Return a function that pins one parameter's weight at a time, to be written."""
    last: Pager | None = None
    with ExitStack() as held:

        def hold(param: ManagedParam) -> None:
            nonlocal last
            # One pin serves all runs of a pager that follow each other.
            if param.pager is not last:
                held.close()
                last = param.pager
                held.enter_context(param.held(for_write=True))

        yield hold


def _load_weights(generation: Generation, params: ParamTable, storage: StoreStorage) -> None:
    with pinned_one_at_a_time() as hold:
        for chunk, weights in _read_weights(generation, params.store, storage):
            for run in chunk.plan.runs:
                param = params.all()[run.parameter]
                # A weight on disk is in memory only while it is pinned.
                hold(param)
                target = param.weight.detach().reshape(-1)
                piece = weights[run.position : run.position + run.count]
                target[run.start : run.start + run.count] = piece


def _read_weights(
    generation: Generation, store: StateStore, storage: StoreStorage
) -> Iterator[tuple[Chunk, torch.Tensor]]:
    """Yield each chunk and the weights that a commit has of it, checked.

    The weights are valid until the next ones are asked for; those are being read.
    """
    shapes = chunk_shapes(generation.layout)
    records = {record.chunk: record for record in generation.chunks}
    parts = [parts_of(chunk.family, chunk.plan.elements)[-1] for chunk in store.chunks]

    def place(index: int) -> tuple[int, int]:
        number, offset = store.pipeline.stored.place(store.chunks[index])
        return number, offset + parts[index].file_at

    def start(index: int, memory: torch.Tensor) -> IoFuture:
        number, offset = place(index)
        return storage.file(number).read(memory, offset)

    reads = read_ahead([part.nbytes for part in parts], start, _AHEAD)
    for index, (chunk, (read, memory)) in enumerate(zip(store.chunks, reads, strict=True)):
        read.wait()
        expected = records[chunk.number].weight_checksums
        checksums = weight_checksums(shapes[chunk.number], memory.data_ptr())
        if checksums != expected:
            blocks = next(differing_runs(checksums, expected))
            names = _names_in(chunk, shapes[chunk.number], blocks, generation.layout)
            number, offset = place(index)
            raise _damaged(shapes[chunk.number], blocks, names, storage.path(number), offset)
        yield chunk, memory.view(chunk.family.dtype)


def _names_in(
    chunk: Chunk, shape: ChunkShape, blocks: tuple[int, int], layout: Mapping[str, Any]
) -> str:
    """Return the names of the parameters that have elements in ``blocks`` of the chunk."""
    first, stop = (shape.block * block for block in blocks)
    numbers = [
        run.parameter
        for run in chunk.plan.runs
        if run.position < stop and first < run.position + run.count
    ]
    listed = [layout["parameters"][n]["name"] or f"parameter {n}" for n in numbers[:5]]
    more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    return f"{', '.join(listed)}{more} (chunk {chunk.number}, block {blocks[0]})"


def _damaged(
    shape: ChunkShape, blocks: tuple[int, int], names: str, path: Path, offset: int
) -> DamageError:
    """Return the error for weights of ``shape`` at ``offset``, of which ``blocks`` differ."""
    first, stop = (shape.weight.span(min(shape.block * b, shape.elements)) for b in blocks)
    message = (
        f"read of {stop - first} bytes at offset {offset + first} of {path}, the weights of"
        f" {names}, gave other bytes than were written there: their checksum does not fit."
        " `tensorstow run scrub` says what else is damaged; go on from a snapshot, or from a"
        " checkpoint elsewhere."
    )
    return DamageError(message)


def _module_records(
    generation: Generation, order: Sequence[torch.Tensor], module: torch.nn.Module | None
) -> list[tuple[torch.Tensor, TensorRecord]]:
    """Return the tensors of ``module`` that no optimizer updates, and what is stored of each.

    Raises OptionError if one has another dtype or shape, or has bytes that the run lacks.
    """
    records = {r.name: r for r in generation.tensors if r.kind == "module"}
    wanted = list(unmanaged_tensors(module, order))
    with naming(generation):
        checksums = read_checksums(generation.hyper)
    validate_checksums(wanted, checksums)
    wanted = [(name, tensor) for name, tensor in wanted if name not in checksums]
    if not records and not checksums:
        missing = [name for name, tensor in wanted if has_bytes(tensor)]
        if missing:
            logger.warning(
                "The run in this directory was committed without module=: %s of the model, which no"
                " optimizer updates, stays as it is%s",
                missing[0],
                f", and {len(missing) - 1} more" if len(missing) > 1 else "",
            )
        return []
    pairs = []
    for name, tensor in wanted:
        record, facts = records.get(name), _print(tensor)
        if record is None and not has_bytes(tensor):
            continue
        if record is None or (record.shape, record.dtype) != facts:
            stored = "nothing" if record is None else f"{record.dtype} {record.shape}"
            message = (
                f"{name} of the model is {facts[1]} {facts[0]}, and {stored} in the run that is"
                " stored here. Give the optimizer the model that the run had."
            )
            raise OptionError(message)
        pairs.append((tensor, record))
    return pairs


@torch.no_grad()
def _load_module(
    records: Sequence[tuple[torch.Tensor, TensorRecord]], storage: StoreStorage
) -> None:
    for tensor, record in records:
        values = storage.store.read_tensor(record)
        if is_in_files(tensor):  # an unchanged one stays in its file
            with in_memory(tensor):
                if is_same_bytes(shard_of(tensor), values):
                    continue
        with in_memory(tensor, for_write=True):
            shard_of(tensor).copy_(values)


def _extra(generation: Generation, storage: StoreStorage) -> dict[str, Any]:
    extra = _put_back(generation.extra, "extra", generation, storage)
    if isinstance(extra, dict):
        return extra
    raise altered(generation, f"its extra is a {type(extra).__name__}")


def _put_back(plain: object, kind: str, generation: Generation, storage: StoreStorage) -> Any:  # noqa: ANN401
    """Rebuild what ``flatten`` took apart; raise DamageError if it cannot have written this."""
    records = {r.name: r for r in generation.tensors if r.kind == kind}

    def tensor_at(index: object) -> torch.Tensor:
        return storage.store.read_tensor(records[str(index)])

    try:
        return inflate(plain, tensor_at)
    except StowError:
        raise
    except _UNREADABLE as error:
        raise altered(generation, f"its {kind} cannot be read ({error!r})") from error


def _begin(param: ManagedParam, store: StateStore, *, reseed: bool, states: States) -> None:
    param.begun = "step" in states.get(param.owner, {})
    if reseed:
        store.pipeline.handle.live().forget_weight(param.number)
        # Without a stamp the next step takes the weight for one that others have written.
        param.written = None
        return
    if param.family.dtype != torch.float32:
        with param.held():
            store.pipeline.handle.live().record_weight(param.number, param.weight.data_ptr())
    param.remember()
