"""How large tensors were that operations returned: memory, without counters of the process."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest tensor that an operation returned."""

    nbytes = 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        # An expanded tensor has more elements than memory, and a slice has less.
        held = (min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors)
        self.nbytes = max(self.nbytes, *held, 0)
        return result
