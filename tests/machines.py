"""A model and machines with round rates, for what predicts seconds."""

import torch

from tensorstow.base.profile import ComputeRates, DirectoryRates, LinkRates, Profile
from tensorstow.planner.placement import Conditions
from tensorstow.planner.seconds import MachineRates, MicroBatch
from tensorstow.planner.sizes import Sizes, UnitSizes

G = 1 << 30
UNITS = 10
SIZES = Sizes(tuple(UnitSizes(str(n), G, G, ((torch.float32, G // 4),)) for n in range(UNITS)))
PARAMETERS = UNITS * G // 4
HERE, AWAY = Conditions(device_is_host=True), Conditions(device_is_host=False)
DISK = DirectoryRates(read=4 * G, write=2 * G, mixed=5 * G, block_bytes=1 << 20, depth=32)
PROFILE = Profile(
    machine={},
    memory_read=20e9,
    memory_write=10e9,
    memory_copy=15e9,
    checksums=1e30,  # of no weight where a test does not say so
    update={"float32/fp32": G / 4},
    device_update={"float32/fp32": 5 * G},
    compute={
        "cpu": ComputeRates({"float32": 1e12}, 1e9, 1e-3, random_elements=1e8),
        "cuda": ComputeRates({"float32": 1e13}, 1e12, 0.0, random_elements=1e11),
    },
    link=LinkRates(up=20 * G, down=10 * G, both=25 * G),
)
CPU = MachineRates(PROFILE, "cpu", DISK)
CUDA = MachineRates(PROFILE, "cuda", DISK)
BATCH = MicroBatch(1000, flops=30 * 10**12)
UPDATE = 10.0
"""Seconds: as many gibi elements as units, a quarter each, at a quarter per second."""
STATES = 2 * UNITS * G
"""Two moments."""
