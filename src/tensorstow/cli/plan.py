"""`tensorstow plan`: what a run of a model will hold, before anything is allocated."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from tensorstow.base.budget import Budget
from tensorstow.base.errors import BudgetError, OptionError
from tensorstow.base.plan import Plan
from tensorstow.base.sizes import format_bytes, parse_size
from tensorstow.base.tiers import Tier
from tensorstow.cli.output import (
    add_json,
    make_console,
    print_facts,
    print_json,
    print_line,
    print_table,
)
from tensorstow.fsdp.units import units_of
from tensorstow.measure.models import KNOWN, NamedModel, build_model
from tensorstow.planner.placement import Conditions, bytes_of, candidates, fit, items_of
from tensorstow.planner.sizes import Sizes

if TYPE_CHECKING:
    from tensorstow.measure.activations import Activations

_LABEL_COLUMNS = 14
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Alternative:
    """A placement that was tried."""

    plan: Plan
    short: dict[Tier, int]
    """Bytes that the budget lacks, by tier; empty: it fits."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a configuration of transformers (file or folder), module:function that builds a"
        f" module, or one of {', '.join(KNOWN)}",
    )
    for tier, what in (
        ("device", "an accelerator's memory for each rank; 0: the CPU computes (default: 0)"),
        ("host", "host memory for each rank, 64GiB say (default: no limit)"),
        ("disk", "disk space for each rank (default: no limit)"),
    ):
        parser.add_argument(f"--{tier}", metavar="SIZE", help=what)
    parser.add_argument(
        "--world-size", metavar="N", type=int, default=1, help="ranks that share the model"
    )
    parser.add_argument("--batch", metavar="B", type=int, help="sequences of a micro-batch")
    parser.add_argument("--seq", metavar="S", type=int, help="tokens of a sequence")
    parser.add_argument(
        "--dtype", choices=list(_DTYPES), help="of parameters (default: the model's own)"
    )
    parser.add_argument(
        "--commits", action="store_true", help="the run commits: what commits take of the disk too"
    )
    add_json(parser)


def run(given: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    facts = examine(given)
    if given.json:
        print_json(facts)
    else:
        _print_facts(facts)
    return 0


def examine(given: argparse.Namespace) -> dict[str, Any]:
    """Return everything that the command prints, as plain values.

    Raises:
        BudgetError: No placement fits; it says what is short, and the smallest change that fits.
        OptionError: An argument makes no sense.
    """
    _check(given)
    model = build_model(given.model, _DTYPES.get(given.dtype))
    here = given.device is None or parse_size(given.device, "--device") == 0
    budget = Budget(None if here else given.device, given.host, given.disk)
    sizes = Sizes.of(units_of(model.module), given.world_size)
    traced = _traced(model, given)
    conditions = Conditions(here, commits=given.commits)
    if traced is not None:
        held = traced.beside_gradients if here else traced.peak_bytes
        conditions = replace(conditions, activation_bytes=max(held, 0))
    tried = _try_all(sizes, budget, conditions)
    fitting = [each for each in tried if not each.short]
    if not fitting:
        raise BudgetError(_what_is_short(tried[-1], budget))
    chosen = fitting[0].plan
    return {
        "model": _describe(model, sizes),
        "activations": None
        if traced is None
        else {
            "batch": given.batch,
            "sequence": given.seq,
            "bytes": conditions.activation_bytes,
            "operations": traced.operations,
        },
        "plan": _fields(chosen),
        "held": [
            {"tier": str(item.tier), "what": item.what, "bytes": item.nbytes}
            for item in items_of(chosen, sizes, conditions)
        ],
        "tiers": {
            str(tier): {"bytes": nbytes, "budget": budget.bytes_of(tier)}
            for tier, nbytes in bytes_of(chosen, sizes, conditions).items()
        },
        "tried": [
            {"plan": _fields(each.plan), "short": {str(t): n for t, n in each.short.items()}}
            for each in tried
        ],
        "code": _code(chosen),
        "deepspeed": _deepspeed(chosen),
    }


def _check(given: argparse.Namespace) -> None:
    asked = {"world-size": given.world_size, "batch": given.batch, "seq": given.seq}
    for name, value in asked.items():
        if value is not None and value < 1:
            message = f"--{name} {value} was given: it is a number, at least 1."
            raise OptionError(message)
    if (given.batch is None) != (given.seq is None):
        message = "--batch and --seq go together: one micro-batch is traced."
        raise OptionError(message)


def _traced(model: NamedModel, given: argparse.Namespace) -> "Activations | None":
    if given.batch is None:
        return None
    if model.config is None:
        message = (
            f"--batch and --seq were given for {model.name}, a module whose inputs are not known:"
            " they are for models of transformers. Leave them out; activations then do not count."
        )
        raise OptionError(message)
    # Torch's memory tracker brings FSDP2, which takes a second that other commands need not wait.
    from tensorstow.measure.activations import trace  # noqa: PLC0415

    return trace(model, given.batch, given.seq)


def _try_all(sizes: Sizes, budget: Budget, conditions: Conditions) -> list[Alternative]:
    tried = []
    for plan in candidates(conditions):
        found = fit(plan, sizes, budget, conditions)
        fits = isinstance(found, Plan)
        tried.append(Alternative(found if fits else plan, {} if fits else found))  # type: ignore[arg-type]
    return tried


def _what_is_short(lowest: Alternative, budget: Budget) -> str:
    """Return what the placement that holds least lacks, and the smallest budget that has it."""
    told = " and ".join(f"{format_bytes(n)} of {t.upper()}" for t, n in lowest.short.items())
    options = []
    for tier, missing in lowest.short.items():
        options.append(f"--{tier} {(budget.bytes_of(tier) or 0) + missing}")
    return (
        f"The model does not fit: placed as low as may be, {told} more than the budget are needed."
        f" The smallest that fits: {' '.join(options)}; or train on more ranks (--world-size)."
    )


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


def _fields(plan: Plan) -> dict[str, Any]:
    """Return what differs from the defaults of a plan, and where everything lives."""
    found: dict[str, Any] = {"parameters": str(plan.parameters), "states": str(plan.states)}
    if plan.overlap != "none":
        found["overlap"] = plan.overlap
    if plan.buffer_pool_bytes is not None:
        found["buffer_pool_bytes"] = plan.buffer_pool_bytes
    return found


def _code(plan: Plan) -> list[str]:
    given = ", ".join(f"{name}={value!r}" for name, value in _fields(plan).items())
    made = "functools.partial(tensorstow.AdamW, lr=1e-4)"
    return [
        "import functools, tensorstow",
        f"plan = tensorstow.Plan({given})",
        f"model, optimizer = tensorstow.stow(model, {made}, plan=plan)",
    ]


_OFFLOAD = {Tier.HOST: "cpu", Tier.DISK: "nvme"}


def _deepspeed(plan: Plan) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": plan.stage}
    for name, tier in (("offload_param", plan.parameters), ("offload_optimizer", plan.states)):
        if tier in _OFFLOAD:
            zero[name] = {"device": _OFFLOAD[tier]}
            if tier == Tier.DISK:
                zero[name]["nvme_path"] = "/nvme"
    return {"zero_optimization": zero}


def _print_facts(facts: dict[str, Any]) -> None:
    console = make_console()
    model = facts["model"]
    dtypes = " and ".join(model["dtypes"])
    frozen = model["parameters"] - model["trained"]
    counted = f"{model['parameters']:,} parameters in {dtypes}, {frozen:,} frozen"
    largest = format_bytes(model["largest_unit_bytes"])
    lines = [
        ("model", f"{model['name']}: {counted}, {model['units']} units of up to {largest}"),
        ("ranks", str(model["ranks"])),
        ("activations", _activations(facts["activations"])),
        ("placement", _told(facts["plan"])),
    ]
    print_facts(console, lines, _LABEL_COLUMNS)
    console.print()
    print_table(console, ["tier", "what", "bytes of one rank", "budget"], _rows(facts))
    rejected = [each for each in facts["tried"] if each["short"]]
    if rejected:
        console.print("\n[bold]placements that do not fit[/]")
    for each in rejected:
        short = ", ".join(f"{format_bytes(n)} of {t} short" for t, n in each["short"].items())
        print_line(console, f"  {_told(each['plan'])}: {short}")
    console.print("\n[bold]to run it[/]")
    for line in facts["code"]:
        print_line(console, f"  {line}")
    console.print("\n[bold]in a DeepSpeed configuration[/]")
    print_line(console, f"  {json.dumps(facts['deepspeed'])[1:-1]}")


def _activations(traced: dict[str, Any] | None) -> str:
    if traced is None:
        return "not counted: say --batch and --seq"
    return (
        f"{format_bytes(traced['bytes'])} beside all gradients, for {traced['batch']} x"
        f" {traced['sequence']} tokens"
    )


def _told(plan: dict[str, Any]) -> str:
    rest = "".join(
        f", {name} {format_bytes(value) if name == 'buffer_pool_bytes' else value}"
        for name, value in plan.items()
        if name not in {"parameters", "states"}
    )
    return f"parameters on {plan['parameters'].upper()}, states on {plan['states'].upper()}{rest}"


def _rows(facts: dict[str, Any]) -> Sequence[Sequence[str]]:
    rows = []
    for tier, total in facts["tiers"].items():
        own = [item for item in facts["held"] if item["tier"] == tier]
        rows += [[tier, item["what"], format_bytes(item["bytes"]), ""] for item in own]
        limit = total["budget"]
        if own:
            budget = "no limit" if limit is None else format_bytes(limit)
            rows.append([tier, "all", format_bytes(total["bytes"]), budget])
    return rows
