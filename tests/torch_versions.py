"""What tests ask of the version of torch."""

import pytest
from torch.distributed.fsdp import FSDPModule

CAN_RESET = hasattr(FSDPModule, "reset_iter_state")  # from torch 2.13 on
RESETS_FSDP = pytest.mark.skipif(
    not CAN_RESET, reason="this torch cannot reset FSDP2 after an exception"
)
