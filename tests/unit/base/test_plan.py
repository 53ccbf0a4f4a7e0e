"""Plans: what they take and refuse, and their JSON; test_advice has refusals with a way out."""

import pytest

from tensorstow import Plan, Tier
from tensorstow.base.errors import OptionError


def test_tiers_are_read_from_text() -> None:
    plan = Plan(parameters="disk", states="host", parameter_units={"h.0": "device"})
    assert plan.parameters is Tier.DISK
    assert plan.tier_of("h.0") is Tier.DEVICE
    assert plan.tier_of("h.1") is Tier.DISK


def test_ram_is_another_word_for_the_host() -> None:
    plan = Plan(parameters="disk", states="ram", parameter_units={"h.0": "ram"})
    assert plan == Plan(parameters="disk", states="host", parameter_units={"h.0": "host"})
    assert '"host"' in plan.to_json()
    assert '"ram"' not in plan.to_json()


def test_json_goes_there_and_back() -> None:
    plan = Plan(
        parameters="disk", states="disk", overlap="backward", parameter_units={"h.0": "host"}
    )
    assert Plan.from_json(plan.to_json()) == plan
    plan = Plan(parameters="device", update_on="device")
    assert Plan.from_json(plan.to_json()) == plan
    plan = Plan(activations="disk", activation_units={"h.0": "ram"}, activation_ram_budget="1GiB")
    assert plan.activations_of("h.0") == "host"
    assert plan.activations_of("h.1") == "disk"
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"parameters": "tape"}, '"device", "host" or "disk"'),
        ({"states": 1}, '"device", "host" or "disk"'),
        ({"parameter_units": {"h.0": "tape"}}, r"parameter_units\['h.0'\]"),
        ({"stage": 4}, "a whole number, 0 to 3"),
        ({"overlap": "both"}, '"none", "forward", "backward" or "speculative"'),
        ({"replicas": 0}, "at least 1"),
        ({"accumulation_steps": True}, "at least 1"),
        ({"prefetch": -1}, "at least 0"),
        ({"parameters": "disk", "stage": 2}, "which is stage 3"),
        ({"update_on": "gpu"}, '"host", "device", "hybrid"'),
        ({"update_on": 1.5}, "the share that the device updates"),
        (
            {"update_on": "device", "parameters": "device", "parameter_units": {"h.0": "disk"}},
            "with parameters on disk",
        ),
        ({"activations": "device"}, '"keep", "recompute"'),
        ({"activation_units": {"h.0": "tape"}}, r"activation_units\['h.0'\]"),
        ({"activations": "host", "activation_ram_budget": "1MiB"}, "no unit's activations"),
        ({"states": "disk", "ram_budget": "64"}, "ram_budget"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(given: dict[str, object], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        Plan(**given)


def test_a_misspelt_field_is_told_the_right_one() -> None:
    with pytest.raises(OptionError, match="'overlap'"):
        Plan.from_json('{"overlp": "none"}')


@pytest.mark.parametrize("text", ['{"parameters": "disk"', "[1]", ""])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="A plan is a JSON object"):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("plan", "overlap"),
    [
        (Plan(), "none"),
        (Plan(parameters="device", update_on="device"), "none"),
        (Plan(parameters="disk"), "forward"),
        (Plan(parameters="device", parameter_units={"a": "disk"}), "forward"),
        (Plan(parameters="disk", overlap="backward"), "backward"),
        (Plan(parameters="disk", overlap="none"), "none"),
    ],
)
def test_auto_is_forward_for_weights_on_disk(plan: Plan, overlap: str) -> None:
    assert plan.settled().optimizer_overlap == overlap
