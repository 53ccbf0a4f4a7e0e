"""``deepspeed.accelerator``: the device of this process, by upstream's names."""

from tensorstow.deepspeed.accelerator.real_accelerator import TorchAccelerator, get_accelerator

__all__ = ["TorchAccelerator", "get_accelerator"]
