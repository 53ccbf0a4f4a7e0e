"""Loads a commit: reads the weights, and leaves the states where they are on disk."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

import tensorstow._native as _native
from tensorstow.base.errors import DamageError, OptionError, StoreFormatError
from tensorstow.base.sizes import format_count
from tensorstow.base.update_on import UpdateOn, is_update_on, keyword_of
from tensorstow.checkpoint.commits import storage_of
from tensorstow.checkpoint.content import module_tensors, names_of, own_names, refuse_other_groups
from tensorstow.checkpoint.serialize import inflate
from tensorstow.formats.state_format import StateFormat
from tensorstow.io import device_link
from tensorstow.states.chunks import Chunk
from tensorstow.states.layout import ChunkPlan, Family, Segment, parts_of
from tensorstow.states.state_store import StateStore
from tensorstow.states.stored import StoreStorage
from tensorstow.states.stored_chunks import StoredChunk
from tensorstow.step.managed_param import ManagedParam
from tensorstow.step.param_table import ParamTable
from tensorstow.step.step_plan import Groups, States, as_step
from tensorstow.step.validation import refuse_beside
from tensorstow.store.checksums import differing_runs, weight_checksums
from tensorstow.store.records import ChunkShape, Generation, TensorRecord, chunk_shapes
from tensorstow.tensors.dtensor import Pager, in_memory, order_of, shard_of


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
    entries = generation.layout["parameters"]
    _refuse_other_blocks(generation)
    order = _match(entries, generation.hyper, groups, module)
    _refuse_other_rule(generation.hyper, groups)
    _refuse_unknown(params, order, names_of(groups, module))
    families = [_family(entry, params) for entry in entries]
    storage = storage_of(params)
    plans = list(_plans(generation.layout["chunks"], families))
    records = sorted(generation.chunks, key=lambda record: record.chunk)

    def adopt() -> list[StoredChunk]:
        return [
            StoredChunk(storage.adopt(r.extent), r.blank, r.checksums, r.weight_checksums)
            for r in records
        ]

    params.store.check_budget(plans)
    there = _updated_on(generation.hyper, params, order)
    try:
        for param in params.all():
            states.pop(param.owner, None)
        params.restore(order, families, plans, adopt, there)
        _load_weights(generation, params, storage)
        params.update_router.upload()
        _load_module(generation, params, module, storage)
        hyper = _put_back(generation.hyper, "hyper", generation, storage)
        for group, values in zip(groups, hyper["groups"], strict=True):
            group.update(values)
        for number, count in hyper["steps"].items():
            param = params.all()[int(number)]
            states[param.owner] = {"step": as_step(count), **param.views}
        for param in params.all():
            _begin(param, params.store, reseed=param.number in hyper["reseed"], states=states)
        return _put_back(generation.extra, "extra", generation, storage)
    except BaseException as error:
        params.store.pipeline.poison(error)
        raise


def _updated_on(
    hyper: Mapping[str, Any], params: ParamTable, order: Sequence[torch.Tensor]
) -> UpdateOn | None:
    """Return the run's ``update_on`` if this optimizer has none of its own, else None.

    Raises OptionError if this optimizer cannot update there.
    """
    where = hyper.get("update_on", "host")
    if params.offload_policy.update_on is not None or where == "host":
        return None
    if not is_update_on(where):
        message = (
            f"The run that is stored here says update_on={where!r}, which this version does not"
            ' know. Say where to update, update_on="host" for one: the bits are the same.'
        )
        raise OptionError(message)
    why = f"The run that is stored here was written with {keyword_of(where)}"
    refuse_beside(params.offload_policy.overlap, why)
    if not all(device_link.is_remote(shard_of(p)) for p in order):
        message = (
            f"{why}, and here are parameters in host memory. Move the model to the accelerator"
            ' first, or say update_on="host", which goes on with the same bits.'
        )
        raise OptionError(message)
    return where


def _refuse_other_blocks(generation: Generation) -> None:
    """Raise StoreFormatError if checksums are of blocks of another size than here."""
    found = {shape.block for shape in chunk_shapes(generation.layout)} - {_native.UPDATE_BLOCK}
    if found:
        message = (
            f"The run that is stored here has checksums over {min(found)} elements each, and this"
            f" version takes {_native.UPDATE_BLOCK}. Resume it with the version that wrote it, save"
            " state_dict() there, and load that into a new run."
        )
        raise StoreFormatError(message)


def _refuse_other_rule(hyper: Mapping[str, Any], groups: Groups) -> None:
    """Raise OptionError where a group is updated by another rule here than in the stored run."""
    saved = inflate(hyper["groups"], lambda _: torch.empty(0))
    for number, (there, here) in enumerate(zip(saved, groups, strict=True)):
        wrote, asks = _rule(there), _rule(here)
        if wrote != asks:
            message = (
                f"The run that is stored here was written by {wrote}, and this optimizer is"
                f" {asks} (parameter group {number}): its steps would be others. Construct"
                f" tensorstow.{wrote.replace(')', ', ...)')}; for another rule, save state_dict()"
                " there and load it into a new run."
            )
            raise OptionError(message)


def _rule(group: Mapping[str, Any]) -> str:
    """Return the class whose rule a group has, as it is constructed.

    Adam with decoupled_weight_decay=True is AdamW.
    """
    name = "AdamW" if group.get("decoupled_weight_decay") else "Adam"
    return f"{name}(amsgrad={bool(group.get('amsgrad'))})"


def _match(
    entries: Sequence[Mapping[str, Any]],
    hyper: Mapping[str, Any],
    groups: Groups,
    module: torch.nn.Module | None,
) -> list[torch.Tensor]:
    """Return the parameters that the saved ones are, in their order.

    By name where all have one, else by their places in the groups. Those that have no states yet,
    being frozen, are found too: the run may have unfrozen them on its way.
    """
    places = {
        number: (g, i)
        for g, numbers in enumerate(hyper["members"])
        for i, number in enumerate(numbers)
        if number is not None
    }
    refuse_other_groups("The run that is stored here", len(hyper["groups"]), len(groups))
    names = own_names(groups, module)
    by_name = {
        name: (g, parameter)
        for g, called in enumerate(names or ())
        for name, parameter in zip(called, groups[g]["params"], strict=True)
    }
    named = names is not None and all(e["name"] for e in entries)
    found = []
    for number, entry in enumerate(entries):
        at = places.get(number)
        if named:
            group, parameter = by_name.get(entry["name"], (None, None))
            if parameter is not None and at is not None and group != at[0]:
                message = (
                    f"{entry['name']} is in parameter group {group} here, and in group {at[0]} of"
                    " the run that is stored here: it would get another one's hyper-parameters."
                    " Make the same groups in the same order."
                )
                raise OptionError(message)
        else:
            parameter = _at(groups, at)
        if parameter is None or _print(parameter) != (tuple(entry["shape"]), entry["dtype"]):
            raise OptionError(_difference(number, entry, parameter, len(entries), groups))
        _check_order(number, entry, parameter)
        found.append(parameter)
    return found


def _check_order(number: int, entry: Mapping[str, Any], parameter: torch.Tensor) -> None:
    """Raise OptionError for a parameter whose memory is in another order than the stored one's."""
    order, here = entry.get("order"), order_of(shard_of(parameter))
    if order != (None if here is None else list(here)):
        message = (
            f"{entry['name'] or f'Parameter {number}'} was committed with its dimensions"
            f" {order or 'in their own order'} in memory and has them"
            f" {here or 'in their own order'} here. Give the model the memory format it had"
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
    entry: Mapping[str, Any],
    parameter: torch.Tensor | None,
    saved: int,
    groups: Groups,
) -> str:
    there = f"{entry['name'] or f'number {number}'} ({entry['dtype']} {tuple(entry['shape'])})"
    here = "nothing" if parameter is None else "{1} {0}".format(*_print(parameter))
    count = sum(len(group["params"]) for group in groups)
    return (
        f"The run that is stored here trains {format_count(saved, 'parameter')}, this"
        f" optimizer has {count:,}, and"
        f" they are not the same: {there} of the run is {here} here. Give it the same model"
        " in the same order, or another directory."
    )


def _refuse_unknown(
    params: ParamTable, order: Sequence[torch.Tensor], names: Mapping[int, str]
) -> None:
    known = {id(p) for p in order}
    strange = [m for m in params.all() if id(m.owner) not in known]
    if strange:
        listed = [names.get(id(m.owner), f"number {m.number}") for m in strange[:5]]
        message = (
            f"This optimizer trains {format_count(len(strange), 'parameter')} that the run which is"
            f" stored here does not ({', '.join(listed)}). Give it the same model, or another"
            " directory; one that is to be trained from now on is to be unfrozen behind resume()."
        )
        raise OptionError(message)


def _print(parameter: torch.Tensor) -> tuple[tuple[int, ...], str]:
    if is_lazy(parameter):
        return (), "uninitialized: run a forward of the model first"
    parameter = shard_of(parameter)
    return tuple(parameter.shape), str(parameter.dtype).removeprefix("torch.")


def _family(entry: Mapping[str, Any], params: ParamTable) -> Family:
    dtype = getattr(torch, entry["dtype"])
    saved = Family(dtype, bool(entry["amsgrad"]), StateFormat(entry["format"]))
    wanted = params.offload_policy.family(dtype, amsgrad=saved.amsgrad)
    if params.offload_policy.format is not None and wanted != saved:
        message = (
            f"state_format={params.offload_policy.format.value!r} was requested, and the run that"
            f" is stored here keeps its {entry['dtype']} parameters' states as"
            f" {saved.format.value!r}. Leave state_format out; to change it, save state_dict() and"
            " load it into a new run."
        )
        raise OptionError(message)
    return saved


def _plans(entries: Sequence[Mapping[str, Any]], families: Sequence[Family]) -> Iterator[Chunk]:
    for entry in entries:
        runs = tuple(Segment(p, start, count, at) for p, start, count, at in entry["runs"])
        yield Chunk(ChunkPlan(runs, entry["elements"]), families[runs[0].parameter])


@contextmanager
def _one_at_a_time() -> Iterator[Callable[[ManagedParam], None]]:
    """Return a function that pins one parameter's weight at a time, to be written."""
    last: Pager | None = None
    with ExitStack() as held:

        def hold(param: ManagedParam) -> None:
            nonlocal last
            if param.pager is not last:
                held.close()
                last = param.pager
                held.enter_context(param.held(for_write=True))

        yield hold


def _load_weights(generation: Generation, params: ParamTable, storage: StoreStorage) -> None:
    with _one_at_a_time() as hold:
        for chunk, weights in _read_weights(generation, params.store, storage):
            for run in chunk.plan.runs:
                param = params.all()[run.parameter]
                hold(param)
                target = param.weight.detach().reshape(-1)
                piece = weights[run.position : run.position + run.count]
                target[run.start : run.start + run.count] = piece


def _read_weights(
    generation: Generation, store: StateStore, storage: StoreStorage
) -> Iterator[tuple[Chunk, torch.Tensor]]:
    """Yield each chunk and the weights that a commit has of it, checked."""
    shapes = chunk_shapes(generation.layout)
    records = {record.chunk: record for record in generation.chunks}
    for chunk in store.chunks:
        record = records[chunk.number]
        part = parts_of(chunk.family, chunk.plan.elements)[-1]
        read = torch.empty(part.nbytes, dtype=torch.uint8, device="cpu")
        number, offset = store.pipeline.stored.place(chunk)
        storage.file(number).read(read, offset + part.file_at).wait()
        found = weight_checksums(shapes[chunk.number], read.data_ptr())
        if found != record.weight_checksums:
            blocks = next(differing_runs(found, record.weight_checksums))
            names = _names_in(chunk, shapes[chunk.number], blocks, generation.layout)
            at = offset + part.file_at
            raise _damaged(shapes[chunk.number], blocks, names, storage.path(number), at)
        yield chunk, read.view(chunk.family.dtype)


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
        " `tensorstow scrub` says what else is damaged; go on from a snapshot, or from a"
        " checkpoint elsewhere."
    )
    return DamageError(message)


@torch.no_grad()
def _load_module(
    generation: Generation,
    params: ParamTable,
    module: torch.nn.Module | None,
    storage: StoreStorage,
) -> None:
    records = {r.name: r for r in generation.tensors if r.kind == "module"}
    if module is None:
        return
    managed = {id(m.owner) for m in params.all()}
    for name, tensor in module_tensors(module):
        if id(tensor) not in managed and name in records:
            shard = shard_of(tensor)
            with in_memory(tensor, for_write=True):
                shard.copy_(storage.store.read_tensor(records[name]).view(shard.shape))


def _put_back(
    plain: object, kind: str, generation: Generation, storage: StoreStorage
) -> dict[str, Any]:
    records: dict[int, TensorRecord] = {
        int(r.name): r for r in generation.tensors if r.kind == kind
    }
    value: dict[str, Any] = inflate(plain, lambda i: storage.store.read_tensor(records[i]))
    return value


def _begin(param: ManagedParam, store: StateStore, *, reseed: bool, states: States) -> None:
    param.begun = "step" in states.get(param.owner, {})
    if reseed:
        store.pipeline.written_weights.forget(param.number)
        param.written = None
        return
    if param.family.dtype != torch.float32:
        with param.held():
            store.pipeline.written_weights.record(param.number, param.weight.detach())
    param.remember()
