"""Names of upstream's that scripts use beside the engine."""

import pytest
import torch.distributed as dist

import tensorstow.deepspeed as deepspeed
from tensorstow.deepspeed import comm
from tensorstow.deepspeed.runtime import lr_schedules
from tensorstow.deepspeed.runtime.engine import DeepSpeedEngine
from tensorstow.deepspeed.runtime.utils import see_memory_usage
from tensorstow.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from tensorstow.deepspeed.utils import groups


def test_comm_is_torch_distributed_and_one_rank_needs_no_group() -> None:
    assert comm.all_reduce is dist.all_reduce
    assert comm.ReduceOp is dist.ReduceOp
    assert comm.init_distributed is deepspeed.init_distributed
    assert not hasattr(comm, "no_such_name")
    if not dist.is_initialized():
        assert (comm.get_rank(), comm.get_world_size()) == (0, 1)
        assert groups.get_data_parallel_group() is None
        assert (groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()) == (0, 1)


def test_every_schedule_of_a_configuration_is_a_class() -> None:
    assert len(lr_schedules.VALID_LR_SCHEDULES) == 5
    for name in lr_schedules.VALID_LR_SCHEDULES:
        assert issubclass(getattr(lr_schedules, name), lr_schedules.LRSchedule)


def test_devices_are_the_texts_of_a_configuration() -> None:
    assert [*OffloadDeviceEnum] == ["none", "cpu", "nvme"]
    assert DeepSpeedEngine is deepspeed.DeepSpeedEngine


def test_scripts_write_to_the_log_of_this_package(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="tensorstow"):
        deepspeed.log_dist("here", ranks=[0])
        deepspeed.log_dist("elsewhere", ranks=[1])
        see_memory_usage("not asked")
        see_memory_usage("behind the step", force=True)
    first, second = (record.message for record in caplog.records)
    assert first == "[Rank 0] here"
    assert second.startswith("behind the step: 0 B on the device")
    assert deepspeed.logger.name == "tensorstow"
