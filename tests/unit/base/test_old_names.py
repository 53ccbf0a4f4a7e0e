"""Old names go on with a warning, which has the new name."""

import json
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import tensorstow
from tensorstow.base.errors import KeywordError
from tensorstow.base.keywords import RENAMED, RENAMED_VALUES, with_new_names


def adam_of(cls: type, directory: Path, **given: Any) -> str:  # noqa: ANN401
    with cls(nn.Linear(2, 2).parameters(), dir=directory, **given) as optimizer:
        return "reference" if "tensorstow" in optimizer.state_dict() else "full"


def stowed_adam(directory: Path, **given: Any) -> str:  # noqa: ANN401
    net, plan = nn.Linear(2, 2), tensorstow.Plan()
    _, optimizer = tensorstow.stow(net, tensorstow.AdamW, plan=plan, dir=directory, **given)
    saved = optimizer.state_dict()
    optimizer.close()
    return "reference" if "tensorstow" in saved else "full"


def planned(field: str, _: Path, **given: Any) -> object:  # noqa: ANN401
    return getattr(tensorstow.Plan(**given), field)


def changed(field: str, _: Path, **given: Any) -> object:  # noqa: ANN401
    return getattr(tensorstow.Plan(parameters=given.pop("parameters")).but(**given), field)


def parsed(field: str, _: Path, **given: Any) -> object:  # noqa: ANN401
    return getattr(tensorstow.Plan.from_json(json.dumps(given)), field)


Use = Callable[[Path], object]
OLD: list[tuple[str, str, Use, object]] = [
    (
        'checkpoints="ticket"',
        'checkpoints="reference"',
        partial(use, checkpoints="ticket"),
        "reference",
    )
    for use in (partial(adam_of, tensorstow.Adam), partial(adam_of, tensorstow.AdamW), stowed_adam)
]
TIERS = {"weight_ram_budget": "disk"}
VALUES = {"parameter_units": {"a": "device"}}
for was, now in RENAMED["Plan"].items():
    value = VALUES.get(now, 1 << 30)
    by_old: dict[str, Any] = {"parameters": TIERS.get(now, "host"), was: value}
    by_new: dict[str, Any] = {"parameters": TIERS.get(now, "host"), now: value}
    OLD += [
        (f"Plan({was}=)", f"{now}=", partial(planned, now, **by_old), value),
        (f"Plan({was}=)", f"{now}=", partial(changed, now, **by_old), value),
        (f"Plan({was}=)", f"{now}=", partial(parsed, now, **by_old), value),
        (f"Plan.{was}", f"Plan.{now}", partial(planned, was, **by_new), value),
    ]
"""An old name, its new one, a use of the old one, and what it returns."""


@pytest.mark.parametrize(("old", "new", "use", "value"), OLD)
def test_an_old_name_goes_on_with_a_warning(
    old: str, new: str, use: Use, value: object, tmp_path: Path
) -> None:
    message = re.escape(f"{old} is deprecated, and the next minor release removes it. Use {new}.")
    with pytest.warns(DeprecationWarning, match=f"^{message}$") as caught:
        assert use(tmp_path) == value
    assert [warning.filename for warning in caught] == [__file__]


def test_each_old_name_is_in_the_table_of_this_test() -> None:
    listed = " ".join(old for old, *_ in OLD)
    assert [o for names in RENAMED.values() for o in names if f"{o}=" not in listed] == []
    assert [
        f'{k}="{o}"' for k, old in RENAMED_VALUES.items() for o in old if f'{k}="{o}"' not in listed
    ] == []


def test_new_names_are_left_alone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given = {"checkpoints": "full", "units": {}, "lr": 1}
        assert with_new_names("AdamW", given) == given


def test_a_keyword_by_both_names_is_refused() -> None:
    given: dict[str, Any] = {"device_limit": "1GiB", "device_budget": "1GiB"}
    with pytest.raises(KeywordError, match=r"device_limit= and device_budget=, its new name"):
        tensorstow.Plan(**given)
