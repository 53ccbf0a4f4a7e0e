"""``deepspeed.runtime.zero.offload_config``: the devices of the sections ``offload_*``."""

from enum import StrEnum


class OffloadDeviceEnum(StrEnum):
    """A device in a configuration; each is equal to the text that JSON has for it."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """What ``engine.offload_states`` may be asked for."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
