"""Nominal rates of common cards and of a usual host, for a plan on a machine without them.

Numbers are from the makers' data sheets: dense products (no sparsity) that add up in fp32, and the
slots' bandwidth each way. A run reaches part of them, by the shares below. `tensorstow calibrate`
measures what a machine has, and goes before all of this.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

import torch

from tensorstow.base.errors import OptionError
from tensorstow.base.profile import (
    ComputeRates,
    DirectoryRates,
    LinkRates,
    Profile,
    dtype_key,
    update_key,
)
from tensorstow.formats.state_format import StateFormat
from tensorstow.states.layout import Family
from tensorstow.states.update_trial import FAMILIES

_PRODUCTS, _BANDWIDTH = 0.6, 0.8
"""Shares of the peak that large products and large copies reach."""
_HOST = 0.8 * 51.2e9
"""Bytes per second of DDR4-3200 in two channels."""
_DISK = DirectoryRates(0.8 * 7e9, 0.8 * 5e9, 0.8 * 5e9, block_bytes=1 << 20, depth=32)
"""An NVMe drive on four lanes of PCIe 4."""
_ELEMENTS = 1 << 10
"""Elements over which bytes of states are averaged: some formats have a scale for many."""
ACCELERATOR, HOST_MEMORY, DISK = "accelerator", "host memory", "disk"
"""Parts of a machine whose rates may be nominal."""


@dataclass(frozen=True, slots=True)
class Card:
    """A card, with the figures of its data sheet."""

    name: str
    memory_gib: float
    """What programs see of it: less than the sheet's, by what firmware and ECC take."""
    memory_gb_per_s: float
    tflops_half: float
    """bf16 and fp16."""
    tflops_single: float
    link_gb_per_s: float
    """PCIe, each way."""
    device_name: str
    """Words that torch's name of the device has."""

    @property
    def memory_bytes(self) -> int:
        """Return the bytes that programs see."""
        return int(self.memory_gib * (1 << 30))


CARDS: Mapping[str, Card] = {
    "3090": Card("GeForce RTX 3090", 23.5, 936, 71, 35.6, 32, "rtx 3090"),
    "4090": Card("GeForce RTX 4090", 23.5, 1008, 165, 82.6, 32, "rtx 4090"),
    "a100-40": Card("A100 40GB", 39.4, 1555, 312, 19.5, 32, "a100 40gb"),
    "a100-80": Card("A100 80GB", 79.1, 2039, 312, 19.5, 32, "a100 80gb"),
    "h100": Card("H100 SXM 80GB", 79.1, 3350, 989, 66.9, 64, "h100 hbm3"),
    "h100-pcie": Card("H100 PCIe 80GB", 79.1, 2000, 756, 51.2, 64, "h100 pcie"),
    "l40s": Card("L40S", 44.5, 864, 362, 91.6, 32, "l40s"),
}
"""Cards by the name that `tensorstow plan --card` takes."""


def card_of(name: str) -> Card:
    """Return a card by its name: "4090", "RTX 4090" and "nvidia-rtx-4090" are one.

    Raises:
        OptionError: The table has no such card.
    """
    key = _key(name)
    cards = {_key(card_name): card for card_name, card in CARDS.items()}
    if key in cards:
        return cards[key]
    near = get_close_matches(key, cards, 1)
    hint = f" Did you mean {next(k for k in CARDS if _key(k) == near[0])}?" if near else ""
    message = (
        f"--card {name} was given: rates are known of {', '.join(CARDS)}.{hint} Give the memory of"
        " another card: --device 24GiB."
    )
    raise OptionError(message)


def _key(name: str) -> str:
    words = re.sub(r"nvidia|geforce|rtx|tesla|sxm\d?", "", name.lower())
    return re.sub(r"[^a-z0-9]|(?<=\d)gi?b", "", words)


def rates_with(card: Card | None, measured: Profile | None) -> tuple[Profile | None, list[str]]:
    """Return the rates to plan with, and which parts of the machine have nominal ones.

    Args:
        card: The card to plan for; None: the machine's own accelerator, or none.
        measured: What was measured; it goes before what is nominal. An accelerator's rates are
            those of another card, unless its name has the card's.
    """
    if card is None:
        return measured, []
    nominal = _nominal(card)
    if measured is None:
        return nominal, [ACCELERATOR, HOST_MEMORY, DISK]
    parts = [] if measured.directories else [DISK]
    rates = measured.but(directories=measured.directories or nominal.directories)
    if _is_measured(card, measured):
        return rates, parts
    cpu = {kind: rate for kind, rate in measured.compute.items() if kind == "cpu"}
    rates = rates.but(
        compute={**cpu, **nominal.compute}, link=nominal.link, device_update=nominal.device_update
    )
    return rates, [ACCELERATOR, *parts]


def _is_measured(card: Card, measured: Profile) -> bool:
    accelerator = str(measured.machine.get("accelerator") or "").lower()
    return all(word in accelerator for word in card.device_name.split())


def _nominal(card: Card) -> Profile:
    memory, link = _BANDWIDTH * 1e9 * card.memory_gb_per_s, _BANDWIDTH * 1e9 * card.link_gb_per_s
    half, single = _PRODUCTS * 1e12 * card.tflops_half, _PRODUCTS * 1e12 * card.tflops_single
    flops = {torch.float32: single, torch.bfloat16: half, torch.float16: half}
    compute = ComputeRates(
        {dtype_key(dtype): rate for dtype, rate in flops.items()},
        tensor_bytes=memory,
        call_seconds=5e-6,
        random_elements=memory / 4,
    )
    return Profile(
        {"accelerator": card.name},
        memory_read=_HOST,
        memory_write=_HOST,
        memory_copy=_HOST,
        checksums=_HOST / 2,
        update=_updates(_HOST),
        device_update=_updates(memory),
        compute={"cuda": compute},
        directories={"": _DISK},
        link=LinkRates(link, link, 2 * link),
    )


def _updates(bytes_per_second: float) -> dict[str, float]:
    """Return parameters per second, of which an update reads and writes all bytes but gradients."""
    rates = {}
    for dtype, state_format in FAMILIES:
        states = Family(dtype, amsgrad=False, format=StateFormat(state_format))
        moved = 3 * dtype.itemsize + 2 * states.state_bytes(_ELEMENTS) / _ELEMENTS
        rates[update_key(dtype, state_format)] = bytes_per_second / moved
    return rates
