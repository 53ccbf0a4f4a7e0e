"""Models without memory, and whole values inside of a context."""

import pytest
import torch
from torch import nn

from ranks.driven import Drive, gathered
from ranks.pool import Ranks
from tensorstow.base.errors import OptionError
from tensorstow.deepspeed import zero
from tensorstow.deepspeed.config.settings import OffloadParam, Zero


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
def test_one_rank_s_change_is_everybody_s(
    ranks: "Ranks",
    world: int,
    bf16: bool,  # noqa: FBT001
    device: str,
) -> None:
    drive = Drive(Zero(3, offload_param=OffloadParam(device)), bf16=bf16)
    for before, behind in ranks(world).run(gathered, drive):
        close = [torch.allclose(a, b, atol=0.1) for a, b in zip(before, behind, strict=True)]
        assert close.count(False) == 1
        changed = behind[close.index(False)]
        assert torch.allclose(changed, torch.full_like(changed, 3.0), atol=0.1)


def test_modules_made_inside_take_no_memory() -> None:
    with zero.Init(config_dict_or_path={"train_batch_size": 1}):
        inside = nn.Linear(3, 2)
    assert inside.weight.is_meta
    assert not nn.Linear(3, 2).weight.is_meta
    with zero.Init(enabled=False):
        assert not nn.Linear(3, 2).weight.is_meta


def test_modules_are_made_in_the_dtype_that_was_asked(caplog: pytest.LogCaptureFixture) -> None:
    with zero.Init(dtype=torch.bfloat16):
        assert nn.Linear(3, 2).weight.dtype == torch.bfloat16
    assert nn.Linear(3, 2).weight.dtype == torch.float32
    assert "reset_parameters" in caplog.text


def test_keywords_are_idle_or_unknown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="tensorstow"):
        zero.Init(remote_device="cpu", pin_memory=True)
    assert "pin_memory, remote_device have no effect here" in caplog.text
    with pytest.raises(OptionError, match="no keyword 'pin_memry': 'pin_memory'"):
        zero.Init(pin_memry=True)


def test_a_module_that_is_made_already_is_refused() -> None:
    with pytest.raises(OptionError, match="has memory already"):
        zero.Init(module=nn.Linear(3, 2))


def test_a_disabled_context_yields_what_it_was_given() -> None:
    weight = nn.Linear(3, 2).weight
    with zero.GatheredParameters(weight, enabled=False) as found:
        assert found[0] is weight


def written_inside(weight: nn.Parameter) -> None:
    with zero.GatheredParameters(weight, modifier_rank=0):
        nn.init.zeros_(weight)


def test_a_write_to_the_sharded_one_is_told() -> None:
    with pytest.raises(OptionError, match="was written inside"):
        written_inside(nn.Linear(3, 2).weight)
