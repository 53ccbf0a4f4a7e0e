"""`tensorstow plan`: what a run of a model holds, takes and moves, before anything is allocated."""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tensorstow.base.activation_placement import ActivationPlacement
from tensorstow.base.budget import Budget
from tensorstow.base.errors import DirectoryError, OptionError, advice_for
from tensorstow.base.plan import Plan
from tensorstow.base.profile import Profile, read_profile
from tensorstow.base.sizes import parse_size
from tensorstow.cli.arguments import DTYPES
from tensorstow.cli.collector import collector_paused
from tensorstow.cli.output import make_console, print_json, print_line
from tensorstow.cli.plan_output import print_plan
from tensorstow.cli.plan_page import compose
from tensorstow.cli.plan_recipes import (
    Recipe,
    code_of,
    deepspeed_lacks,
    deepspeed_of,
    fields_of,
    gemini_lacks,
    gemini_of,
)
from tensorstow.formats.state_format import StateFormat
from tensorstow.fsdp.placed_activations import blocks_with_activations
from tensorstow.fsdp.traced_placement import KEPT, TracedPlacement
from tensorstow.fsdp.units import units_of
from tensorstow.measure.models import NamedModel, build_model, is_causal
from tensorstow.planner.placement import Conditions, bytes_of, items_of
from tensorstow.planner.search import (
    Alternative,
    MicroBatching,
    PlanRequest,
    SearchResult,
    fits_with_activations_kept,
    search,
)
from tensorstow.planner.seconds import (
    MachineRates,
    MicroBatch,
    break_even_tokens,
    time_of,
    work_of,
)
from tensorstow.planner.sizes import Sizes

if TYPE_CHECKING:
    from tensorstow.fsdp.traced_activations import Activations

_DTYPES = dict(zip(DTYPES, (torch.float32, torch.bfloat16, torch.float16), strict=True))
_TOKENS = "--batch and --seq"
_FUNCTION = "a module:function that returns the model and the arguments of its forward"
_ANY_TOKENS = 2048
"""Of an estimate whose ratios alone count."""


def run(given: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    with collector_paused():
        facts = examine(given)
    if given.html is not None:
        _write(given.html, compose(facts))
    if given.json:
        print_json(facts)
        return 0
    print_plan(facts)
    if given.html is not None:
        print_line(make_console(), f"\ndrawn in {given.html}")
    return 0


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        message = f"--html {path} was given: {error.strerror}. {advice_for(error.errno or 0)}"
        raise DirectoryError(message) from error


def examine(given: argparse.Namespace) -> dict[str, Any]:
    """Return everything that the command prints, as plain values.

    Raises:
        BudgetError: No placement fits; it says what is short, and the smallest change that fits.
        OptionError: An argument makes no sense.
    """
    _check(given)
    limits = _limits(given)
    model = build_model(given.model, _DTYPES.get(given.dtype))
    traced = _traced(model, given)
    asked = _request(model, traced, given, limits)
    found, machine, unknown = _search(asked, given)
    chosen, plan, sizes = found.chosen, found.chosen.plan, asked.sizes
    request = replace(asked, conditions=chosen.conditions, batch=chosen.batch)
    kept_as = chosen.conditions.state_format
    batch = (given.batch or 1) * asked.base.accumulation_steps // plan.accumulation_steps
    dtype = sizes.trained[0][0] if sizes.trained else torch.float32
    recipe = Recipe(
        plan,
        kept_as,
        dtype,
        None if given.directory is None else str(given.directory),
        commits=given.commits,
        fills_cache=model.config is not None,
    )
    return {
        "model": _describe(model, sizes),
        "trace_with": _TOKENS if _takes_tokens(model) else _FUNCTION,
        "counted_in": "tokens" if model.inputs is None else _count_of(model)[0],
        "activations": _activations(request, plan, traced, given, batch),
        "plan": fields_of(plan),
        "state_format": None if kept_as is None else str(kept_as),
        **_holdings(plan, request),
        "tried": [_told(each, found) for each in found.distinct()],
        "left_out": len(found.tried) - len(found.distinct()),
        "step": None if traced is None else _step(chosen, sizes),
        "break_even": _break_even(plan, request, machine),
        "seconds_unknown": unknown,
        "disk": _wear(plan, request, limits["tbw"]),
        **_recipes(recipe, batch, given.world_size, here=chosen.conditions.device_is_host),
    }


def _request(
    model: NamedModel,
    traced: "Activations | None",
    given: argparse.Namespace,
    limits: Mapping[str, int | None],
) -> PlanRequest:
    """Return what is searched: the model, the limits, and what the options allow."""
    here = not limits["device"]
    conditions = Conditions(here, commits=given.commits)
    if traced is not None:
        conditions = replace(conditions, activations=traced.held())
    request = PlanRequest(
        Sizes.of(units_of(model.module), given.world_size),
        Budget(limits["device"] or None, limits["host"], limits["disk"]),
        conditions,
        Plan(accumulation_steps=given.accumulation_steps or 1),
        batch=_batch(model, traced, given),
        formats=(StateFormat.BF16, StateFormat.INT8) if given.allow_inexact else (),
        micro_batchings=_micro_batchings(model, traced, given, KEPT),
        on_device=True,
    )
    if traced is None or fits_with_activations_kept(request):
        return request
    placed = _placed_elsewhere(model, given, here=here)
    return replace(request, micro_batchings=(*request.micro_batchings, *placed))


def _activations(
    request: PlanRequest,
    plan: Plan,
    traced: "Activations | None",
    given: argparse.Namespace,
    batch: int,
) -> dict[str, Any] | None:
    """Return what was traced of a micro-batch of ``batch`` sequences; None: nothing was."""
    if traced is None:
        return None
    held = items_of(plan, request.sizes, request.conditions)
    return {
        "batch": None if given.batch is None else batch,
        "sequence": given.seq,
        "bytes": next((i.nbytes for i in held if i.what == "activations"), 0),
        "saved_bytes": request.conditions.activations.saved,
        "operations": traced.operations,
    }


def _holdings(plan: Plan, request: PlanRequest) -> dict[str, Any]:
    """Return the bytes of each tier: item by item, and beside the budget."""
    sizes, conditions = request.sizes, request.conditions
    held = items_of(plan, sizes, conditions)
    tiers = bytes_of(plan, sizes, conditions)
    return {
        "held": [
            {"tier": str(item.tier), "what": item.what, "bytes": item.nbytes} for item in held
        ],
        "tiers": {
            str(tier): {"bytes": nbytes, "budget": request.budget.bytes_of(tier)}
            for tier, nbytes in tiers.items()
        },
    }


def _recipes(recipe: Recipe, batch: int, world: int, *, here: bool) -> dict[str, Any]:
    """Return what runs the plan, and what of it each cannot say."""
    configuration = deepspeed_of(recipe, batch, world)
    return {
        "code": code_of(recipe),
        "deepspeed": configuration,
        "deepspeed_lacks": deepspeed_lacks(recipe, configuration, world, here=here),
        "gemini": gemini_of(recipe),
        "gemini_lacks": gemini_lacks(recipe),
    }


def _check(given: argparse.Namespace) -> None:
    asked = {
        "world-size": given.world_size,
        "accumulation-steps": given.accumulation_steps,
        "batch": given.batch,
        "seq": given.seq,
    }
    for name, value in asked.items():
        if value is not None and value < 1:
            message = f"--{name} {value} was given: it is a number, at least 1."
            raise OptionError(message)
    if given.accumulation_steps is None and given.batch is None:
        message = "--accumulation-steps auto was given without --batch, which it cuts: say both."
        raise OptionError(message)
    if (given.batch is None) != (given.seq is None):
        message = "--batch and --seq go together: one micro-batch is traced."
        raise OptionError(message)


def _limits(given: argparse.Namespace) -> dict[str, int | None]:
    """Return the sizes that were given, in bytes, by the names of their options."""
    limits: dict[str, int | None] = {}
    for name in ("device", "host", "disk", "tbw"):
        text = getattr(given, name)
        limits[name] = None if text is None else parse_size(text, f"--{name}")
    if limits["tbw"] == 0:
        message = (
            f"--tbw {given.tbw} was given: it is what a drive may be written in all, 600TB say."
        )
        raise OptionError(message)
    return limits


def _takes_tokens(model: NamedModel) -> bool:
    """Return whether --batch and --seq say what a forward of the model is given."""
    return model.config is not None and is_causal(model.config)


def _traced(
    model: NamedModel, given: argparse.Namespace, placed: TracedPlacement = KEPT
) -> "Activations | None":
    if given.batch is None and model.inputs is None:
        return None
    if given.batch is not None and not _takes_tokens(model):
        message = (
            f"--batch and --seq were given for {model.name}, whose inputs are not known: they are"
            " for language models of transformers. Leave them out; activations count where a"
            " module:function returns the model and the arguments of its forward."
        )
        raise OptionError(message)
    # Torch's memory tracker brings FSDP2, which takes a second that other commands need not wait.
    from tensorstow.measure.activations import trace, trace_function  # noqa: PLC0415

    if model.inputs is not None:
        return trace_function(model, placed)
    return trace(model, given.batch, given.seq, placed)


def _count_of(model: NamedModel) -> tuple[str, int]:
    """Return what a batch of a function's inputs is counted in, and how many it has."""
    given, named = model.inputs or ((), {})
    tensors = [each for each in (*given, *named.values()) if isinstance(each, torch.Tensor)]
    for each in tensors:
        if not each.is_floating_point():
            return "tokens", each.numel()
    return "samples", next((len(each) for each in tensors if each.ndim), 1)


def _batch(
    model: NamedModel, traced: "Activations | None", given: argparse.Namespace
) -> MicroBatch:
    """Return what a micro-batch does: as traced, or as many operations as parameters say."""
    if traced is None:
        parameters = sum(p.numel() for p in model.module.parameters())
        return MicroBatch.estimate(parameters, _ANY_TOKENS)
    tokens = _count_of(model)[1] if model.inputs is not None else given.batch * given.seq
    return traced.micro_batch(tokens)


def _placed_elsewhere(
    model: NamedModel, given: argparse.Namespace, *, here: bool
) -> Iterator[MicroBatching]:
    """Yield what else may be done with activations, from what moves least, as traced."""
    names = blocks_with_activations(units_of(model.module))
    placements: tuple[ActivationPlacement, ...] = ("recompute", "disk")
    if not here:
        placements = ("recompute", "host", "disk")
    found: list[MicroBatching] = []
    for placement in placements if names else ():
        if here or placement != "disk":  # an accelerator has neither: it is as for "host"
            placed = TracedPlacement(placement, device_is_host=here)
            traced = _traced(model, given, placed)
            found = [*_micro_batchings(model, traced, given, placed)]
            if traced is not None:
                whole = MicroBatching(1, _batch(model, traced, given), traced.held())
                found.insert(0, whole)
        yield from (replace(each, placement=placement) for each in found)


def _micro_batchings(
    model: NamedModel,
    traced: "Activations | None",
    given: argparse.Namespace,
    placed: TracedPlacement,
) -> tuple[MicroBatching, ...]:
    """Return the micro-batches that --batch may be cut into, from fewest to most."""
    if given.accumulation_steps is not None or traced is None or given.batch in {None, 1}:
        return ()
    from tensorstow.measure.activations import between, trace  # noqa: PLC0415  # as in _traced

    one, micro_batchings = trace(model, 1, given.seq, placed), []
    for times in range(2, given.batch + 1):
        part, rest = divmod(given.batch, times)
        if rest:
            continue
        each = between(one, traced, given.batch, part)
        batch = each.micro_batch(part * given.seq)
        micro_batchings.append(MicroBatching(times, batch, each.held(), placed.placement))
    return tuple(micro_batchings)


def _search(
    request: PlanRequest, given: argparse.Namespace
) -> tuple[SearchResult, MachineRates | None, str | None]:
    """Return what was found, by rates where they are known, the rates, and why there are none."""
    profile = read_profile(given.profile)
    if profile is None:
        why = "no profile of this machine: `tensorstow calibrate` makes one"
        return search(request), None, why
    machine = _machine(profile, request, given.directory)
    try:
        found = search(replace(request, machine=machine))
    except OptionError as error:
        if given.profile is not None:
            raise
        return search(request), None, str(error)
    if found.chosen.step is None:
        return found, None, "no directory was measured: `tensorstow calibrate DIR` does"
    return found, machine, None


def _machine(profile: Profile, request: PlanRequest, directory: Path | None) -> MachineRates:
    away = next((kind for kind in profile.compute if kind != "cpu"), "an accelerator")
    disk = profile.rates_of(directory)
    if directory is not None and disk is None:
        message = (
            f"--directory {directory} was given, which was not measured: run `tensorstow calibrate"
            f" {directory}`."
        )
        raise OptionError(message)
    return MachineRates(profile, "cpu" if request.conditions.device_is_host else away, disk)


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
            {"name": each.name, "seconds": each.seconds, "busy": dict(each.loads)}
            for each in step.phases
        ],
        "tokens": tokens,
        "tokens_per_second": tokens / step.seconds,
    }


def _break_even(
    plan: Plan, request: PlanRequest, machine: MachineRates | None
) -> dict[str, Any] | None:
    """Return the tokens of all ranks from which on computing takes longer than any transfer."""
    batch = request.batch
    if machine is None or batch is None:
        return None
    step = time_of(plan, request.sizes, request.conditions, batch, machine)
    tokens = batch.tokens * plan.accumulation_steps
    least = break_even_tokens(step, tokens)
    if least is None:
        return None
    compute = step.compute * least / tokens
    ranks = request.sizes.ranks
    return {"tokens": ranks * least, "tokens_per_second": ranks * least / (compute + step.update)}


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


def _told(each: Alternative, found: SearchResult) -> dict[str, Any]:
    guessed = each.batch is not None and each.batch.is_estimate
    return {
        "plan": fields_of(each.plan),
        "state_format": None
        if each.conditions.state_format is None
        else str(each.conditions.state_format),
        "short": {str(tier): n for tier, n in each.short.items()},
        "seconds": None if each.step is None or guessed else each.step.seconds,
        "reason": "chosen" if each is found.chosen else found.reason(each),
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
