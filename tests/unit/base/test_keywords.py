"""A keyword that a public function or class does not have is named, with the one that was meant."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tensorstow
from tensorstow import deepspeed, tensornvme
from tensorstow.base.errors import KeywordError, OptionError
from tensorstow.base.keywords import keywords_of, names_keywords, refuse_unknown_keywords
from tensorstow.colossalai import CPUAdam, HybridAdam
from tensorstow.colossalai.booster import Booster, plugin
from tensorstow.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

NOT_CALLED = {"StowError", "Tier", "__version__", "errors"}
"""An exception, an enumeration, a text and a module."""
PUBLIC = [
    *(getattr(tensorstow, name) for name in tensorstow.__all__ if name not in NOT_CALLED),
    *(deepspeed.initialize, DeepSpeedCPUAdam, FusedAdam),
    *(CPUAdam, HybridAdam, Booster, plugin.GeminiPlugin, plugin.LowLevelZeroPlugin),
    *(plugin.TorchDDPPlugin, plugin.TorchFSDPPlugin),
    *(tensornvme.DiskOffloader, tensornvme.AsyncFileWriter),
]


@names_keywords
def joined(first: str, /, second: str = "b", *, third: str = "c") -> str:
    """Return all."""
    return first + second + third


@pytest.mark.parametrize("target", PUBLIC, ids=lambda target: target.__name__)
def test_every_public_name_refuses_an_unknown_keyword(target: Callable[..., Any]) -> None:
    weights = [nn.Parameter(torch.ones(1))]
    before: dict[object, tuple[object, ...]] = {
        tensorstow.StowedOptimizer: (torch.optim.SGD, weights),
        tensorstow.stow: (nn.Linear(2, 2), tensorstow.AdamW),
    }
    given = before.get(target, () if keywords_of(target) else (weights,))
    known = keywords_of(target) or ["states"]
    with pytest.raises(KeywordError, match=rf"called with {known[-1]}x=.*mean {known[-1]}=\?"):
        target(*given, **{f"{known[-1]}x": 1})


def test_an_error_is_a_type_error_and_one_of_ours() -> None:
    with pytest.raises(TypeError, match=r"^joined\(\) was called with secnd=.*mean second=\?$"):
        joined("a", secnd="b")  # type: ignore[call-arg]
    with pytest.raises(OptionError, match=r"zzz=, which it does not have\. It has second, third\."):
        joined("a", zzz="b")  # type: ignore[call-arg]
    assert joined("a", third="d") == "abd"
    with pytest.raises(TypeError, match="positional argument"):
        joined()  # type: ignore[call-arg]


def test_signatures_stay_as_they_are() -> None:
    assert str(inspect.signature(joined)).startswith("(first: str, /, second: str = 'b', *,")
    assert next(iter(inspect.signature(tensorstow.Plan).parameters)) == "parameters"
    assert joined.__name__ == "joined"
    assert tensorstow.Plan(states="disk") == tensorstow.Plan(states="disk")


def test_what_takes_any_keyword_has_none_to_name() -> None:
    def anything(**options: int) -> dict[str, int]:
        return options

    assert keywords_of(anything) is None
    with pytest.raises(OptionError, match="anything takes any keyword"):
        names_keywords(anything)
    refuse_unknown_keywords("f", ["a"], ["a", "b"])


def test_a_class_is_named_as_it_was_called() -> None:
    class Own(HybridAdam):
        pass

    with pytest.raises(KeywordError, match=r"^Own\(\) was called with learning_rat="):
        Own([], learning_rat=1)  # type: ignore[call-arg]


def test_keywords_of_a_stowed_class_and_of_a_partial_are_named() -> None:
    weights = [nn.Parameter(torch.ones(3))]
    for wrong, right in (("momentm", "momentum"), ("state", "states"), ("ram_buget", "ram_budget")):
        with pytest.raises(KeywordError, match=rf"^SGD\(\) .*{wrong}=.* mean {right}=\?"):
            tensorstow.StowedOptimizer(torch.optim.SGD, weights, lr=1.0, **{wrong: 1})
    with pytest.raises(KeywordError, match=r"^AdamW\(\) .*state=.* mean states=\?"):
        tensorstow.stow(nn.Linear(2, 2), partial(tensorstow.AdamW, state="disk"))
