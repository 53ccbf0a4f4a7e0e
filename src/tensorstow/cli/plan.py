"""`tensorstow plan`: memory, time and traffic of a run, before anything is allocated."""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tensorstow.base.errors import OptionError, named
from tensorstow.base.plan import Plan
from tensorstow.cli.arguments import DTYPES
from tensorstow.cli.collector import collector_paused
from tensorstow.cli.output import make_console, print_json, print_line
from tensorstow.cli.plan_machine import NO_PROFILE, Limits, limits_of, machine_of
from tensorstow.cli.plan_output import Shown, print_plan
from tensorstow.cli.plan_page import compose
from tensorstow.cli.plan_recipes import Recipe, fields_of, recipes_of
from tensorstow.formats.state_format import StateFormat
from tensorstow.fsdp.initialization import InitialValues
from tensorstow.fsdp.placed_activations import blocks_with_activations
from tensorstow.fsdp.traced_placement import KEPT, TracedPlacement, count_of, placed_elsewhere
from tensorstow.fsdp.units import units_of
from tensorstow.measure.models import NamedModel, build_model, is_causal
from tensorstow.planner.network import traffic_of
from tensorstow.planner.placement import Conditions, bytes_of, items_of
from tensorstow.planner.search import (
    Alternative,
    MicroBatching,
    PlanRequest,
    SearchResult,
    search_by_rates,
    with_placed_activations,
)
from tensorstow.planner.seconds import MachineRates, MicroBatch, break_even_tokens, work_of
from tensorstow.planner.sizes import Sizes

if TYPE_CHECKING:
    from tensorstow.fsdp.traced_activations import Activations

_DTYPES = dict(zip(DTYPES, (torch.float32, torch.bfloat16, torch.float16), strict=True))
_TOKENS = "--batch and --seq"
_FUNCTION = "a module:function that returns the model and the arguments of its forward"
_ANY_TOKENS = 2048
"""Tokens of an estimate of which only the ratios matter."""


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    with collector_paused():
        facts = examine(options)
    if options.html is not None:
        with named("The page", options.html):
            options.html.write_text(compose(facts), encoding="utf-8", errors="backslashreplace")
    if options.json:
        print_json(facts)
        return 0
    shown = Shown(all=options.all, deepspeed=options.deepspeed, gemini=options.gemini)
    print_plan(facts, shown)
    if options.html is not None:
        print_line(make_console(), f"\ndrawn in {options.html}")
    return 0


def examine(options: argparse.Namespace) -> dict[str, Any]:
    """Return everything that the command prints, as plain values.

    Raises:
        BudgetError: No placement fits; the error names the shortage and the smallest change.
        OptionError: An argument makes no sense.
        UserCodeError: The user's function raised an error.
    """
    _check(options)
    limits = limits_of(options)
    machine, nominal = machine_of(options, limits)
    model = build_model(options.model, _DTYPES.get(options.dtype), options.lora)
    traced = _traced(model, options)
    request = _request(model, traced, options, limits)
    result, why_unknown = _search(request, machine, options)
    chosen, plan, sizes = result.chosen, result.chosen.plan, request.sizes
    chosen_request = replace(request, conditions=chosen.conditions, batch=chosen.batch)
    state_format = chosen.conditions.state_format
    batch = (options.batch or 1) * request.base.accumulation_steps // plan.accumulation_steps
    recipe = Recipe(
        plan,
        state_format,
        sizes.compute_dtype,
        options.directory,
        commits=options.commits,
        fills_cache=model.config is not None,
        batch=batch,
        ranks=options.world_size,
        device_is_host=chosen.conditions.device_is_host,
        lora=options.lora,
        ema=options.ema,
    )
    return {
        "model": _describe(model, sizes),
        "trace_with": _TOKENS if _takes_tokens(model) else _FUNCTION,
        "counted_in": "tokens" if model.inputs is None else count_of(model.inputs)[0],
        "activations": _activations(chosen_request, plan, traced, options, batch),
        "plan": fields_of(plan),
        "state_format": None if state_format is None else str(state_format),
        **_holdings(plan, chosen_request),
        "host_is_own": limits.host_is_own,
        "card": None if limits.card is None else limits.card.name,
        "nominal": nominal if chosen.step is not None else [],
        "tried": [_alternative_facts(alternative, result) for alternative in result.distinct()],
        "left_out": len(result.tried) - len(result.distinct()),
        "step": None if traced is None else _step(chosen, sizes),
        "break_even": _break_even(chosen, sizes),
        "seconds_unknown": why_unknown,
        "disk": _wear(plan, chosen_request, limits.tbw),
        "network": _network(plan, sizes, limits),
        **recipes_of(recipe),
    }


def _request(
    model: NamedModel, traced: "Activations | None", options: argparse.Namespace, limits: Limits
) -> PlanRequest:
    """Return the request to search: the model, the limits, and what the options allow."""
    device_is_host = limits.device_is_host
    conditions = Conditions(
        device_is_host,
        commits=options.commits,
        averages=options.ema is not None,
        headroom=limits.headroom,
    )
    if traced is not None:
        conditions = replace(conditions, activations=traced.held())
    units, ranks = units_of(model.module), options.world_size
    codes: dict[str, int] = {}
    if getattr(model.config, "quantization_config", None) is not None:
        values = InitialValues(model.module, options.model)
        codes = values.coded_bytes(units, ranks)
    request = PlanRequest(
        Sizes.of(units, ranks, codes),
        limits.budget,
        conditions,
        Plan(
            accumulation_steps=options.accumulation_steps or 1,
            ordered_reduce=options.ordered_reduce,
        ),
        batch=_batch(model, traced, options),
        formats=(StateFormat.BF16, StateFormat.INT8) if options.allow_inexact else (),
        micro_batchings=_micro_batchings(model, traced, options, KEPT),
        on_device=True,
    )
    if traced is None or not blocks_with_activations(units):
        return request

    def trace(placed: TracedPlacement) -> Iterator[MicroBatching]:
        less_held = _traced(model, options, placed)
        if less_held is not None:
            yield MicroBatching(1, _batch(model, less_held, options), less_held.held())
            yield from _micro_batchings(model, less_held, options, placed)

    return with_placed_activations(request, placed_elsewhere(trace, device_is_host=device_is_host))


def _activations(
    request: PlanRequest,
    plan: Plan,
    traced: "Activations | None",
    options: argparse.Namespace,
    batch: int,
) -> dict[str, Any] | None:
    """Return the traced activations of a micro-batch; None: nothing was traced."""
    if traced is None:
        return None
    held = items_of(plan, request.sizes, request.conditions)
    return {
        "batch": None if options.batch is None else batch,
        "sequence": options.seq,
        "bytes": next((i.nbytes for i in held if i.purpose == "activations"), 0),
        "saved_bytes": request.conditions.activations.saved,
        "operations": traced.operations,
    }


def _holdings(plan: Plan, request: PlanRequest) -> dict[str, Any]:
    """Return the bytes of each tier, item by item, and next to its budget."""
    sizes, conditions = request.sizes, request.conditions
    held = items_of(plan, sizes, conditions)
    tiers = bytes_of(plan, sizes, conditions)
    return {
        "held": [
            {"tier": str(item.tier), "what": item.purpose, "bytes": item.nbytes} for item in held
        ],
        "tiers": {
            str(tier): {"bytes": nbytes, "budget": request.budget.bytes_of(tier)}
            for tier, nbytes in tiers.items()
        },
    }


def _check(options: argparse.Namespace) -> None:
    counts = {
        "world-size": options.world_size,
        "accumulation-steps": options.accumulation_steps,
        "batch": options.batch,
        "seq": options.seq,
    }
    for name, value in counts.items():
        if value is not None and value < 1:
            message = f"--{name} {value} was given: it is a number, at least 1."
            raise OptionError(message)
    if options.ema is not None and not 0 <= options.ema <= 1:
        message = f"--ema {options.ema} was given: it is the decay of an average, from 0 to 1."
        raise OptionError(message)
    if options.accumulation_steps is None and options.batch is None:
        message = "--accumulation-steps auto was given without --batch, which it cuts: say both."
        raise OptionError(message)
    if (options.batch is None) != (options.seq is None):
        message = "--batch and --seq go together: one micro-batch is traced."
        raise OptionError(message)


def _takes_tokens(model: NamedModel) -> bool:
    """Return whether --batch and --seq describe the input of the model's forward."""
    return model.config is not None and is_causal(model.config)


def _traced(
    model: NamedModel, options: argparse.Namespace, placed: TracedPlacement = KEPT
) -> "Activations | None":
    if options.batch is None and model.inputs is None:
        return None
    if options.batch is not None and not _takes_tokens(model):
        message = (
            f"--batch and --seq were given for {model.name}, whose inputs are not known: they are"
            " for language models of transformers. Leave them out; activations count if a"
            " module:function returns the model and the arguments of its forward."
        )
        raise OptionError(message)
    # Torch's counter of operations imports triton, which takes a second.
    from tensorstow.measure.activations import trace, trace_function  # noqa: PLC0415

    if model.inputs is not None:
        return trace_function(model, placed)
    return trace(model, options.batch, options.seq, placed)


def _batch(
    model: NamedModel, traced: "Activations | None", options: argparse.Namespace
) -> MicroBatch:
    """Return the work of a micro-batch: as traced, or estimated from the parameters."""
    if traced is None:
        parameters = sum(p.numel() for p in model.module.parameters())
        return MicroBatch.estimate(parameters, _ANY_TOKENS)
    tokens = count_of(model.inputs)[1] if model.inputs is not None else options.batch * options.seq
    return traced.micro_batch(tokens)


def _micro_batchings(
    model: NamedModel,
    traced: "Activations | None",
    options: argparse.Namespace,
    placed: TracedPlacement,
) -> tuple[MicroBatching, ...]:
    """Return the micro-batchings that --batch may be cut into, fewest first."""
    if options.accumulation_steps is not None or traced is None or options.batch in {None, 1}:
        return ()
    from tensorstow.measure.activations import between, trace  # noqa: PLC0415  # as in _traced

    one, micro_batchings = trace(model, 1, options.seq, placed), []
    for times in range(2, options.batch + 1):
        part, rest = divmod(options.batch, times)
        if rest:
            continue
        cut = between(one, traced, options.batch, part)
        batch = cut.micro_batch(part * options.seq)
        micro_batchings.append(MicroBatching(times, batch, cut.held(), placed.placement))
    return tuple(micro_batchings)


def _search(
    request: PlanRequest, machine: MachineRates | None, options: argparse.Namespace
) -> tuple[SearchResult, str | None]:
    """Return the result of the search, and why it has no seconds."""
    result, lacking = search_by_rates(request, machine)
    if lacking is not None and options.profile is not None:
        raise OptionError(lacking)
    if machine is None:
        lacking = NO_PROFILE
    if lacking is None and result.chosen.step is None:
        lacking = "no directory was measured: `tensorstow calibrate DIR` does"
    if lacking is not None and not request.conditions.device_is_host:
        lacking = f"{lacking.rstrip('.')}; or --card plans with a card's nominal rates"
    return result, lacking


def _step(chosen: Alternative, sizes: Sizes) -> dict[str, Any] | None:
    step = chosen.step
    if step is None or chosen.batch is None:
        return None
    tokens = chosen.batch.tokens * chosen.plan.accumulation_steps * sizes.ranks
    return {
        "seconds": step.seconds,
        "binding": step.binding,
        "compute_seconds": step.compute,
        "update_seconds": step.update,
        "busy": step.busy,
        "phases": [
            {"name": phase.name, "seconds": phase.seconds, "busy": dict(phase.loads)}
            for phase in step.phases
        ],
        "tokens": tokens,
        "tokens_per_second": tokens / step.seconds,
    }


def _break_even(chosen: Alternative, sizes: Sizes) -> dict[str, Any] | None:
    """Return the tokens of all ranks above which computing takes longer than any transfer."""
    step, batch = chosen.step, chosen.batch
    if step is None or batch is None:
        return None
    tokens = batch.tokens * chosen.plan.accumulation_steps
    least = break_even_tokens(step, tokens)
    if least is None:
        return None
    compute = step.compute * least / tokens
    tokens = sizes.ranks * least
    return {"tokens": tokens, "tokens_per_second": tokens / (compute + step.update)}


def _wear(plan: Plan, request: PlanRequest, limit: int | None) -> dict[str, Any]:
    """Return what a step reads and writes of the disk, and how many steps a drive lasts."""
    work = work_of(plan, request.sizes, request.conditions)
    worn = limit // work.written if limit is not None and work.written else None
    return {
        "read_bytes": work.read,
        "written_bytes": work.written,
        "tbw_bytes": limit,
        "steps_until_worn": worn,
    }


def _network(plan: Plan, sizes: Sizes, limits: Limits) -> dict[str, Any] | None:
    """Return what each machine sends over the network in a step; None for one machine."""
    if limits.network is None:
        return None
    return {
        "machines": limits.network.machines,
        "bytes_per_second": limits.network.bytes_per_second,
        "sent_bytes": traffic_of(plan, sizes, limits.network).by_collective,
    }


def _alternative_facts(alternative: Alternative, result: SearchResult) -> dict[str, Any]:
    is_estimate = alternative.batch is not None and alternative.batch.is_estimate
    return {
        "plan": fields_of(alternative.plan),
        "state_format": None
        if alternative.conditions.state_format is None
        else str(alternative.conditions.state_format),
        "short": {str(tier): n for tier, n in alternative.short.items()},
        "seconds": None if alternative.step is None or is_estimate else alternative.step.seconds,
        "reason": "chosen" if alternative is result.chosen else result.reason(alternative),
    }


def _describe(model: NamedModel, sizes: Sizes) -> dict[str, Any]:
    parameters = list(model.module.parameters())
    return {
        "name": model.name,
        "parameters": sum(p.numel() for p in parameters),
        "trained": sum(p.numel() for p in parameters if p.requires_grad),
        "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in parameters}),
        "units": len([unit for unit in sizes.units if unit.whole_bytes]),
        "largest_unit_bytes": max(unit.whole_bytes for unit in sizes.units),
        "ranks": sizes.ranks,
    }
