"""``ColoInitContext``: where a ColossalAI script makes its model."""

import torch

from tensorstow.doorkit.construction import ConstructionContext
from tensorstow.doorkit.keyword_table import checks_keywords, refused

_WHOLE = "parameters are made whole, and Booster.boost shards them"


@checks_keywords(refused(_WHOLE, "default_pg", "default_dist_spec"))
class ColoInitContext(ConstructionContext):
    """A context in which parameters are created on a device and in a dtype, unsharded.

    Args:
        device: Their device: a device, its name, or an accelerator's index. Default: the
            CPU.
        dtype: The dtype that floating point tensors have by default inside.

    Raises:
        OptionError: Parameters would be sharded before they are placed.
    """

    def __init__(
        self,
        device: torch.device | str | int = torch.device("cpu"),  # noqa: B008  # upstream's own
        dtype: torch.dtype = torch.float,
        default_pg: object = None,  # noqa: ARG002
        default_dist_spec: object = None,  # noqa: ARG002
    ) -> None:
        super().__init__(device, dtype)
