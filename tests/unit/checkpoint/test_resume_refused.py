"""What cannot be resumed is refused by name, and neither run nor model is touched."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from crash.world import digest
from models import Vectors
from tensorstow import Adam, AdamW, PipelinePolicy
from tensorstow.base.errors import BudgetError, OptionError, StoreFormatError

Groups = list[dict[str, Any]]


def vectors(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Vectors:
    return Vectors(sizes, dtype)


def groups_of(net: nn.Module) -> Groups:
    first, *rest = net.parameters()
    return [{"params": [first]}, {"params": rest, "weight_decay": 0.0}]


def make(
    directory: Path,
    net: nn.Module,
    groups: Groups | None = None,
    **given: Any,  # noqa: ANN401
) -> AdamW:
    module = {"module": net} if given.pop("named", True) else {}
    policy = PipelinePolicy(chunk_elements=given.pop("chunk_elements", 64))
    return AdamW(
        groups or groups_of(net), states="disk", dir=directory, policy=policy, **module, **given
    )


def train(optimizer: Adam | AdamW) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.cos(parameter.detach())
    optimizer.step()


def reordered(net: nn.Module) -> Groups:
    first, *rest = net.parameters()
    return [{"params": rest}, {"params": [first], "weight_decay": 0.0}]


def one_group(net: nn.Module) -> Groups:
    return [{"params": list(net.parameters())}]


REFUSED: list[tuple[str, tuple[int, ...], dict[str, Any], Callable[[nn.Module], Groups], str]] = [
    (
        "another shape",
        (90, 40, 30),
        {},
        groups_of,
        r"parts\.1 \(bfloat16 \(50,\)\) of the .*40",
    ),
    ("one less", (90, 50), {}, groups_of, r"parts\.2 .* is nothing here"),
    ("one more", (90, 50, 30, 5), {}, groups_of, r"does not \(parts\.3\)"),
    ("another dtype", (90, 50, 30), {"dtype": torch.float32}, groups_of, "float32"),
    ("other groups", (90, 50, 30), {}, one_group, "2 parameter groups and this optimizer 1"),
    (
        "parameters changed places",
        (90, 50, 30),
        {},
        reordered,
        "parts.0 is in parameter group 1 here",
    ),
    ("another format", (90, 50, 30), {"state_format": "int8"}, groups_of, "'int8' was requested"),
    ("unnamed, one less", (90, 50), {"named": False}, groups_of, "not the same"),
    ("unnamed, one more", (90, 50, 30, 5), {"named": False}, groups_of, "does not"),
    ("unnamed, another order", (90, 30, 50), {"named": False}, groups_of, "not the same"),
]


@pytest.mark.parametrize(
    ("sizes", "given", "groups", "told"),
    [row[1:] for row in REFUSED],
    ids=[row[0] for row in REFUSED],
)
def test_refused(
    sizes: tuple[int, ...],
    given: dict[str, Any],
    groups: Callable[[nn.Module], Groups],
    told: str,
    tmp_path: Path,
) -> None:
    given = dict(given)
    named = given.get("named", True)
    net = vectors(90, 50, 30)
    optimizer = make(tmp_path, net, named=named)
    train(optimizer)
    optimizer.commit()
    wanted = digest([net.state_dict(), optimizer.state_dict()])
    optimizer.close()

    other = vectors(*sizes, dtype=given.pop("dtype", torch.bfloat16))
    before = digest(other.state_dict())
    optimizer = make(tmp_path, other, groups(other), **given)
    saved = digest(optimizer.state_dict())
    with pytest.raises(OptionError, match=told):
        optimizer.resume()
    assert digest(other.state_dict()) == before
    assert digest(optimizer.state_dict()) == saved
    with pytest.raises(OptionError, match=r"Call resume\(\) first"):
        train(optimizer)  # nor is the run buried
    optimizer.close()

    net = vectors(90, 50, 30)
    with torch.no_grad():
        net.parts[0].fill_(7)
    optimizer = make(tmp_path, net, named=named)
    assert optimizer.resume() == 1
    assert digest([net.state_dict(), optimizer.state_dict()]) == wanted
    optimizer.close()


Rule = tuple[type[Adam | AdamW], dict[str, bool]]
W: Rule = (AdamW, {})
PLAIN: Rule = (Adam, {})
DECOUPLED: Rule = (Adam, {"decoupled_weight_decay": True})
AMSGRAD: Rule = (AdamW, {"amsgrad": True})


def run_of(rule: Rule, directory: Path, net: nn.Module) -> Adam | AdamW:
    made, given = rule
    return made(net.parameters(), states="disk", dir=directory, commit_every=None, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrote", "asks", "told"),
    [
        (W, PLAIN, r"by AdamW\(amsgrad=False\), and this optimizer is Adam\(amsgrad=False\)"),
        (PLAIN, W, r"by Adam\(.*is AdamW\(.*Construct tensorstow\.Adam\(amsgrad=False, \.\.\.\)"),
        (DECOUPLED, PLAIN, r"by AdamW\(.*is Adam\("),
        (AMSGRAD, W, r"by AdamW\(amsgrad=True\).*is AdamW\(amsgrad=False\)"),
        (W, AMSGRAD, r"by AdamW\(amsgrad=False\).*is AdamW\(amsgrad=True\)"),
    ],
)
def test_another_rule_is_refused(wrote: Rule, asks: Rule, told: str, tmp_path: Path) -> None:
    net = vectors(90, dtype=torch.float32)
    optimizer = run_of(wrote, tmp_path, net)
    train(optimizer)
    optimizer.commit()
    optimizer.close()
    other = vectors(90, dtype=torch.float32)
    before = digest(other.state_dict())
    optimizer = run_of(asks, tmp_path, other)
    rule = [optimizer.param_groups[0][k] for k in ("decoupled_weight_decay", "amsgrad")]
    with pytest.raises(OptionError, match=told):
        optimizer.resume()
    assert digest(other.state_dict()) == before
    assert [optimizer.param_groups[0][k] for k in ("decoupled_weight_decay", "amsgrad")] == rule
    optimizer.close()
    optimizer = run_of(wrote, tmp_path, other)
    assert optimizer.resume() == 1
    assert digest(other.state_dict()) == digest(net.state_dict())
    optimizer.close()


@pytest.mark.parametrize(("wrote", "asks"), [(W, DECOUPLED), (DECOUPLED, W)])
def test_an_equal_rule_by_another_name_is_resumed(wrote: Rule, asks: Rule, tmp_path: Path) -> None:
    net = vectors(90)
    optimizer = run_of(wrote, tmp_path, net)
    train(optimizer)
    optimizer.commit()
    optimizer.close()
    optimizer = run_of(asks, tmp_path, vectors(90))
    assert optimizer.resume() == 1
    optimizer.close()


def test_a_snapshot_that_is_not_there(tmp_path: Path) -> None:
    net = vectors(40)
    optimizer = make(tmp_path, net, one_group(net))
    for which in ("none", 3):
        with pytest.raises(OptionError, match="none at all"):
            optimizer.resume(which)
    train(optimizer)
    optimizer.commit()
    with pytest.raises(OptionError, match="There are: 1"):
        optimizer.resume("none")
    assert optimizer.resume(1) == 1
    optimizer.close()


def test_a_budget_that_is_too_small_for_the_chunks_of_the_run(tmp_path: Path) -> None:
    net = vectors(70_000)
    optimizer = make(tmp_path, net, one_group(net), chunk_elements=1 << 16)
    train(optimizer)
    optimizer.commit()
    wanted = digest([net.state_dict(), optimizer.state_dict()])
    optimizer.close()
    optimizer = make(tmp_path, net, one_group(net), chunk_elements=64, ram_budget="300KiB")
    with pytest.raises(BudgetError, match=r"300.0 KiB was given: the ring needs"):
        optimizer.resume()
    assert len(optimizer._params().all()) == 1  # it still is what it was
    optimizer.close()
    optimizer = make(tmp_path, net, one_group(net), chunk_elements=64, ram_budget="3MiB")
    assert optimizer.resume() == 1
    assert digest([net.state_dict(), optimizer.state_dict()]) == wanted
    optimizer.close()


def test_checksums_over_other_blocks_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = vectors(100)
    optimizer = make(tmp_path, net)
    optimizer.commit()
    optimizer.close()
    before = digest(net)
    monkeypatch.setattr("tensorstow._native.UPDATE_BLOCK", 1 << 16)
    again = make(tmp_path, net)
    with pytest.raises(StoreFormatError, match="checksums over 16384 elements"):
        again.resume()
    assert digest(net) == before
    again.close()
