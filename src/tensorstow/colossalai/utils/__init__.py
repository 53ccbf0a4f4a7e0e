"""``colossalai.utils``: the device of this rank, and seeds."""

from tensorstow.colossalai.initialize import set_seed
from tensorstow.fsdp.sharding import current_device as get_current_device

__all__ = ["get_current_device", "set_seed"]
