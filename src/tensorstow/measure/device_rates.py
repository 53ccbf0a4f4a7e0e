"""Rates of updates on an accelerator, with states on it."""

from collections.abc import Callable
from functools import partial

import torch

from tensorstow.base.profile import update_key
from tensorstow.formats.reference import adam_scalars
from tensorstow.formats.state_format import StateFormat
from tensorstow.measure.host_rates import fastest, waited
from tensorstow.states.layout import Family
from tensorstow.states.update_trial import FAMILIES, PARAMETERS
from tensorstow.step.segment_update import SegmentUpdate
from tensorstow.step.update_rule import rule_on


def measure_device_updates(device: torch.device, seconds: float = 1.0) -> dict[str, float]:
    """Return parameters per second that an accelerator updates, by "dtype/format".

    Only exact formats are measured. The states are on the accelerator: the link's rates count their
    transfers.
    """
    exact = [(dtype, state_format) for dtype, state_format in FAMILIES if state_format.exact]
    turn = seconds / len(exact)
    return {
        update_key(dtype, state_format): PARAMETERS
        / fastest(waited(device_update_trial(device, dtype, state_format), device), turn)
        for dtype, state_format in exact
    }


def device_update_trial(
    device: torch.device, dtype: torch.dtype, state_format: StateFormat
) -> Callable[[], None]:
    """Return a function that updates ``PARAMETERS`` parameters on an accelerator, as a run does."""
    family = Family(dtype, amsgrad=False, format=state_format)
    streams = [
        torch.zeros(-(-PARAMETERS // spec.per), dtype=spec.dtype, device=device)
        for spec in family.specs
    ]
    rule = rule_on(device, family).rule
    weight, gradient = (torch.zeros(PARAMETERS, dtype=dtype, device=device) for _ in range(2))
    scalars = adam_scalars(
        lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, step=10, decoupled=True
    )
    segment = SegmentUpdate(weight, gradient, 0, 0, scalars, key=0, seed_master=False)
    tables = [
        torch.empty(rule.table_bytes(1), dtype=torch.uint8, device=side)
        for side in (torch.device("cpu"), device)
    ]
    pairs, update = rule.prepare([segment], family, tables[0], tables[1])
    for target, source in pairs:
        target.copy_(source)
    return partial(update, streams)
