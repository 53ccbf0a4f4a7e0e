"""``stow`` without an optimizer: a model that is only read, whose weights may stay in their files.

[Note: No sharding] Nothing is trained, so nothing is gathered or reduced, and FSDP2 is not used.
Units that stay in memory have plain parameters. A ``WeightStream`` reads those on disk, when
hooks of their modules ask for them. Every rank has a model of its own.
"""

import logging
import re
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import nn

from tensorstow.activations.offload import apart_from_graphs
from tensorstow.base import notices
from tensorstow.base.budget import Budget
from tensorstow.base.errors import BudgetError, OptionError, StoreFormatError
from tensorstow.base.plan import Plan
from tensorstow.base.sizes import Bytes, format_bytes, format_count
from tensorstow.base.tiers import Tier
from tensorstow.fsdp.automatic import machine_budget
from tensorstow.fsdp.experts import validate_routing
from tensorstow.fsdp.frozen_files import watch_mapped_files
from tensorstow.fsdp.initialization import InitialValues
from tensorstow.fsdp.module_hooks import refuse_copies
from tensorstow.fsdp.read_sources import ReadOptions, ReadUnit, Sources, parents_of, read_units_of
from tensorstow.fsdp.sharding import move_buffers, rank_here
from tensorstow.fsdp.units import READ_ONLY, ROOT
from tensorstow.fsdp.validation import WITH_PLAN, refuse_given, validate_units
from tensorstow.fsdp.weight_stream import Call, StreamedUnit, StreamLimits, WeightStream
from tensorstow.io.arena import TENSOR_ALIGN
from tensorstow.io.device_link import open_link
from tensorstow.nn.routed_experts import routed_experts
from tensorstow.planner.resident import UnitBytes, choose_resident, passing_bytes

logger = logging.getLogger("tensorstow")

_OF_READING = frozenset({"parameters", "parameter_units", "prefetch", "weight_ram_budget"})
"""The fields of a plan that apply to a read-only model; the others are for training."""
_Version = tuple[str, "weakref.ref[nn.Parameter]", int]
"""A parameter's name, itself, and the number of writes to it."""


def stream_of(model: nn.Module) -> WeightStream | None:
    """Return the stream that reads a read-only model's weights; None: all stay in memory."""
    stream: WeightStream | None = READ_ONLY[model]
    return stream


def streams_in(model: nn.Module) -> list[WeightStream]:
    """Return the streams of the read-only models in a module, itself included."""
    streams = (READ_ONLY.get(module) for module in model.modules())
    return [stream for stream in streams if stream is not None]


def stow_read_only(model: nn.Module, values: InitialValues, options: ReadOptions) -> Plan:
    """Place a model that is only read, in place, and return its plan.

    An error of the options, the files or the budget is raised before anything is changed.
    """
    if options.plan is not None:
        refuse_given(WITH_PLAN, budget=options.budget)
    units = read_units_of(model, options.blocks)
    _validate_values(model, units, values)
    sources = Sources(model, values, options)
    file_units = {unit.name: sources.in_files(unit) for unit in units}
    streamed = {name: unit for name, unit in file_units.items() if unit is not None}
    sizes = _sizes(units, {u.name: sources.buffer_bytes_of(u) for u in units}, streamed, options)
    readable = {name: sizes[name] for name in streamed}
    plan = options.plan or _choose_plan(units, sizes, readable, options)
    _validate_plan(plan, units, readable, values)
    limits = _limits(plan, units, sizes, options)
    # The checks are over: from here on the model changes.
    link = open_link(options.device) if options.is_away else None
    for unit in units:
        for parameter in unit.parameters.values():
            parameter.requires_grad_(False)  # noqa: FBT003  # torch's own
        tier = unit.tier_in(plan)
        if tier == Tier.DISK:
            _empty(unit, streamed[unit.name])
            if unit.parameters:  # those of adapters, which are in no file of the base
                _fill(unit, sources, options)
            continue
        streamed.pop(unit.name, None)
        if link is not None and tier == Tier.HOST:
            streamed[unit.name] = sources.in_host_memory(unit, link)
            _empty(unit, streamed[unit.name])
        else:
            _fill(unit, sources, options)
    resident = [p for unit in units if unit.name not in streamed for p in unit.parameters.values()]
    # Before buffers(), which validates the files for the last time.
    watch_mapped_files(model, resident)
    values.buffers(model)
    move_buffers(model, options.device)
    stream = None
    if streamed:
        moving = [unit for unit in units if unit.name in streamed]
        calls = [Call(module, streamed[u.name]) for u in moving for module in u.modules]
        stream = WeightStream(calls, limits, link)
        _register(stream)
        _decline_compilation(model)
    for module in model.modules():
        refuse_copies(module)
    if options.device.type != "cuda":
        refuse = partial(_refuse_cache_of_cuda, options.device)
        model.register_forward_pre_hook(refuse, with_kwargs=True)
    READ_ONLY[model] = stream
    return plan


# --- checks ---


def _validate_values(
    model: nn.Module,
    units: Sequence[ReadUnit],
    values: InitialValues,
) -> None:
    """Check that every parameter has a value, and that the files have no other tensors.

    Raises OptionError, or StoreFormatError if the files belong to another model.
    """
    files = values.files
    if files is None:
        absent = [n for unit in units for n, p in unit.parameters.items() if p.is_meta]
        if absent:
            message = (
                f"{absent[0]} is on the meta device, and a model that is only read takes its values"
                " from files: pass weights=, a safetensors file or a directory of some."
            )
            raise OptionError(message)
        return
    values.check(units)
    names = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    names |= {n for n, _ in model.named_buffers(remove_duplicate=False)}
    # transformers' models list tensors that only their older versions saved.
    base = values.adapters.base
    ignored: Sequence[str] = getattr(base, "_keys_to_ignore_on_load_unexpected", None) or ()
    unused = [n for n in files.unused(names) if not any(re.search(p, n) for p in ignored)]
    if unused:
        message = (
            f"{files.path} has {unused[0]!r}"
            + (f" and {len(unused) - 1} more tensors" if len(unused) > 1 else "")
            + f" that this {type(model).__name__} lacks: they are of another model, or of more than"
            " this one. Make the model that was saved, or files of what it has."
        )
        raise StoreFormatError(message)


def _validate_plan(
    plan: Plan, units: Sequence[ReadUnit], readable: Mapping[str, UnitBytes], values: InitialValues
) -> None:
    """Check that the units of a plan exist, and that those on disk are among the ``readable``."""
    validate_units(plan, [*(unit.name for unit in units), ROOT])
    default = Plan()
    trained = [field.name for field in fields(Plan) if field.name not in _OF_READING]
    idle = [name for name in trained if getattr(plan, name) != getattr(default, name)]
    if idle:
        message = (
            f"{idle[0]}={getattr(plan, idle[0])!r} was given in a plan of a model that is only"
            " read: it is for training. Leave it out."
        )
        raise OptionError(message)
    on_disk = [unit.name for unit in units if unit.tier_in(plan) == Tier.DISK]
    if on_disk and values.files is None:
        message = (
            f"Unit {on_disk[0]!r} is to be on disk, where a model that is only read has the files"
            " that its weights come from: pass weights=."
        )
        raise OptionError(message)
    unreadable = sorted(set(on_disk) - set(readable))
    if unreadable:
        message = (
            f"Unit {unreadable[0]!r} has parameters that transformers makes of several tensors of"
            " the files, or of changed ones: they cannot be computed with as they are read."
            f' Place the unit in memory: Plan(parameter_units={{{unreadable[0]!r}: "host"}}).'
        )
        raise OptionError(message)


# --- placement ---


def _choose_plan(
    units: Sequence[ReadUnit],
    sizes: Mapping[str, UnitBytes],
    readable: Mapping[str, UnitBytes],
    options: ReadOptions,
) -> Plan:
    """Return the plan with as many units in memory as the budget has room for.

    Args:
        units: The model's, in the order of their use.
        sizes: Their bytes on the device that computes, and in its buffers.
        readable: Those that can be read from files: their bytes in host memory, and in buffers.
        options: The budget, and what computes.
    """
    budget = options.budget or machine_budget(units, options.device, ())
    limits = {tier: _limit(budget, tier) for tier in Tier}
    ahead, below = Plan().prefetch, dict(readable)
    # The device is filled first, and then host memory, as far as there is room.
    on_device: set[str] = set()
    if options.is_away:
        on_device, ahead = choose_resident(sizes, limits[Tier.DEVICE], ahead)
        if len(on_device) == len(units):
            return Plan(parameters=Tier.DEVICE)
        below = {name: size for name, size in readable.items() if name not in on_device}
    limit = limits[Tier.HOST]
    fixed = sum(options.bytes_of(u) for u in units if u.name not in {*on_device, *readable})
    if fixed > limit:
        message = (
            f"{format_bytes(limit)} of host memory were given, and {format_bytes(fixed)} of"
            " weights must fit in it: the model has no weights=, or its parameters are made"
            " of several tensors of the files. Raise the budget."
        )
        raise BudgetError(message)
    resident, ahead = choose_resident(below, limit - fixed, ahead)
    passing = [name for name in below if name not in resident]
    tiers = dict.fromkeys(on_device, Tier.DEVICE)
    counts = [f"{len(on_device)} on the device"] if options.is_away else []
    counts += [
        f"{len(units) - len(on_device) - len(passing)} in host memory",
        f"{len(passing)} on disk",
    ]
    line = f'plan="auto": of {format_count(len(units), "unit")} {", ".join(counts)}'
    logger.info(line)
    if rank_here() == 0:
        notices.show(line)
    if not passing:
        return Plan(parameter_units=tiers, prefetch=ahead)
    stay = [unit.name for unit in units if unit.name not in {*passing, *on_device}]
    nbytes = Bytes(passing_bytes([below[name] for name in passing], ahead))
    return Plan(
        parameters=Tier.DISK,
        parameter_units=tiers | dict.fromkeys(stay, Tier.HOST),
        prefetch=ahead,
        weight_ram_budget=nbytes,
    )


def _limit(budget: Budget, tier: Tier) -> int:
    limit = budget.bytes_of(tier)
    return sys.maxsize if limit is None else limit


def _sizes(
    units: Sequence[ReadUnit],
    in_memory: Mapping[str, int],
    streamed: Mapping[str, StreamedUnit],
    options: ReadOptions,
) -> dict[str, UnitBytes]:
    """Return the bytes of each unit: in resident memory, and in buffers."""
    parents = parents_of(units)
    buffers = {u.name: streamed[u.name].nbytes if u.name in streamed else 0 for u in units}
    buffers = {name: max(nbytes, in_memory[name]) for name, nbytes in buffers.items()}
    return {
        unit.name: UnitBytes(
            options.bytes_of(unit),
            buffers[unit.name],
            sum(buffers[name] for name in parents[unit.name]),
        )
        for unit in units
    }


def _empty(unit: ReadUnit, streamed: StreamedUnit) -> None:
    """Replace the parameters that are read by placeholders without memory."""
    for tensor in streamed.tensors:
        tensor.take_back()
        del unit.parameters[tensor.name]


def _fill(unit: ReadUnit, sources: Sources, options: ReadOptions) -> None:
    """Load a unit that stays in memory, on the device and in the dtype that compute."""
    for parameter in unit.parameters.values():
        # Readers return values in the dtype that a parameter has.
        parameter.data = parameter.data.to(options.dtype_of(parameter))
    absent = [name for name, parameter in unit.parameters.items() if parameter.is_meta]
    sources.values.fill([unit])
    for name, parameter in unit.parameters.items():
        parameter.data = parameter.data.to(options.device, copy=name in absent)  # else mapped
        # Kernels choose by alignment: weights in memory are aligned like weights that are read.
        if parameter.data_ptr() % TENSOR_ALIGN:
            parameter.data = parameter.data.clone()
    versions: list[_Version] = [(n, weakref.ref(p), p._version) for n, p in unit.parameters.items()]  # noqa: SLF001
    for module in unit.modules:
        module.register_forward_pre_hook(partial(_refuse_changed, versions), prepend=True)


def _limits(
    plan: Plan, units: Sequence[ReadUnit], sizes: Mapping[str, UnitBytes], options: ReadOptions
) -> StreamLimits:
    """Return the bytes of buffers in host memory and on the device.

    Raises BudgetError if the plan's buffers have no room for the largest unit.
    """
    on_disk = [sizes[unit.name] for unit in units if unit.tier_in(plan) == Tier.DISK]
    least = passing_bytes(on_disk, 0)
    capacity = int(plan.weight_ram_budget or 0) or passing_bytes(on_disk, plan.prefetch)
    if capacity < least:
        message = (
            f"weight_ram_budget={format_bytes(capacity)} was given for weights on disk, and the"
            f" largest unit has {format_bytes(least)}: give at least that, or smaller units."
        )
        raise BudgetError(message)
    moving = [sizes[unit.name] for unit in units if unit.tier_in(plan) != Tier.DEVICE]
    device_bytes = passing_bytes(moving, plan.prefetch) if options.is_away else 0
    return StreamLimits(plan.prefetch, capacity, device_bytes)


# --- hooks ---


def _register(stream: WeightStream) -> None:
    """Attach weights before a module runs, and take them back after it, also after an error."""
    for call in stream.calls:
        enter, leave = partial(_enter, stream, call), partial(apart_from_graphs, stream.leave, call)
        call.module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        if call.unit.experts:
            validate = partial(_validate_experts, stream, call.unit)
            # Before ``leave``, after which other units may take the buffer.
            call.module.register_forward_hook(validate, with_kwargs=True)
        call.module.register_forward_hook(leave, always_call=True)


def _enter(
    stream: WeightStream,
    call: Call,
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Lend the weights; refuse inputs with gradients, for which the weights would be saved."""
    inputs = (*args, *kwargs.values())
    if torch.is_grad_enabled() and any(
        isinstance(t, torch.Tensor) and t.requires_grad for t in inputs
    ):
        message = (
            f"Unit {call.unit.name!r} was called with a tensor that requires a gradient, and its"
            " weights are in memory while it runs forward alone: backward would need them. Compute"
            " under torch.no_grad(), or place the model with an optimizer in place of None."
        )
        raise OptionError(message)
    apart_from_graphs(_attach, stream, call, module, args, kwargs)


def _attach(
    stream: WeightStream,
    call: Call,
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    stream.enter(call, routed_experts(module, args, kwargs) if call.unit.experts else frozenset())


def _validate_experts(
    stream: WeightStream,
    unit: StreamedUnit,
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    _: object,
) -> None:
    read = unit.present if stream.link is None else unit.copied_experts
    validate_routing(module, routed_experts(module, args, kwargs), read)


def _decline_compilation(model: nn.Module) -> None:
    """Let ``generate()`` not compile the model on its own, as for weights that others offload.

    With a static cache on a GPU transformers would, and a CUDA graph keeps the addresses of weights
    that are in other memory at each call.
    """
    name = "_valid_auto_compile_criteria"
    if hasattr(model, name):
        setattr(model, name, _refuse_compilation)


def _refuse_compilation(_: object, generation_config: Any) -> bool:  # noqa: ANN401  # transformers'
    """Return False: what ``generate()`` asks before it compiles the model."""
    if generation_config.compile_config is not None:
        message = (
            "generate() was given compile_config=, and weights of this model are in memory only"
            " while their unit runs, which a CUDA graph cannot follow. Leave it out."
        )
        raise OptionError(message)
    return False


def _refuse_cache_of_cuda(
    device: torch.device, _: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Refuse a cache of keys and values that transformers moves by torch.cuda."""
    for cache in (*args, *kwargs.values()):
        parts = (cache, getattr(cache, "self_attention_cache", None))
        if any(getattr(part, "offloading", False) is True for part in parts):
            message = (
                f"A {type(cache).__name__} was given that is offloaded (cache_implementation="
                '"offloaded" or "offloaded_static"): transformers moves it by torch.cuda, and this'
                f" model computes on {device}. Leave it out, or give generate() fewer sequences."
            )
            raise OptionError(message)


def _refuse_changed(versions: Sequence[_Version], *_: object) -> None:
    """Raise OptionError if a weight that stays in memory was written to since ``stow``."""
    for name, reference, version in versions:
        parameter = reference()
        if parameter is not None and parameter._version != version:  # noqa: SLF001
            message = (
                f"{name} was written to, and the model is only read: the same change of a weight on"
                " disk would be lost. Change weights before stow(), or in the files."
            )
            raise OptionError(message)
