"""Arguments of public classes and functions with odd values: taken, or an error of ours."""

import inspect
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attacks.values import ODD
from tensorstow import AdamW, Plan, StowedOptimizer, offload_activations, stow
from tensorstow.base.errors import StowError
from tensorstow.colossalai import CPUAdam, HybridAdam
from tensorstow.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

PATHS = ("loop", "loop/x", "name\udcff", "file", "file/x", "x" * 300, ["a", 3], "~nobody/x")
Call = Callable[..., object]


def _stepped(optimizer: Any) -> None:  # noqa: ANN401  # of any of the classes
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, 0.1)
    optimizer.step()
    optimizer.close()


def _made_by(kind: Any, **others: object) -> Call:  # noqa: ANN401
    return lambda **given: _stepped(kind([nn.Parameter(torch.ones(40))], **{**others, **given}))


def _placed(**given: Any) -> None:  # noqa: ANN401
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    factory = given.pop("optimizer", AdamW)
    _, optimizer = stow(model, factory, **{"plan": Plan(parameters="disk"), **given})
    if optimizer is not None:
        optimizer.close()


def _names_of(kind: Any) -> list[str]:  # noqa: ANN401
    first = {"self", "params", "model_params", "model", "placement", "class_options"}
    return [n for n in inspect.signature(kind).parameters if n not in first]


CALLS: tuple[tuple[Call, list[str]], ...] = (
    (_made_by(AdamW), _names_of(AdamW)),
    (_made_by(AdamW, states="disk"), ["dir", "ram_budget", "durability"]),
    (_made_by(HybridAdam), _names_of(HybridAdam)),
    (_made_by(CPUAdam, nvme_offload_fraction=0.5), _names_of(CPUAdam)),
    (_made_by(DeepSpeedCPUAdam), _names_of(DeepSpeedCPUAdam)),
    (_made_by(FusedAdam), _names_of(FusedAdam)),
    (
        _made_by(lambda params, **given: StowedOptimizer(torch.optim.SGD, params, **given), lr=0.1),
        ["states", "dir", "ram_budget", "elementwise", "per_parameter", "policy", "lr", "nesterov"],
    ),
    (_placed, [*_names_of(stow), "optimizer"]),
    (
        lambda **given: offload_activations(nn.Linear(2, 2), **{"to": "disk", **given}).close(),
        ["to", "ram_budget", "dir", "units"],
    ),
)


def _cases(dice: random.Random) -> Iterator[tuple[Call, str, object]]:
    while True:
        call, names = dice.choice(CALLS)
        name = dice.choice(names)
        paths = PATHS if "dir" in name else ()
        yield call, name, dice.choice((*paths, *paths, *ODD))


def attack(place: Path, tries: int, seed: int) -> list[str]:
    """Call with one odd argument after the other, in the directory ``place``; return faults."""
    (place / "loop").symlink_to("loop")
    (place / "name\udcff").mkdir()
    (place / "file").write_text("")
    cases, wrong = _cases(random.Random(seed)), []  # noqa: S311
    for call, name, value in (next(cases) for _ in range(tries)):
        try:
            call(**{name: value})
        except StowError:
            pass
        except Exception as error:  # noqa: BLE001  # that is the finding
            if not (name == "extra" and isinstance(error, TypeError)):  # what a user's function is
                wrong.append(f"{name}, {type(value).__name__}: a bare {error!r}"[:300])
    return wrong
