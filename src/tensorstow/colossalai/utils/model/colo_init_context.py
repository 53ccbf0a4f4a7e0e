"""``ColoInitContext``: where a ColossalAI script makes its model."""

import torch

from tensorstow.base.errors import OptionError
from tensorstow.doorkit.construction import ConstructionContext


class ColoInitContext(ConstructionContext):
    """A context in which parameters are created on a device and in a dtype, unsharded.

    Args:
        device: Their device: a device, its name, or an accelerator's index. Default: the
            CPU.
        dtype: The dtype that floating point tensors have by default inside.
        default_pg: A process group to shard parameters over; refused unless None.
        default_dist_spec: How to shard them; refused unless None.

    Raises:
        OptionError: Parameters would be sharded before they are placed.
    """

    def __init__(
        self,
        device: torch.device | str | int = torch.device("cpu"),  # noqa: B008  # upstream's own
        dtype: torch.dtype = torch.float,
        default_pg: object = None,
        default_dist_spec: object = None,
    ) -> None:
        if default_pg is not None or default_dist_spec is not None:
            message = (
                f"default_pg={default_pg!r}, default_dist_spec={default_dist_spec!r} were given:"
                " parameters are made whole, and Booster.boost shards them. Leave both out."
            )
            raise OptionError(message)
        super().__init__(device, dtype)
