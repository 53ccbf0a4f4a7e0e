"""What a commit contains, as records: names, layout, hyper-parameters and chunks."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import tensorstow._native as _native
from tensorstow.base.errors import OptionError
from tensorstow.states.chunks import Chunk
from tensorstow.states.layout import parts_of
from tensorstow.states.state_store import StateStore
from tensorstow.states.stored import StoreStorage
from tensorstow.step.param_table import ParamTable
from tensorstow.step.step_plan import Groups, States, must_seed
from tensorstow.store.records import ChunkRecord, ChunkShape, StreamShape
from tensorstow.tensors.dtensor import layout_of as layout_of_shards
from tensorstow.tensors.dtensor import rows_of, shard_of

ROWS = "rows"
"""Key of a generation's ``hyper``: ``rows_of_others``."""


def names_of(groups: Groups, module: torch.nn.Module | None) -> dict[int, str]:
    """Return names of parameters by their id: the module's, else those that a group gives."""
    by_id: dict[int, str] = {}
    for group in groups:
        names = group.get("param_names") or ()
        by_id |= {id(p): n for p, n in zip(group["params"], names, strict=False)}
    if module is not None:
        by_id |= {id(p): name for name, p in module.named_parameters()}
    return by_id


def own_names(groups: Groups, module: torch.nn.Module | None) -> list[list[str]] | None:
    """Return names group by group; None unless each parameter has a name of its own."""
    by_id = names_of(groups, module)
    parameters = [p for group in groups for p in group["params"]]
    if len({by_id[id(p)] for p in parameters if id(p) in by_id}) < len(parameters):
        return None
    return [[by_id[id(p)] for p in group["params"]] for group in groups]


def refuse_other_groups(source: str, saved: int, count: int) -> None:
    """Raise OptionError if ``count``, this optimizer's number of groups, is not ``saved``."""
    if saved != count:
        message = (
            f"{source} has {saved} parameter groups and this optimizer {count}. Make the same"
            " groups in the same order."
        )
        raise OptionError(message)


def module_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers by their names in ``state_dict``.

    ``state_dict`` itself is not called: it waits for updates that overlap with the next step.
    """
    yield from module.named_parameters()
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in part._non_persistent_buffers_set:  # noqa: SLF001
                yield name, buffer


def unmanaged_tensors(
    module: torch.nn.Module | None, managed_tensors: Iterable[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers, and the parameters that are none of ``managed_tensors``, by name."""
    if module is None:
        return
    managed = {id(tensor) for tensor in managed_tensors}
    for name, tensor in module_tensors(module):
        if id(tensor) not in managed and not is_lazy(tensor):  # which has no values yet
            yield name, tensor


def rows_of_others(module: torch.nn.Module | None, params: ParamTable) -> dict[str, Any]:
    """Return the rows that this rank has of sharded tensors that no optimizer updates, by name."""
    tensors = unmanaged_tensors(module, (m.owner for m in params.all()))
    entries = {name: rows_entry(tensor) for name, tensor in tensors}
    return {name: entry["rows"] for name, entry in entries.items() if entry}


def has_bytes(tensor: torch.Tensor) -> bool:
    """Return whether a frozen parameter or buffer is a plain tensor whose bytes can be stored.

    A tensor made of others (quantised weights are) is put together by code that no commit keeps.
    """
    shard = shard_of(tensor)
    if shard.layout != torch.strided or shard.is_meta or shard.is_quantized:
        return False
    # torch refuses to copy into a tensor whose elements share an address.
    expanded = 0 in shard.stride() and shard.numel() > 1
    return not expanded and not is_traceable_wrapper_subclass(shard)


def layout_of(params: ParamTable, names: Mapping[int, str]) -> dict[str, Any]:
    """Return how the states lie in chunks, as JSON."""
    return {
        "parameters": [
            {
                "name": names.get(id(m.owner)),
                "shape": list(m.shard.shape),
                **({} if m.order is None else {"order": list(m.order)}),
                **rows_entry(m.owner),
                "dtype": str(m.family.dtype).removeprefix("torch."),
                "amsgrad": m.family.amsgrad,
                "format": str(m.family.format),
                **({"ema": True} if m.family.ema else {}),
            }
            for m in params.all()
        ],
        "chunks": [chunk_entry(chunk) for chunk in params.store.chunks],
    }


def rows_entry(tensor: torch.Tensor) -> dict[str, list[int] | None]:
    """Return which rows of a sharded tensor this rank has, as JSON; nothing for a whole one.

    None in place of rows: it is cut in another way.
    """
    if layout_of_shards(tensor) is None or not tensor.ndim:
        return {}
    rows = rows_of(tensor)
    return {"rows": None if rows is None else [rows.start, rows.whole]}


def chunk_entry(chunk: Chunk) -> dict[str, Any]:
    """Return the entry of ``chunk`` in a layout, as JSON."""
    runs = [[r.parameter, r.start, r.count, r.position] for r in chunk.plan.runs]
    return {**asdict(shape_of(chunk)), "runs": runs}


def shape_of(chunk: Chunk) -> ChunkShape:
    """Return how the bytes of ``chunk`` lie in its extent."""
    *streams, weight = (
        StreamShape(part.width, part.per) for part in parts_of(chunk.family, chunk.plan.elements)
    )
    return ChunkShape(chunk.plan.elements, _native.UPDATE_BLOCK, tuple(streams), weight)


def options_of(groups: Groups) -> list[dict[str, Any]]:
    """Return the groups without their parameters."""
    return [
        {k: v for k, v in group.items() if k not in {"params", "param_names"}} for group in groups
    ]


def hyper_of(
    params: ParamTable, groups: Groups, states: States, options: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the groups' ``options``, step counts, and flags that the next update needs."""
    members = [[params.find(p) for p in group["params"]] for group in groups]
    counts = {
        str(m.number): float(states[m.owner]["step"])
        for m in params.all()
        if "step" in states.get(m.owner, {})
    }
    return {
        "groups": options,
        "members": [[None if m is None else m.number for m in group] for group in members],
        "steps": counts,
        "reseed": [m.number for m in params.all() if must_seed(m, params.store)],
        "update_on": params.offload_policy.update_on or "host",
    }


def chunk_record(chunk: Chunk, store: StateStore, storage: StoreStorage) -> ChunkRecord:
    """Return where a chunk's states and weights are, and their checksums."""
    stored = store.pipeline.stored
    states, weights = store.pipeline.handle.live().checksums(chunk.number)
    return ChunkRecord(
        chunk=chunk.number,
        extent=storage.extent(stored.place(chunk)),
        blank=stored.state(chunk) == "blank",
        checksums=states,
        weight_checksums=weights,
    )
