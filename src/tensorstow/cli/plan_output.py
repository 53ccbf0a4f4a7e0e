"""Text output of `tensorstow plan`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from tensorstow.base.plan import by_unit
from tensorstow.base.sizes import format_bytes, format_count
from tensorstow.cli.output import (
    format_rate,
    make_console,
    print_facts,
    print_line,
    print_table,
)
from tensorstow.measure.cards import ACCELERATOR, DISK, HOST_MEMORY
from tensorstow.planner.search import FITS_TOO

_LABEL_COLUMNS = 14
_SIZES = ("ram_budget", "weight_ram_budget", "activation_ram_budget")
_NO_GEMINI = (
    "Gemini cannot express this plan: with it parameters are fp32 or bf16, on one tier that is not"
    " the disk, and nothing commits"
)
_NOMINAL = {
    ACCELERATOR: "{card}",
    HOST_MEMORY: "DDR4-3200 memory",
    DISK: "an NVMe drive on PCIe 4",
}


@dataclass(frozen=True, slots=True)
class Shown:
    """What is printed in addition to the plan."""

    all: bool = False
    """Placements that do not fit."""
    deepspeed: bool = False
    gemini: bool = False


def print_plan(facts: dict[str, Any], shown: Shown) -> None:
    """Print what ``plan.examine`` returned."""
    console = make_console()
    print_facts(console, describe(facts), _LABEL_COLUMNS)
    console.print()
    print_table(console, ["tier", "what", "bytes of one rank", "budget"], _rows(facts))
    alternatives = list(other_placements(facts, everything=shown.all))
    if alternatives:
        console.print("\n[bold]other placements[/]")
    for placement, reason in alternatives:
        print_line(console, f"  {placement}: {reason}")
    console.print("\n[bold]to run it[/]")
    for line in facts["code"]:
        print_line(console, f"  {line}")
    if shown.deepspeed:
        console.print("\n[bold]as a DeepSpeed configuration[/]")
        print_line(console, f"  {json.dumps(facts['deepspeed'])}")
        _print_lacks(console, facts["deepspeed_lacks"])
    if shown.gemini:
        console.print("\n[bold]with Gemini's arguments[/]")
        for line in facts["gemini"] or [_NO_GEMINI]:
            print_line(console, f"  {line}")
        if facts["gemini"]:
            _print_lacks(console, facts["gemini_lacks"])


def _print_lacks(console: Console, lacks: dict[str, Any]) -> None:
    """Print the parts of a plan that a configuration cannot express."""
    if lacks:
        differences = ", ".join(f"{name} ({value!r} here)" for name, value in lacks.items())
        print_line(console, f"  differs from the plan in {differences}")


def describe(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return labels and texts of the model, its placement, its times and the disk's wear."""
    return [*_model(facts), *_time(facts), *_network(facts["network"]), *_disk(facts)]


def _model(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    model = facts["model"]
    dtypes = " and ".join(model["dtypes"])
    frozen = model["parameters"] - model["trained"]
    counted = f"{model['parameters']:,} parameters in {dtypes}, {frozen:,} frozen"
    largest = format_bytes(model["largest_unit_bytes"])
    yield "model", f"{model['name']}: {counted}, {model['units']} units of up to {largest}"
    yield "ranks", str(model["ranks"])
    yield "activations", _activations(facts["activations"], facts["trace_with"])
    yield "placement", placement_of(facts)
    if (units := facts["plan"].get("parameter_units")) is not None:
        yield "units", units_in_words(units)


def units_in_words(units: Mapping[str, str]) -> str:
    """Return the units of each tier, by name or range."""
    tiers = {
        tier: [name or "the root" for name in units if units[name] == tier]
        for tier in dict.fromkeys(units.values())
    }
    return "; ".join(f"{', '.join(names)} on {tier.upper()}" for tier, names in tiers.items())


def rates_in_words(facts: dict[str, Any]) -> str | None:
    """Return which rates are nominal; None: none, or no seconds are predicted."""
    if not facts["nominal"]:
        return None
    parts = ", ".join(_NOMINAL[part].format(card=facts["card"]) for part in facts["nominal"])
    gpu = "; no GPU was measured" if ACCELERATOR in facts["nominal"] else ""
    return f"nominal, from data sheets: {parts}{gpu}"


def _time(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    step, even, counted_in = facts["step"], facts["break_even"], facts["counted_in"]
    if facts["seconds_unknown"]:
        yield "seconds", f"not predicted: {facts['seconds_unknown']}"
        return
    if (rates := rates_in_words(facts)) is not None:
        yield "rates", rates
    if step is None:
        yield "seconds", f"not predicted: give {facts['trace_with']}"
    else:
        phases = ", ".join(
            f"{phase['name']} {show_seconds(phase['seconds'])}" for phase in step["phases"]
        )
        yield "step", f"{seconds_of_step(facts)}: {phases}"
        busy = ", ".join(
            f"{name} {show_seconds(seconds)}" for name, seconds in step["busy"].items()
        )
        yield "bound by", f"{step['binding']} (at work in a step: {busy})"
        rate = f"{step['tokens_per_second']:,.0f} {counted_in}/s"
        yield counted_in, f"{step['tokens']:,} per step, {rate}"
    if even is None:
        yield "break-even", "nothing is moved"
    else:
        rate = f"{even['tokens_per_second']:,.0f} {counted_in}/s"
        least = f"{even['tokens']:,} {counted_in} per step, {rate}"
        yield "break-even", f"{least}: with more, computing takes longer than any transfer"


def _network(network: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    if network is None:
        return
    sent = network["sent_bytes"]
    total, rate = sum(sent.values()), network["bytes_per_second"]
    parts = ", ".join(f"{name} {nbytes / 1e9:.3g}" for name, nbytes in sent.items())
    seconds = f"{show_seconds(total / rate)} at {format_rate(rate)}"
    traffic = f"each of {network['machines']} machines sends {total / 1e9:.3g} GB per step"
    yield "network", f"{traffic} ({parts}): {seconds}"


def _disk(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    disk = facts["disk"]
    if not disk["written_bytes"]:
        if disk["tbw_bytes"] is not None:
            yield "wear", "none: no step writes to the disk"
        return
    moved = f"{disk['written_bytes'] / 1e9:.3g} GB written and {disk['read_bytes'] / 1e9:.3g} read"
    yield "disk", f"{moved} per step"
    if disk["steps_until_worn"] is not None:
        limit = f"{disk['tbw_bytes'] / 1e12:,.0f} TB"
        yield "wear", f"a drive for {limit} lasts {disk['steps_until_worn']:,} steps"


def other_placements(
    facts: dict[str, Any], *, everything: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield the placements that were not chosen, and why; then the counts of those left out.

    ``everything``: those that do not fit, too.
    """
    rejected = [trial for trial in facts["tried"] if trial["reason"] != "chosen"]
    listed = [trial for trial in rejected if everything or not trial["short"]]
    for alternative in listed:
        yield placement_of(alternative), alternative["reason"]
    if any(alternative["reason"] == FITS_TOO for alternative in listed):
        yield "without rates", "the first that fits is chosen"
    if facts["left_out"]:
        yield f"{facts['left_out']:,} more", "variants of these that gain less than 2%"
    if len(listed) < len(rejected):
        yield f"{len(rejected) - len(listed)} more", "they do not fit; --all lists them"


def seconds_of_step(facts: dict[str, Any]) -> str:
    """Return the time of a step; "about" if rates are nominal."""
    about = "about " if facts["nominal"] else ""
    return about + show_seconds(facts["step"]["seconds"])


def show_seconds(seconds: float) -> str:
    """Return seconds as text, in seconds or milliseconds."""
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def _activations(traced: dict[str, Any] | None, trace_with: str) -> str:
    if traced is None:
        return f"not counted: give {trace_with}"
    held = f"{format_bytes(traced['bytes'])} in addition to gradients"
    if traced["saved_bytes"]:
        held += f", {format_bytes(traced['saved_bytes'])} saved elsewhere"
    if traced["batch"] is None:
        return f"{held}, for the arguments that the function returned"
    return f"{held}, for {traced['batch']} x {traced['sequence']} tokens"


def placement_of(facts: dict[str, Any]) -> str:
    """Return the tiers of parameters and states, and other options, as text."""
    plan = facts["plan"]
    rest = "".join(
        f", {name} {format_bytes(value) if name in _SIZES else value}"
        for name, value in plan.items()
        if name not in {"parameters", "states", "parameter_units"}
    )
    in_format = "" if facts["state_format"] is None else f" in {facts['state_format']}"
    units = _units(plan.get("parameter_units", {}))
    parameters = f"parameters on {plan['parameters'].upper()}{units}"
    return f"{parameters}, states on {plan['states'].upper()}{in_format}{rest}"


def _units(units: dict[str, str]) -> str:
    """Return the number of units on each other tier, as text."""
    tiers = list(by_unit(str)(units, "parameter_units").values())
    return "".join(
        f", {format_count(tiers.count(tier), 'unit')} of them on {tier.upper()}"
        for tier in dict.fromkeys(tiers)
    )


def _rows(facts: dict[str, Any]) -> Sequence[Sequence[str]]:
    rows = []
    for tier, total in facts["tiers"].items():
        items = [item for item in facts["held"] if item["tier"] == tier]
        rows += [[tier, item["what"], format_bytes(item["bytes"]), ""] for item in items]
        limit = total["budget"]
        if items:
            budget = "no limit" if limit is None else format_bytes(limit)
            budget += " (this machine)" if tier == "host" and facts["host_is_own"] else ""
            rows.append([tier, "all", format_bytes(total["bytes"]), budget])
    return rows
