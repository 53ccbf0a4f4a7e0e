"""The machine that `tensorstow plan` plans for: its memory, its headroom and its rates."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tensorstow.base.budget import Budget
from tensorstow.base.errors import OptionError
from tensorstow.base.profile import read_profile
from tensorstow.base.sizes import parse_size
from tensorstow.base.tiers import Tier
from tensorstow.fsdp.automatic import total_host_bytes
from tensorstow.measure.cards import CARDS, DISK, Card, card_of, rates_with
from tensorstow.planner.headroom import Headroom, usual_headroom
from tensorstow.planner.network import Network
from tensorstow.planner.seconds import MachineRates

NO_PROFILE = "no profile of this machine: `tensorstow calibrate` makes one"
_NO_LIMIT = "none"
_BITS = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt])(bit|bit/s|bps)", re.IGNORECASE)
_BITS_OR_BYTES = re.compile(r"\d+(?:\.\d+)? ?[kKmMgGtT]b(/s)?")
_PREFIXES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


@dataclass(frozen=True, slots=True)
class Limits:
    """What each rank may use of a machine."""

    budget: Budget
    headroom: Mapping[Tier, Headroom]
    card: Card | None
    host_is_own: bool
    """Whether the limit of host memory is that of this machine."""
    tbw: int | None
    """Bytes that the drive may be written; None: not given."""
    network: Network | None
    """None: one machine."""

    @property
    def device_is_host(self) -> bool:
        """Return whether the CPU computes."""
        return self.budget.device is None


def limits_of(options: argparse.Namespace) -> Limits:
    """Return what the options say of the machine; host memory is this machine's if they do not.

    Raises:
        OptionError: A value is no size, or a card has no rates.
    """
    card = None if options.card is None else card_of(options.card)
    device = 0 if card is None else card.memory_bytes
    if options.device is not None:
        device, named_card = _device(options.device)
        card = named_card or card
    if card is not None and not device:
        message = f"--card {options.card} was given with --device 0, where the CPU computes."
        raise OptionError(message)
    on_machine = max(1, options.world_size // max(1, options.machines))
    host, host_is_own = total_host_bytes() // on_machine, options.host is None
    if options.host is not None:
        host = None if options.host == _NO_LIMIT else parse_size(options.host, "--host")
    disk = None if options.disk is None else parse_size(options.disk, "--disk")
    headroom = usual_headroom(device_is_host=not device)
    if options.headroom is not None:
        left_free = parse_size(options.headroom, "--headroom")
        headroom = dict.fromkeys(headroom, Headroom(left_free)) if left_free else {}
    tbw = None if options.tbw is None else parse_size(options.tbw, "--tbw")
    if tbw == 0:
        message = (
            f"--tbw {options.tbw} was given: it is the bytes that a drive may be written, such as"
            " 600TB."
        )
        raise OptionError(message)
    network = _network(options, is_gloo=not device)
    return Limits(Budget(device or None, host, disk), headroom, card, host_is_own, tbw, network)


def _device(text: str) -> tuple[int, Card | None]:
    """Return the memory that --device stands for, and the card if it names one."""
    try:
        return parse_size(text, "--device"), None
    except OptionError as no_size:
        try:
            card = card_of(text)
        except OptionError:
            message = f"{no_size} Or name a card: {', '.join(CARDS)}."
            raise OptionError(message) from no_size
    return card.memory_bytes, card


def machine_of(
    options: argparse.Namespace, limits: Limits
) -> tuple[MachineRates | None, list[str]]:
    """Return the rates to plan with, and which parts of the machine have nominal ones.

    Raises:
        OptionError: The profile cannot be read, or the directory was not measured.
    """
    directory: Path | None = options.directory
    measured = read_profile(options.profile)
    rates, nominal = rates_with(limits.card, measured)
    has_disk = measured is not None and DISK not in nominal
    disk = None if measured is None or not has_disk else measured.rates_of(directory)
    if directory is not None and disk is None:
        if not directory.is_dir():
            message = f"--directory {directory} was given, which is no directory here."
            raise OptionError(message)
        if has_disk:
            message = (
                f"--directory {directory} was given, which was not measured: run `tensorstow"
                f" calibrate {directory}`."
            )
            raise OptionError(message)
    if rates is None:
        return None, nominal
    if disk is None and DISK in nominal:
        disk = rates.rates_of(None)
    kinds = [kind for kind in rates.compute if kind != "cpu"]
    accelerator = next(iter(kinds), "an accelerator")
    device = "cpu" if limits.device_is_host else accelerator
    return MachineRates(rates, device, disk, limits.network), nominal


def _network(options: argparse.Namespace, *, is_gloo: bool) -> Network | None:
    """Return what connects the machines; None for one machine.

    Raises:
        OptionError: The ranks cannot be spread evenly, or the rate is none, or is missing.
    """
    machines, text = options.machines, options.network
    if machines < 1 or options.world_size % machines:
        message = (
            f"--machines {machines} was given with --world-size {options.world_size}: each machine"
            " has as many ranks. Name the ranks of all machines together."
        )
        raise OptionError(message)
    if (machines == 1) != (text is None):
        message = "--machines and --network go together: several machines, and what connects them."
        raise OptionError(message)
    if text is None:
        return None
    if _BITS_OR_BYTES.fullmatch(text):
        message = f"--network {text} may be bits or bytes: write 100Gbit, or 12GB."
        raise OptionError(message)
    bits = _BITS.fullmatch(text)
    rate = (
        parse_size(text.removesuffix("/s"), "--network")
        if bits is None
        else float(bits[1]) * _PREFIXES[bits[2].lower()] / 8
    )
    if not rate:
        message = f"--network {text} was given: it is what a machine can send, such as 100Gbit."
        raise OptionError(message)
    return Network(machines, rate, is_gloo=is_gloo)
