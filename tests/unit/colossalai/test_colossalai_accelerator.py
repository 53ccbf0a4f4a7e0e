import pytest
import torch

from tensorstow.base.errors import OptionError
from tensorstow.colossalai import accelerator
from tensorstow.colossalai.accelerator import get_accelerator


def test_one_object_for_every_caller() -> None:
    assert get_accelerator() is accelerator.get_accelerator()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="of the CPU alone")
def test_the_cpu_where_there_is_no_accelerator() -> None:
    here = get_accelerator()
    assert here.get_current_device() == torch.device("cpu")
    assert (here.name, here.communication_backend) == ("cpu", "gloo")
    assert here.is_available()
    assert here.device_count() == 1
    here.set_device()
    here.synchronize()
    here.empty_cache()
    with pytest.raises(OptionError, match=r"get_current_device\(\) returns a device"):
        here.current_device()
    for call in (here.memory_allocated, here.max_memory_allocated, here.reset_peak_memory_stats):
        with pytest.raises(OptionError, match=f"{call.__name__}.. was called on the CPU"):
            call()
