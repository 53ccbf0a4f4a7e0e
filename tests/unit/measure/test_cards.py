"""Nominal cards: their names, and that what is measured goes before them."""

import pytest
import torch

from machines import DISK, PROFILE
from tensorstow.base.errors import OptionError
from tensorstow.base.profile import dtype_key
from tensorstow.measure.cards import ACCELERATOR, CARDS, HOST_MEMORY, card_of, rates_with
from tensorstow.measure.cards import DISK as DISK_PART
from tensorstow.states.update_trial import FAMILIES


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ("4090", "4090"),
        ("RTX 4090", "4090"),
        ("nvidia-geforce-rtx-3090", "3090"),
        ("A100 80GB", "a100-80"),
        ("A100-SXM4-40GB", "a100-40"),
        ("H100", "h100"),
        ("h100 PCIe", "h100-pcie"),
        ("L40S", "l40s"),
    ],
)
def test_a_card_has_many_spellings(given: str, key: str) -> None:
    assert card_of(given) is CARDS[key]


def test_an_unknown_card_is_told_the_nearest() -> None:
    with pytest.raises(OptionError, match=r"--card a100 .*Did you mean a100-\d0\?"):
        card_of("a100")
    with pytest.raises(OptionError, match="rates are known of 3090, 4090"):
        card_of("voodoo")


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_a_card_has_all_rates_that_a_plan_needs(card: object) -> None:
    rates, nominal = rates_with(card, None)  # type: ignore[arg-type]
    assert rates is not None
    assert nominal == [ACCELERATOR, HOST_MEMORY, DISK_PART]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert rates.compute["cuda"].flops[dtype_key(dtype)] > 1e13
    assert len(rates.update) == len(rates.device_update) == len(FAMILIES)
    assert rates.link is not None
    assert rates.rates_of(None) is not None


def test_what_was_measured_goes_before_what_is_nominal() -> None:
    card = CARDS["4090"]
    measured = PROFILE.but(machine={"accelerator": None}, directories={"/nvme": DISK})
    rates, nominal = rates_with(card, measured)
    assert nominal == [ACCELERATOR]
    assert rates is not None
    assert rates.update == measured.update
    assert rates.directories == measured.directories
    assert rates.compute["cpu"] == measured.compute["cpu"]
    assert rates.compute["cuda"] != measured.compute["cuda"]
    measured = measured.but(machine={"accelerator": "NVIDIA GeForce RTX 4090"}, directories={})
    rates, nominal = rates_with(card, measured)
    assert nominal == [DISK_PART]
    assert rates is not None
    assert (rates.compute, rates.link) == (measured.compute, measured.link)
    assert rates_with(CARDS["h100"], measured)[1] == [ACCELERATOR, DISK_PART]  # another card
    assert rates_with(None, measured) == (measured, [])


@pytest.mark.parametrize(
    ("key", "name"),
    [("h100", "NVIDIA H100 80GB HBM3"), ("h100-pcie", "NVIDIA H100 PCIe"), ("l40s", "NVIDIA L40S")],
)
def test_the_names_of_torch_are_known(key: str, name: str) -> None:
    measured = PROFILE.but(machine={"accelerator": name}, directories={"/nvme": DISK})
    assert rates_with(CARDS[key], measured)[1] == []
    assert rates_with(CARDS["3090"], measured)[1] == [ACCELERATOR]
