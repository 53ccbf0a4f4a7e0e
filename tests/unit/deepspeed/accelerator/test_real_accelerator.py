"""The device of this process, by upstream's names."""

import pytest
import torch

from tensorstow.deepspeed.accelerator import get_accelerator


@pytest.mark.usefixtures("garbage_apart")
def test_the_cpu_is_an_accelerator_of_one_device() -> None:
    here = get_accelerator()
    assert get_accelerator() is here
    assert here.is_available()
    assert here.is_synchronized_device()
    assert here.device_name() == here.device_name(3) == here.current_device_name() == "cpu"
    assert here.device(0) == torch.device("cpu")
    assert (here.current_device(), here.device_count()) == (0, 1)
    assert here.communication_backend_name() == "gloo"
    assert here.is_bf16_supported()
    assert here.is_fp16_supported()
    assert (here.memory_allocated(), here.max_memory_allocated()) == (0, 0)
    here.set_device(0)
    here.synchronize()
    here.empty_cache()


def test_scripts_draw_and_pin_on_the_cpu_as_on_any_device() -> None:
    here = get_accelerator()
    before = here.get_rng_state()
    for seed in (here.manual_seed, here.manual_seed_all):
        seed(7)
        assert here.initial_seed() == here.random.initial_seed() == 7
        first = torch.rand(2)
        seed(7)
        assert torch.equal(torch.rand(2), first)
    here.set_rng_state(before)
    assert torch.equal(here.get_rng_state(0), before)
    assert here.pin_memory(first) is first
    here.reset_peak_memory_stats()
    assert (here.memory_reserved(), here.max_memory_reserved(0)) == (0, 0)


def test_other_names_are_those_of_the_device_s_module() -> None:
    assert get_accelerator().Stream is torch.cpu.Stream
    assert not hasattr(get_accelerator(), "no_such_name")
