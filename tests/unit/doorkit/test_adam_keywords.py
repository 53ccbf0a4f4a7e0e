import inspect
from typing import Any

import pytest
import torch

from tensorstow.base.errors import OptionError
from tensorstow.colossalai import CPUAdam
from tensorstow.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from tensorstow.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from tensorstow.deepspeed.ops.lion import Lion
from tensorstow.doorkit.keyword_table import ADAM


@pytest.mark.parametrize("cls", [CPUAdam, DeepSpeedCPUAdam, FusedAdam])
def test_each_adam_documents_the_shared_keywords(cls: type) -> None:
    text = inspect.getdoc(cls) or ""
    assert all(f": {word.note}" in " ".join(text.split()) for word in ADAM.values())


@pytest.mark.parametrize("cls", [DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, Lion])
def test_smaller_states_are_refused(cls: Any) -> None:  # noqa: ANN401
    with pytest.raises(OptionError, match=r'=False was given to .* state_format="bf16"'):
        cls([torch.nn.Parameter(torch.zeros(2))], fp32_optimizer_states=False)
